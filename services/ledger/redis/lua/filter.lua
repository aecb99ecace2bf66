-- LEASED -> DROPPED for the reason no_signal, by the ingest, whose filter leaves the group out.
-- ARGV: 1 group, 2 token, 3 sampled tokens, 4 mean reward, for the event, 5 most steps' worth of such groups between two commits; 0: any
-- Returns nothing; repeating it succeeds, and a group that was accepted before stays as it is.
-- Refuses no_run, unknown_group, duplicate (finished and forgotten), not_held.
local absent = no_run()
if absent then return absent end
local group, refusal = held(ARGV[1], ARGV[2])
if refusal then
  if not group and tonumber(ARGV[1]) < R.issued then return refuse('duplicate', refusal[3]) end
  return refusal
end
if group.state ~= 'leased' then return {'ok'} end
drop(pad(ARGV[1]), group, NO_SIGNAL, '', tonumber(ARGV[3]), tonumber(ARGV[4]))
put('filtered', (R.filtered or 0) + 1)
local most = tonumber(ARGV[5]) * R.groups_per_step
if most > 0 and R.filtered >= most and R.halted == '' then
  put('halted', NO_SIGNAL)
  append('halt', {reason = NO_SIGNAL})
end
apply_pending()
return {'ok'}
