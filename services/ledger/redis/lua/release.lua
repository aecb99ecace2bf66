-- LEASED -> WAITING, by the holder; attempts stay counted.
-- ARGV: 1 group, 2 token, 3 reason
-- Returns nothing; repeating it succeeds. Refuses no_run, unknown_group, not_held, wrong_state.
local absent = no_run()
if absent then return absent end
local group, refusal = held(ARGV[1], ARGV[2])
if refusal then
  if group and group.previous == ARGV[2] then return {'ok'} end
  return refusal
end
if group.state ~= 'leased' then return refuse('wrong_state', 'group ' .. ARGV[1] .. ' is ' .. group.state) end
release(pad(ARGV[1]), group, ARGV[3])
return {'ok'}
