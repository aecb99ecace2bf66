-- A durable checkpoint covers all steps below `version`: forget their records and reports, the records of DROPPED groups, and engines that
-- are not registered and serve a version below it (one that comes back has a newer version to apply first).
-- ARGV: 1 version
-- Returns: 1 if more remains than one call forgets (512 groups trained and 512 dropped), else 0. Refuses no_run, wrong_state (not committed).
local absent = no_run()
if absent then return absent end
local version = tonumber(ARGV[1])
if version > R.version then return refuse('wrong_state', 'version ' .. version .. ' is not committed; the run is at ' .. R.version) end
if version > R.checkpoint then
  for step = R.checkpoint, version - 1 do
    redis.call('HDEL', K.steps, string.format('%.0f', step))
    redis.call('HDEL', K.reports, string.format('%.0f', step))
  end
  local engines = redis.call('HGETALL', K.engines)
  for i = 1, #engines, 2 do
    local served = tonumber(string.match(engines[i + 1], '%d+$'))
    if served < version and redis.call('HEXISTS', K.peer_info, engines[i]) == 0 then redis.call('HDEL', K.engines, engines[i]) end
  end
  put('checkpoint', version)
  append('checkpoint', {version = version})
end
local trained = redis.call('ZRANGEBYSCORE', K.trained, '-inf', '(' .. R.checkpoint, 'LIMIT', 0, 512)
for _, id in ipairs(trained) do
  redis.call('ZREM', K.trained, id)
  redis.call('HDEL', K.groups, id)
end
local dropped = redis.call('SPOP', K.dropped, 512)
for _, id in ipairs(dropped) do redis.call('HDEL', K.groups, id) end
return {'ok', (#trained == 512 or #dropped == 512) and 1 or 0}
