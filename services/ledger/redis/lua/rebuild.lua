-- Replace the run by a snapshot, after the server lost acknowledged writes: no lease, no running step, no
-- epoch that may take or commit, no engine that may lease; the registry stays, and so does the run's clock, by which it ends.
-- ARGV: 1-9 as those of create (4-6 the bound in force), 10 JSON of the snapshot (see encode_snapshot), then alternately a step and its StepReport
-- Returns nothing; repeating it with the same epoch changes nothing.
-- Refuses wrong_state (an event was written since the ledger was read). Work: all active groups and what no checkpoint covers.
local S = cjson.decode(ARGV[10])
if R.epoch == S.epoch then return {'ok'} end
if (R.sequence or -1) ~= S.found then
  return refuse('wrong_state', 'the ledger is at event ' .. (R.sequence or -1) .. ', not at ' .. S.found)
end
local clock = now()
local registry = {peers = true, peer_info = true, endpoints = true, refuted = true}
for _, name in ipairs(NAMES) do
  if not registry[name] then redis.call('DEL', K[name]) end
end
redis.call('HSET', K.run, 'fingerprint', ARGV[1], 'prompts', ARGV[2], 'steps', ARGV[3], 'max_staleness', ARGV[4],
  'groups_per_step', ARGV[5], 'policy', ARGV[6], 'max_attempts', ARGV[7], 'drop_share', ARGV[8], 'drop_window', ARGV[9],
  'epoch', S.epoch, 'digest', S.digest, 'resumed', '', 'halted', S.halted)
for name, value in pairs({version = S.version, sequence = S.sequence, archived = S.after, issued = S.issued, trained = S.trained,
  dropped = S.dropped, wasted_tokens = S.wasted_tokens, draining = S.draining, running = -1, checkpoint = S.checkpoint, pending = 0,
  clock = clock, clock_time = R.time, published = -1}) do
  put(name, value)
end
for _, epoch in ipairs(S.epochs) do redis.call('SADD', K.epochs, epoch) end
redis.call('SADD', K.epochs, S.epoch)
for reason, n in pairs(S.reasons) do redis.call('HSET', K.reasons, reason, n) end
for reason, n in pairs(S.wasted_by_reason) do redis.call('HSET', K.wasted, reason, n) end

local function hold(group, state, step)
  local newest = -1e9
  for version, n in pairs(group.counts) do
    if n > 0 then newest = math.max(newest, tonumber(version)) end
  end
  move(pad(group.group), {token = group.token, deadline = group.deadline, max_staleness = group.max_staleness, version = group.version,
    counts = group.counts, newest = newest, attempt = S.attempts[string.format('%.0f', group.group)] or 1, step = step}, state)
end
local scored, waiting = {}, {}
for _, group in ipairs(S.scored) do
  hold(group, 'scored')
  table.insert(scored, group.group)
end
for _, group in ipairs(S.waiting) do
  move(pad(group.group), {attempt = group.attempt}, 'waiting')
  table.insert(waiting, group.group)
end
for _, record in ipairs(S.steps) do
  for _, group in ipairs(record.groups) do hold(group, 'trained', record.step) end
  redis.call('HSET', K.steps, string.format('%.0f', record.step), cjson.encode(record))
end
for i = 11, #ARGV, 2 do redis.call('HSET', K.reports, ARGV[i], ARGV[i + 1]) end
append('rebuild', {epoch = S.epoch, after = S.after, version = S.version, issued = S.issued, trained = S.trained, dropped = S.dropped,
  scored = nonempty(scored), waiting = nonempty(waiting), told = nonempty(S.told)})
return {'ok'}
