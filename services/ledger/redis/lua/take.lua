-- SCORED -> TAKEN for the batch of the next step: B groups, earliest deadline first; fewer only if no more can come.
-- ARGV: 1 epoch
-- Returns: JSON {step, groups: [{group, token, deadline, max_staleness, version, counts}], dropped: [group]}; again the same while
-- the step runs. Leases are reaped only while the run drains, when no `lease` does it.
-- Refuses no_run, stale_epoch, wrong_state (before resume), done, exhausted, not_enough, straggler (detail: the group). Groups
-- dropped on the way (`stale`, `straggler`) stay dropped after a refusal, and the next batch reports them.
local absent = no_run() or fenced(ARGV[1])
if absent then return absent end
if R.running >= 0 then return {'ok', redis.call('GET', K.batch)} end
if R.resumed ~= ARGV[1] then return refuse('wrong_state', 'epoch ' .. ARGV[1] .. ' has not resumed') end
if R.version >= R.steps then return refuse('done', R.steps .. ' steps') end
if R.draining == 1 then reap() end
apply_pending()

local function give_up(id, reason)
  drop(id, read(id), reason, '', 0)
  redis.call('RPUSH', K.gone, id)
end
if R.policy == 'mask' then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', K.fresh, '-inf', '(' .. R.version)) do give_up(id, 'stale') end
end

local scored, live, B = redis.call('ZCARD', K.scored), redis.call('ZCARD', K.live), R.groups_per_step
if scored < B then
  local blocked = (R.pending == 1 or R.draining == 1) and live == 0 -- no lease is granted, and nothing that is out keeps a place
  local ended = R.prompts >= 0 and R.issued >= R.prompts
    and live + redis.call('ZCARD', K.expired) + redis.call('ZCARD', K.waiting) == 0
  if not (blocked or ended) then return refuse('not_enough', scored .. ' of ' .. B .. ' groups are scored') end
  if scored == 0 then return refuse('exhausted', 'no group is left') end
end
local batch = redis.call('ZRANGE', K.scored, 0, B - 1)
for _, id in ipairs(batch) do redis.call('ZREM', K.scored, id) end
local function remaining()
  return R.policy == 'mask' or rule_f(R.version + 1, R.max_staleness, B, R.policy)
end
local function put_back(id)
  for _, other in ipairs(batch) do redis.call('ZADD', K.scored, read(other).deadline, other) end
  return refuse('straggler', tostring(tonumber(id)))
end
for round = 1, MOST + 1 do
  if remaining() then break end
  local id = redis.call('ZRANGE', K.live, 0, 0)[1]
  if not id then break end -- nothing to wait for
  if R.policy == 'wait' or round > MOST then return put_back(id) end
  give_up(id, 'straggler')
end

local taken, ids = {}, {}
for _, id in ipairs(batch) do
  local group = read(id)
  move(id, group, 'taken')
  table.insert(ids, tonumber(id))
  table.insert(taken, {group = tonumber(id), token = group.token, deadline = group.deadline, max_staleness = group.max_staleness,
    version = group.version, counts = group.counts})
end
local gone = redis.call('LRANGE', K.gone, 0, -1)
redis.call('DEL', K.gone)
for i, id in ipairs(gone) do gone[i] = tonumber(id) end
put('running', R.version)
local answer = cjson.encode({step = R.version, groups = taken, dropped = nonempty(gone)})
redis.call('SET', K.batch, answer)
append('take', {epoch = ARGV[1], step = R.version, groups = ids})
return {'ok', answer}
