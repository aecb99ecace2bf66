-- (new), WAITING or expired LEASED -> LEASED, with a new token and a new deadline = the engine's version + E.
-- ARGV: 1 engine, 2 holder, 3 lease (ms), 4 token, 5 most unarchived events, 6 request, 7 groups that the worker has, -1 to take no turns
-- Returns: JSON {group, token, epoch, version, deadline, max_staleness, attempt}; again the same for the same request while the group is
-- LEASED by it
-- Refuses no_run, halted, draining, archive_behind, refuted, stale_engine, pending, done, exhausted, bound, busier. Groups that have used up their
-- attempts are dropped on the way (at most 128), whatever the answer. `holds` and `refuse` are in `_shared.lua`.
local WAITS_MS, BUSIER = 5000, 1.2
local absent = no_run()
if absent then return absent end
local answered = redis.call('HGET', K.requests, ARGV[6])
if answered then return {'ok', answered} end
reap()
if R.halted ~= '' then return refuse('halted', R.halted) end
if R.draining == 1 then return refuse('draining') end
if R.sequence - R.archived > tonumber(ARGV[5]) then
  return refuse('archive_behind', (R.sequence - R.archived) .. ' events are not archived')
end
local refutation = refuted(ARGV[1])
if refutation then return refutation end
local served = redis.call('HGET', K.engines, ARGV[1])
if not served then return refuse('stale_engine', ARGV[1] .. ' has not acknowledged any version') end
local epoch, version = string.match(served, '^(%S*) (%d+)$')
version = tonumber(version)
if redis.call('SISMEMBER', K.lineage, epoch) == 0 then
  return refuse('stale_engine', ARGV[1] .. ' serves epoch ' .. epoch .. ', which is not of the current branch')
end
if not apply_pending() then return refuse('pending', 'a change of the bound waits until rule F holds with it') end

local step = next_step()
if redis.call('ZCARD', K.live) + redis.call('ZCARD', K.scored) >= (R.steps - step) * R.groups_per_step then return refuse('done') end
local function candidate()
  return redis.call('ZRANGE', K.waiting, 0, 0)[1] or redis.call('ZRANGE', K.expired, 0, 0)[1]
end
local function exhausted()
  return R.prompts >= 0 and R.issued >= R.prompts
end
-- Note that the engine waits for room, with its groups, and refuse.
local function waits(reason, detail)
  if tonumber(ARGV[7]) < 0 then return refuse(reason, detail) end
  redis.call('HSET', K.waits, ARGV[1], ARGV[7] .. ' ' .. string.format('%.0f', now()))
  return refuse(reason, detail)
end
-- Return an engine that waits with so few groups that this one is over BUSIER times as busy, and that serves as new a version, so that
-- there is room for it, too. One that has not asked for WAITS_MS waits no more: it has ended, sleeps, or has its groups.
local function less_busy()
  local waiting = tonumber(ARGV[7]) > 0 and redis.call('HGETALL', K.waits) or {}
  for i = 1, #waiting, 2 do
    local groups, at = string.match(waiting[i + 1], '^(%d+) (%d+)$')
    if now() - tonumber(at) > WAITS_MS then
      redis.call('HDEL', K.waits, waiting[i])
    elseif tonumber(ARGV[7]) > BUSIER * tonumber(groups) then
      local its_epoch, its_version = string.match(redis.call('HGET', K.engines, waiting[i]) or '', '^(%S*) (%d+)$')
      if its_epoch and tonumber(its_version) >= version and redis.call('SISMEMBER', K.lineage, its_epoch) == 1 then
        return waiting[i]
      end
    end
  end
end
local id = candidate()
if not id and exhausted() then return refuse('exhausted', R.prompts .. ' prompts') end
local deadline = version + R.max_staleness
if deadline < step or not holds(deadline) then  -- a lease that is late at birth would only make stale tokens
  return waits('bound', 'no room for deadline ' .. deadline .. ' at step ' .. step)
end
local idler = less_busy()
if idler then return waits('busier', idler .. ' waits with fewer groups') end
redis.call('HDEL', K.waits, ARGV[1])

local group
for round = 1, MOST + 1 do
  group = id and read(id)
  if not group or group.attempt < R.max_attempts then break end
  if round > MOST then return refuse('bound', 'dropped ' .. MOST .. ' groups for their attempts; try again') end
  drop(id, group, 'attempts', group.why or '', 0)
  if R.halted ~= '' then return refuse('halted', R.halted) end
  id = candidate()
end
if not id then
  if exhausted() then return refuse('exhausted', R.prompts .. ' prompts') end
  id, group = pad(R.issued), {attempt = 0}
  put('issued', R.issued + 1)
end
if group.request then redis.call('HDEL', K.requests, group.request) end
group.request = ARGV[6]
group.token, group.holder, group.deadline, group.version = ARGV[4], ARGV[2], deadline, version
group.max_staleness, group.attempt = R.max_staleness, group.attempt + 1
move(id, group, 'leased', now() + tonumber(ARGV[3]))
append('lease', {group = tonumber(id), token = group.token, holder = ARGV[2], engine = ARGV[1], epoch = epoch, version = version,
  deadline = deadline, bound = R.max_staleness, groups_per_step = R.groups_per_step, policy = R.policy, attempt = group.attempt})
local answer = cjson.encode({group = tonumber(id), token = group.token, epoch = epoch, version = version, deadline = deadline,
  max_staleness = R.max_staleness, attempt = group.attempt})
redis.call('HSET', K.requests, ARGV[6], answer)
return {'ok', answer}
