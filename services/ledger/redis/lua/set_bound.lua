-- Ask for another bound. It is in force at the first moment rule F holds with it; until then no lease is granted.
-- ARGV: 1 max_staleness (versions), 2 groups_per_step, 3 policy; each may be empty: not changed
-- Returns: 1 if the change is in force, else 0 and then max_staleness, groups_per_step, policy of the pending one. Refuses no_run.
local absent = no_run()
if absent then return absent end
local prefix = R.pending == 1 and 'pending_' or ''
local E = tonumber(ARGV[1]) or R[prefix .. 'max_staleness']
local B = tonumber(ARGV[2]) or R[prefix .. 'groups_per_step']
local policy = ARGV[3] ~= '' and ARGV[3] or R[prefix .. 'policy']
reap()
if E == R.max_staleness and B == R.groups_per_step and policy == R.policy then
  if R.pending == 1 then
    put('pending', 0)
    append('bound', {max_staleness = E, groups_per_step = B, policy = policy})
  end
  return {'ok', 1}
end
local known = R.pending == 1 and E == R.pending_max_staleness and B == R.pending_groups_per_step and policy == R.pending_policy
put('pending', 1)
put('pending_max_staleness', E)
put('pending_groups_per_step', B)
put('pending_policy', policy)
if apply_pending() then return {'ok', 1} end
if not known then append('bound_pending', {max_staleness = E, groups_per_step = B, policy = policy}) end
return {'ok', 0, E, B, policy}
