-- Stop granting leases, for a cause that the trainer found, until `drain` grants them again.
-- ARGV: 1 epoch, 2 cause
-- Returns nothing; a run that is halted keeps its first cause. Refuses no_run, stale_epoch.
local absent = no_run() or fenced(ARGV[1])
if absent then return absent end
if R.halted == '' then
  put('halted', ARGV[2])
  append('halt', {reason = ARGV[2]})
end
return {'ok'}
