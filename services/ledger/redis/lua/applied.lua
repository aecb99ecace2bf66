-- Record that an engine serves (epoch, version).
-- ARGV: 1 engine incarnation, 2 epoch, 3 version
-- Returns nothing; a version older than the one recorded for the same epoch changes nothing.
-- Refuses no_run, refuted, stale_epoch (not of the current branch), wrong_state (a version that is not committed).
local absent = no_run() or refuted(ARGV[1])
if absent then return absent end
local version = tonumber(ARGV[3])
if redis.call('SISMEMBER', K.lineage, ARGV[2]) == 0 then
  return refuse('stale_epoch', 'epoch ' .. ARGV[2] .. ' is not of the current branch')
end
if version > R.version then return refuse('wrong_state', 'version ' .. version .. ' is not committed; the run is at ' .. R.version) end
local known = redis.call('HGET', K.engines, ARGV[1])
if known then
  local epoch, newest = string.match(known, '^(%S*) (%d+)$')
  if epoch == ARGV[2] and tonumber(newest) >= version then return {'ok'} end
end
redis.call('HSET', K.engines, ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
append('applied', {engine = ARGV[1], epoch = ARGV[2], version = version})
return {'ok'}
