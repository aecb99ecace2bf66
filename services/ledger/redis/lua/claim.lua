-- Make `epoch` the one that holds the run. TAKEN -> SCORED for the groups of a running step.
-- ARGV: 1 epoch
-- Returns: JSON of the status; claiming again with the current epoch changes nothing.
-- Refuses no_run, stale_epoch (an epoch that was fenced before).
local absent = no_run()
if absent then return absent end
if R.epoch == ARGV[1] then return {'ok', status()} end
if redis.call('SADD', K.epochs, ARGV[1]) == 0 then return fenced(ARGV[1]) end
put('epoch', ARGV[1])
local untaken = {}
for _, id in ipairs(redis.call('ZRANGE', K.taken, 0, -1)) do
  move(id, read(id), 'scored')
  table.insert(untaken, tonumber(id))
end
put('running', -1)
redis.call('DEL', K.batch)
append('claim', {epoch = ARGV[1], untaken = nonempty(untaken)})
apply_pending()
return {'ok', status()}
