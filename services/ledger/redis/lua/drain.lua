-- Stop granting leases, or grant them again; the latter also ends a halt: drops, and attempts of
-- WAITING and LEASED groups, are counted anew.
-- ARGV: 1 "1" or "0"
-- Returns nothing. Refuses no_run.
local absent = no_run()
if absent then return absent end
local on = tonumber(ARGV[1])
if on == 0 and R.halted ~= '' then
  append('unhalt', {reason = R.halted})
  put('halted', '')
  put('filtered', 0)
  redis.call('DEL', K.outcomes)
  for _, set in ipairs({K.waiting, K.live, K.expired}) do
    for _, id in ipairs(redis.call('ZRANGE', set, 0, -1)) do
      local group = read(id)
      group.attempt = 0
      redis.call('HSET', K.groups, id, cjson.encode(group))
    end
  end
end
if R.draining ~= on then
  put('draining', on)
  append('drain', {on = on == 1})
end
return {'ok'}
