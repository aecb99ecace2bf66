-- Create the run, or check that it is the one that was created before.
-- ARGV: 1 fingerprint, 2 prompts (-1: no end), 3 steps, 4 max_staleness (versions), 5 groups_per_step, 6 policy, 7 max_attempts,
--       8 drop_share (0..1), 9 drop_window (groups)
-- Returns nothing. An existing run keeps its bound; steps, max_attempts and the drop limits are updated.
-- Refuses run_mismatch (other prompts), wrong_state (steps below the version).
local steps = tonumber(ARGV[3])
if R.fingerprint then
  if R.fingerprint ~= ARGV[1] or R.prompts ~= tonumber(ARGV[2]) then
    local count = R.prompts < 0 and 'without end' or R.prompts
    return refuse('run_mismatch', 'created with prompts ' .. R.fingerprint .. ' (' .. count .. ')')
  end
  if steps < R.version then return refuse('wrong_state', 'steps ' .. steps .. ' is below version ' .. R.version) end
  redis.call('HSET', K.run, 'max_attempts', ARGV[7], 'drop_share', ARGV[8], 'drop_window', ARGV[9])
  if steps ~= R.steps then
    put('steps', steps)
    append('steps', {steps = steps})
  end
  return {'ok'}
end
redis.call('HSET', K.run, 'fingerprint', ARGV[1], 'prompts', ARGV[2], 'steps', ARGV[3], 'max_staleness', ARGV[4],
  'groups_per_step', ARGV[5], 'policy', ARGV[6], 'max_attempts', ARGV[7], 'drop_share', ARGV[8], 'drop_window', ARGV[9],
  'version', 0, 'epoch', '', 'sequence', 0, 'archived', 0, 'issued', 0, 'trained', 0, 'dropped', 0, 'wasted_tokens', 0,
  'halted', '', 'draining', 0, 'running', -1, 'checkpoint', 0, 'pending', 0, 'digest', '', 'resumed', '', 'published', -1)
R.sequence = 0
append('create', {fingerprint = ARGV[1], prompts = tonumber(ARGV[2]), steps = steps, max_staleness = tonumber(ARGV[4]),
  groups_per_step = tonumber(ARGV[5]), policy = ARGV[6]})
return {'ok'}
