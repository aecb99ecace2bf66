-- LEASED -> LEASED, by the holder: the lease runs until now + lease. An expired one needs room in rule F again.
-- ARGV: 1 group, 2 token, 3 lease (ms)
-- Returns nothing. Only extending an expired lease is an event.
-- Refuses no_run, unknown_group, not_held (also once accepted or finished), bound (no room for an expired lease).
local absent = no_run()
if absent then return absent end
local group, refusal = held(ARGV[1], ARGV[2])
if refusal then return refusal end
if group.state ~= 'leased' then return refuse('not_held', 'group ' .. ARGV[1] .. ' is ' .. group.state) end
reap()
local id, expiry = pad(ARGV[1]), now() + tonumber(ARGV[3])
if not expired(id) then
  redis.call('ZADD', K.leases, expiry, id)
  return {'ok'}
end
if not holds(group.deadline) then return refuse('bound', 'group ' .. ARGV[1] .. ' had expired and rule F has no room for it') end
move(id, group, 'leased', expiry)
append('extend', {group = tonumber(id), token = ARGV[2]})
return {'ok'}
