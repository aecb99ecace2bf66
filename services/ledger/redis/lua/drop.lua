-- LEASED or SCORED -> DROPPED, by a caller with the current token.
-- ARGV: 1 group, 2 token, 3 reason, 4 wasted tokens, 5 what led to it
-- Returns nothing; repeating it succeeds. Refuses no_run, unknown_group, not_held, wrong_state (TAKEN, TRAINED).
local absent = no_run()
if absent then return absent end
local group, refusal = held(ARGV[1], ARGV[2])
if refusal then return refusal end
if group.state == 'dropped' then return {'ok'} end
if group.state ~= 'leased' and group.state ~= 'scored' then
  return refuse('wrong_state', 'group ' .. ARGV[1] .. ' is ' .. group.state)
end
drop(pad(ARGV[1]), group, ARGV[3], ARGV[5], tonumber(ARGV[4]))
apply_pending()
return {'ok'}
