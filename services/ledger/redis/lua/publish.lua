-- Set the current manifest without a commit: of the committed version, or of an older one that engines are to serve.
-- ARGV: 1 epoch, 2 version, 3 manifest
-- Returns nothing. Refuses no_run, stale_epoch, wrong_state (a version that is not committed).
local absent = no_run() or fenced(ARGV[1])
if absent then return absent end
local version = tonumber(ARGV[2])
if version > R.version then
  return refuse('wrong_state', 'version ' .. version .. ' is not committed; the run is at ' .. R.version)
end
if redis.call('GET', K.manifest) == ARGV[3] then return {'ok'} end
redis.call('SET', K.manifest, ARGV[3])
put('published', version)
append('publish', {epoch = ARGV[1], version = version})
return {'ok'}
