-- TAKEN -> TRAINED for all groups of the running step; version + 1.
-- ARGV: 1 epoch, 2 step, 3 JSON {group: {version: trained tokens}}, 4 digest of the new version (decimal), 5 report, 6 manifest (empty: the version is not
--       published, and engines keep the one before)
-- Returns: the new version; repeating a commit of the same epoch and step returns it again.
-- Refuses no_run, stale_epoch, stale_step, wrong_state (other groups than taken, or more tokens than accepted), bound.
local absent = no_run() or fenced(ARGV[1])
if absent then return absent end
local step, trained = tonumber(ARGV[2]), cjson.decode(ARGV[3])
local before = redis.call('HGET', K.steps, ARGV[2])
if before and step < R.version and cjson.decode(before).epoch == ARGV[1] then return {'ok', step + 1} end
if R.running ~= step then return refuse('stale_step', 'step ' .. step .. ' is not the running one, ' .. R.running) end

local batch, n = cjson.decode(redis.call('GET', K.batch)).groups, 0
for _ in pairs(trained) do n = n + 1 end
if n ~= #batch then return refuse('wrong_state', n .. ' groups committed of ' .. #batch .. ' taken') end
for _, group in ipairs(batch) do
  local name = string.format('%.0f', group.group)
  if not trained[name] then return refuse('wrong_state', 'group ' .. name .. ' was taken and is not committed') end
  for version, count in pairs(trained[name]) do
    if count > 0 and step - tonumber(version) > group.max_staleness then
      return refuse('bound', 'group ' .. name .. ': tokens of version ' .. version .. ' trained at ' .. step .. ' are over the bound '
        .. group.max_staleness)
    end
    if count > (group.counts[version] or 0) then
      return refuse('wrong_state', 'group ' .. name .. ': more tokens of version ' .. version .. ' trained than accepted')
    end
  end
end

for _, taken in ipairs(batch) do
  local id = pad(taken.group)
  local group = read(id)
  group.step = step
  move(id, group, 'trained')
  finish('')
end
put('trained', R.trained + #batch)
put('filtered', 0)
put('version', step + 1)
put('running', -1)
put('digest', ARGV[4])
redis.call('HSET', K.steps, ARGV[2], cjson.encode({step = step, epoch = ARGV[1], digest = ARGV[4], groups = batch}))
redis.call('HSET', K.reports, ARGV[2], ARGV[5])
if ARGV[6] ~= '' then
  redis.call('SET', K.manifest, ARGV[6])
  put('published', step + 1)
end
redis.call('DEL', K.batch)
append('commit', {epoch = ARGV[1], step = step, version = step + 1, digest = ARGV[4], groups = trained, issued = R.issued,
  trained = R.trained, dropped = R.dropped, active = R.issued - R.trained - R.dropped})
apply_pending()
return {'ok', step + 1}
