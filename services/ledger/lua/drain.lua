-- Stop granting leases, or grant them again.
-- ARGV: 1 "1" or "0"
-- Returns nothing. Refuses no_run.
local absent = no_run()
if absent then return absent end
local on = tonumber(ARGV[1])
if R.draining ~= on then
  put('draining', on)
  append('drain', {on = on == 1})
end
return {'ok'}
