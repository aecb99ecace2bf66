-- Stop granting leases, or grant them again; the latter also lets a halted run go on, with no drop counted against it.
-- ARGV: 1 "1" or "0"
-- Returns nothing. Refuses no_run.
local absent = no_run()
if absent then return absent end
local on = tonumber(ARGV[1])
if on == 0 and R.halted ~= '' then
  append('unhalt', {reason = R.halted})
  put('halted', '')
  redis.call('DEL', K.outcomes)
end
if R.draining ~= on then
  put('draining', on)
  append('drain', {on = on == 1})
end
return {'ok'}
