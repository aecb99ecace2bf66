-- Forget a process, and what it acknowledged as an engine; the leases that it holds expire. A refuted engine is remembered until it is
-- unregistered again without that, and its LEASED groups are released: -> WAITING.
-- ARGV: 1 incarnation, 2 1: an audit refutes the engine; else 0
-- Returns nothing; repeating it succeeds. Refuses nothing; the run need not exist.
-- Reads the record of every live lease, of a refuted engine those of expired ones, too; rule F allows (E + 1) * B live ones.
local refuted = ARGV[2] == '1'
forget_peer(ARGV[1])
redis.call('HDEL', K.engines, ARGV[1])
redis.call(refuted and 'SADD' or 'SREM', K.refuted, ARGV[1])
local held_by = {}
for _, set in ipairs(refuted and {K.leases, K.expired} or {K.leases}) do
  for _, id in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    local group = read(id)
    if group.holder == ARGV[1] then table.insert(held_by, {id = id, group = group}) end
  end
end
for _, one in ipairs(held_by) do
  if refuted then release(one.id, one.group, 'refuted') else expire(one.id) end
end
return {'ok'}
