-- Set the current manifest without a commit.
-- ARGV: 1 epoch, 2 version, 3 manifest
-- Returns nothing. Refuses no_run, stale_epoch, wrong_state (not the committed version).
local absent = no_run() or fenced(ARGV[1])
if absent then return absent end
if tonumber(ARGV[2]) ~= R.version then
  return refuse('wrong_state', 'version ' .. ARGV[2] .. ' is not the committed one, ' .. R.version)
end
if redis.call('GET', K.manifest) == ARGV[3] then return {'ok'} end
redis.call('SET', K.manifest, ARGV[3])
append('publish', {epoch = ARGV[1], version = R.version})
return {'ok'}
