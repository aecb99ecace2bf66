-- Name the groups that never come back: DROPPED, or finished and forgotten. (A TRAINED group that no checkpoint covers may be rewound.)
-- ARGV: groups, at most 512
-- Returns: those of them. Refuses no_run.
local absent = no_run()
if absent then return absent end
local answer = {'ok'}
for i = 1, #ARGV do
  local id = ARGV[i]
  local group = read(pad(id))
  if group and group.state == 'dropped' or not group and tonumber(id) < R.issued then table.insert(answer, id) end
end
return answer
