-- Record that a process lives until now + ttl. Forgets at most 128 processes whose time-to-live is over.
-- ARGV: 1 incarnation, 2 JSON of role and info, 3 ttl (ms), 4 JSON {topic: endpoint} of what it serves, or empty
-- Returns nothing. Refuses nothing; the run need not exist.
reap_peers()
redis.call('ZADD', K.peers, now() + tonumber(ARGV[3]), ARGV[1])
redis.call('HSET', K.peer_info, ARGV[1], ARGV[2])
if ARGV[4] ~= (redis.call('HGET', K.endpoints, ARGV[1]) or '') then
  redis.call('HINCRBY', K.endpoints, '', 1)
  if ARGV[4] == '' then redis.call('HDEL', K.endpoints, ARGV[1]) else redis.call('HSET', K.endpoints, ARGV[1], ARGV[4]) end
end
return {'ok'}
