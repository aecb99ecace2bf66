-- Forget a process, and what it acknowledged as an engine.
-- ARGV: 1 incarnation
-- Returns nothing. Refuses nothing.
forget_peer(ARGV[1])
redis.call('HDEL', K.engines, ARGV[1])
return {'ok'}
