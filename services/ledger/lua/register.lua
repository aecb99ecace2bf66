-- A process lives until now + ttl.
-- ARGV: 1 incarnation, 2 JSON of role and info, 3 ttl (ms)
-- Returns nothing. Refuses nothing; the run need not exist.
redis.call('ZADD', K.peers, R.now + tonumber(ARGV[3]), ARGV[1])
redis.call('HSET', K.peer_info, ARGV[1], ARGV[2])
return {'ok'}
