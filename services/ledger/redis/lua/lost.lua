-- SCORED -> WAITING: the spool does not hold the record.
-- ARGV: 1 group, 2 token
-- Returns nothing; repeating it succeeds. Refuses no_run, unknown_group, not_held, wrong_state.
local absent = no_run()
if absent then return absent end
local group, refusal = held(ARGV[1], ARGV[2])
if refusal then
  if group and group.previous == ARGV[2] then return {'ok'} end
  return refusal
end
if group.state ~= 'scored' then return refuse('wrong_state', 'group ' .. ARGV[1] .. ' is ' .. group.state) end
group.previous, group.why = ARGV[2], 'lost'
move(pad(ARGV[1]), group, 'waiting')
append('lost', {group = tonumber(ARGV[1]), token = ARGV[2]})
apply_pending()
return {'ok'}
