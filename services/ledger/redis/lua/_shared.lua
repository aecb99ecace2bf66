-- Prepended to every script. Names the keys, loads the run, and holds what several transitions share.
--
-- KEYS: those of services/ledger/redis/keys.py in the order of NAMES, which scripts.py prepends.
-- A script returns {'ok', ...} or {'refused', reason, detail}; reasons are those of protocol.errors.Reason.
-- Times are milliseconds of the run's clock, see now(); `time_ms` of events alone is the server's. Versions, deadlines and steps are integers.
-- Group ids are padded strings inside.

local NUMBERS = {'prompts', 'steps', 'max_staleness', 'groups_per_step', 'max_attempts', 'drop_share', 'drop_window', 'version',
  'sequence', 'archived', 'issued', 'trained', 'dropped', 'wasted_tokens', 'draining', 'running', 'checkpoint', 'pending',
  'pending_max_staleness', 'pending_groups_per_step', 'resumed_version', 'resumed_continued', 'filtered', 'clock',
  'clock_time', 'published'}
local MOST = 128 -- leases reaped, or groups dropped for their attempts, in one call

local K = {}
for i, name in ipairs(NAMES) do K[name] = KEYS[i] end

local R = {}
do
  local flat = redis.call('HGETALL', K.run)
  for i = 1, #flat, 2 do R[flat[i]] = flat[i + 1] end
  for _, name in ipairs(NUMBERS) do R[name] = tonumber(R[name]) end
  local time = redis.call('TIME')
  R.time = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) -- the server's clock: for people, nothing decides by it
end

local function refuse(reason, detail)
  return {'refused', reason, detail or ''}
end

local function no_run()
  if not R.fingerprint then return refuse('no_run', 'the run was never created on this ledger') end
end

local function put(name, value)
  R[name] = value
  redis.call('HSET', K.run, name, type(value) == 'number' and string.format('%.0f', value) or value)
end

-- Return the run's clock (ms), by which leases and registrations end. It never goes back: it adds up how far the server's clock moved
-- between two calls. A move back counts 0. A move ahead counts at most LEAP: the server's clock jumped, or the server was away, or no
-- process called. A live run calls more often (the ingest alone three times a second), so its clock keeps pace with the server's, and no
-- jump ends what has more than LEAP left. Moves below TICK wait, so that a call that changes nothing else seldom writes.
local LEAP, TICK = 1000, 100
local function now()
  local moved = R.time - (R.clock_time or R.time)
  if not R.clock or moved < 0 or moved >= TICK then
    put('clock', (R.clock or R.time) + math.max(0, math.min(moved, LEAP)))
    put('clock_time', R.time)
  end
  return R.clock
end

-- Append one event to the log. Lists in `fields` are left out when they are empty (an empty table is ambiguous in JSON).
local function append(event, fields)
  put('sequence', R.sequence + 1)
  fields.seq, fields.time_ms, fields.event = R.sequence, R.time, event
  redis.call('XADD', K.events, string.format('%.0f-0', R.sequence), 'e', cjson.encode(fields))
end

local function nonempty(list)
  if #list > 0 then return list end
end

local function pad(id)
  return string.format('%012d', id)
end

local function read(id)
  local record = redis.call('HGET', K.groups, id)
  return record and cjson.decode(record)
end

-- Take a group out of the indexes of its state.
local function leave(id, state)
  if state == 'leased' then
    redis.call('ZREM', K.leases, id)
    redis.call('ZREM', K.live, id)
    redis.call('ZREM', K.expired, id)
  elseif state == 'scored' then
    redis.call('ZREM', K.scored, id)
    redis.call('ZREM', K.fresh, id)
  elseif state then
    redis.call('ZREM', K[state], id) -- waiting, taken, trained; a DROPPED group never moves
  end
end

-- Bring a group into `state`: indexes and record. `expiry` (ms) only for LEASED.
local function move(id, group, state, expiry)
  leave(id, group.state)
  if group.request and state ~= 'leased' then
    redis.call('HDEL', K.requests, group.request)
    group.request = nil
  end
  group.state = state
  if state == 'waiting' then
    group.token = ''
    group.counts = nil
    redis.call('ZADD', K.waiting, 0, id)
  elseif state == 'leased' then
    redis.call('ZADD', K.leases, expiry, id)
    redis.call('ZADD', K.live, group.deadline, id)
  elseif state == 'scored' then
    redis.call('ZADD', K.scored, group.deadline, id)
    redis.call('ZADD', K.fresh, group.newest + group.max_staleness, id)
  elseif state == 'taken' then
    redis.call('ZADD', K.taken, group.deadline, id)
  elseif state == 'trained' then
    redis.call('ZADD', K.trained, group.step, id)
  else
    redis.call('SADD', K.dropped, id)
  end
  redis.call('HSET', K.groups, id, cjson.encode(group))
end

local function next_step()
  return R.running >= 0 and R.version + 1 or R.version
end

-- Whether rule F holds for the groups that hold a place, plus one of deadline `extra` (or nil), plus those of the running step if
-- `untaken`. At most (groups / B) rounds: no d from the first one with room for all groups on can fail.
local function rule_f(step, E, B, policy, extra, untaken)
  local sets = untaken and {K.live, K.scored, K.taken} or {K.live, K.scored}
  local function count(low, high)
    local n = 0
    for _, set in ipairs(sets) do n = n + redis.call('ZCOUNT', set, low, high) end
    return n
  end
  local late, total = count('-inf', '(' .. step), count('-inf', '+inf')
  if extra then
    total = total + 1
    if extra < step then late, extra = late + 1, nil end
  end
  if late > 0 and policy ~= 'mask' then return false end
  local d = step
  while (d - step + 1) * B < total do
    local n = count(step, d)
    if extra and extra <= d then n = n + 1 end
    if d >= step + E then n = n + late end
    if n > (d - step + 1) * B then return false end
    d = d + 1
  end
  return true
end

-- Whether rule F holds now with a group of deadline `extra` (or nil) added.
local function holds(extra)
  return rule_f(next_step(), R.max_staleness, R.groups_per_step, R.policy, extra)
end

-- Put a pending bound in force if rule F holds with it, and would hold if the running step were untaken now or later (so B is never
-- smaller than the running batch). Returns true if none is pending.
local function apply_pending()
  if R.pending == 0 then return true end
  local E, B, policy = R.pending_max_staleness, R.pending_groups_per_step, R.pending_policy
  if not rule_f(next_step(), E, B, policy) then return false end
  if R.running >= 0 and (redis.call('ZCARD', K.taken) > B or not rule_f(R.version, E, B, policy, nil, true)) then return false end
  put('max_staleness', E)
  put('groups_per_step', B)
  put('policy', policy)
  put('pending', 0)
  append('bound', {max_staleness = E, groups_per_step = B, policy = policy})
  return true
end

-- Free a live lease's place in rule F; it stays valid until the group is leased again.
local function expire(id)
  redis.call('ZREM', K.leases, id)
  redis.call('ZREM', K.live, id)
  redis.call('ZADD', K.expired, 0, id)
  append('expire', {group = tonumber(id)})
end

-- Expire the leases that have run out.
local function reap()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', K.leases, '-inf', now(), 'LIMIT', 0, MOST)) do expire(id) end
end

local function expired(id)
  return redis.call('ZSCORE', K.expired, id)
end

local NO_SIGNAL = 'no_signal' -- drop reason of groups that are filtered; it has a limit of its own, see filter.lua

-- Count a finished group; halt the run if one reason has too large a share of the recent ones.
local function finish(outcome)
  redis.call('LPUSH', K.outcomes, outcome)
  redis.call('LTRIM', K.outcomes, 0, R.drop_window - 1)
  if outcome == '' or outcome == NO_SIGNAL or R.halted ~= '' then return end
  local recent, n = redis.call('LRANGE', K.outcomes, 0, -1), 0
  for _, other in ipairs(recent) do
    if other == outcome then n = n + 1 end
  end
  if #recent >= R.drop_window and n >= R.drop_share * R.drop_window then
    put('halted', outcome)
    append('halt', {reason = outcome})
  end
end

-- Drop a group. `wasted`: tokens that the caller reports, counted if they are more than the accepted ones. `reward`: for the event, may
-- be left out.
local function drop(id, group, reason, detail, wasted, reward)
  local sampled = 0
  for _, n in pairs(group.counts or {}) do sampled = sampled + n end
  wasted = math.max(wasted, sampled)
  local from = group.state
  move(id, group, 'dropped')
  put('dropped', R.dropped + 1)
  put('wasted_tokens', R.wasted_tokens + wasted)
  redis.call('HINCRBY', K.reasons, reason, 1)
  redis.call('HINCRBY', K.wasted, reason, wasted)
  append('drop', {group = tonumber(id), token = group.token, from = from, reason = reason, detail = detail, wasted_tokens = wasted,
    reward = reward})
  finish(reason)
end

-- Hand a LEASED group back.
local function release(id, group, reason)
  local token = group.token
  group.previous, group.why = token, reason
  move(id, group, 'waiting')
  append('release', {group = tonumber(id), token = token, reason = reason})
  apply_pending()
end

-- Refuse an engine that an audit refutes.
local function refuted(engine)
  if redis.call('SISMEMBER', K.refuted, engine) == 1 then return refuse('refuted', 'an audit refutes ' .. engine) end
end

-- Return the group if `token` is its current one, else the group or nil, and a refusal.
local function held(id, token)
  local group = read(pad(id))
  if not group then
    if tonumber(id) >= R.issued then return nil, refuse('unknown_group', 'group ' .. id .. ' was never issued') end
    return nil, refuse('not_held', 'group ' .. id .. ' is finished and forgotten')
  end
  if group.token ~= token then return group, refuse('not_held', 'group ' .. id .. ' is not held by ' .. token) end
  return group, nil
end

local function fenced(epoch)
  if R.epoch ~= epoch then return refuse('stale_epoch', 'epoch ' .. epoch .. ' is not the current one, ' .. R.epoch) end
end

local function as_map(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

-- Forget a process.
local function forget_peer(incarnation)
  redis.call('ZREM', K.peers, incarnation)
  redis.call('HDEL', K.peer_info, incarnation)
  redis.call('HDEL', K.waits, incarnation)
  if redis.call('HDEL', K.endpoints, incarnation) == 1 then redis.call('HINCRBY', K.endpoints, '', 1) end
end

-- Forget at most 128 processes whose time-to-live is over.
local function reap_peers()
  for _, dead in ipairs(redis.call('ZRANGEBYSCORE', K.peers, '-inf', now(), 'LIMIT', 0, MOST)) do forget_peer(dead) end
end

-- Return all counters as JSON.
local function status()
  local waiting, scored, taken = redis.call('ZCARD', K.waiting), redis.call('ZCARD', K.scored), redis.call('ZCARD', K.taken)
  local leased = redis.call('ZCARD', K.live) + redis.call('ZCARD', K.expired)
  return cjson.encode({
    version = R.version, epoch = R.epoch, sequence = R.sequence, steps = R.steps, issued = R.issued, trained = R.trained,
    dropped = R.dropped, wasted_tokens = R.wasted_tokens, halted = R.halted, draining = R.draining == 1,
    bound = {max_staleness = R.max_staleness, groups_per_step = R.groups_per_step, policy = R.policy},
    pending = R.pending == 1 and {max_staleness = R.pending_max_staleness, groups_per_step = R.pending_groups_per_step,
      policy = R.pending_policy} or nil,
    states = {waiting = waiting, leased = leased, scored = scored, taken = taken},
    dropped_by_reason = as_map(redis.call('HGETALL', K.reasons)), wasted_by_reason = as_map(redis.call('HGETALL', K.wasted)),
    engines = as_map(redis.call('HGETALL', K.engines)), fingerprint = R.fingerprint,
  })
end
