-- Name the groups that never come back: DROPPED, or finished and forgotten. (A TRAINED group that no checkpoint covers may be rewound.)
-- ARGV: groups
-- Returns: those of them. Refuses no_run.
local absent = no_run()
if absent then return absent end
local answer = {'ok'}
for _, id in ipairs(ARGV) do
  local group = read(pad(id))
  if group and group.state == 'dropped' or not group and tonumber(id) < R.issued then table.insert(answer, id) end
end
return answer
