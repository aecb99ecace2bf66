-- A process is gone; what it acknowledged as an engine is forgotten with it.
-- ARGV: 1 incarnation
-- Returns nothing. Refuses nothing.
redis.call('ZREM', K.peers, ARGV[1])
redis.call('HDEL', K.peer_info, ARGV[1])
redis.call('HDEL', K.engines, ARGV[1])
return {'ok'}
