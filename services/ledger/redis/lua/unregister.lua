-- Forget a process, and what it acknowledged as an engine; the leases that it holds expire.
-- ARGV: 1 incarnation
-- Returns nothing; repeating it succeeds. Refuses nothing; the run need not exist.
-- Reads the record of every live lease; rule F allows (E + 1) * B of them.
forget_peer(ARGV[1])
redis.call('HDEL', K.engines, ARGV[1])
for _, id in ipairs(redis.call('ZRANGE', K.leases, 0, -1)) do
  if read(id).holder == ARGV[1] then expire(id) end
end
return {'ok'}
