-- LEASED -> SCORED, by the ingest once the record is on disk. An expired lease needs room in rule F again.
-- ARGV: 1 group, 2 token, 3 JSON {version: sampled tokens}, 4 mean reward, for the event; may be empty
-- Returns: JSON of the group as `take` lists it; accepting the same token again succeeds.
-- Refuses no_run, unknown_group, duplicate (finished and forgotten), not_held, wrong_state (dropped), bound.
local absent = no_run()
if absent then return absent end
local group, refusal = held(ARGV[1], ARGV[2])
if refusal then
  if not group and tonumber(ARGV[1]) < R.issued then return refuse('duplicate', refusal[3]) end
  return refusal
end
local function answer()
  return {'ok', cjson.encode({group = tonumber(ARGV[1]), token = ARGV[2], deadline = group.deadline, max_staleness = group.max_staleness,
    version = group.version, counts = group.counts})}
end
if group.state == 'scored' or group.state == 'taken' or group.state == 'trained' then return answer() end
if group.state ~= 'leased' then return refuse('wrong_state', 'group ' .. ARGV[1] .. ' is ' .. group.state) end
reap()
local id = pad(ARGV[1])
if expired(id) and not holds(group.deadline) then
  return refuse('bound', 'group ' .. ARGV[1] .. ' had expired and rule F has no room for it')
end
group.counts, group.newest = cjson.decode(ARGV[3]), -1e9
for version, n in pairs(group.counts) do
  if n > 0 then group.newest = math.max(group.newest, tonumber(version)) end
end
move(id, group, 'scored')
append('accept', {group = tonumber(id), token = ARGV[2], counts = group.counts, reward = tonumber(ARGV[4])})
return answer()
