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
group.previous, group.why = ARGV[2], ARGV[3]
move(pad(ARGV[1]), group, 'waiting')
append('release', {group = tonumber(ARGV[1]), token = ARGV[2], reason = ARGV[3]})
apply_pending()
return {'ok'}
