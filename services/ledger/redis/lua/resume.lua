-- State that the trainer of `epoch` stands at `version`. The branch continues, or the ledger is rewound to `version`:
-- LEASED, SCORED with a token of an abandoned version, TRAINED in a step >= version -> WAITING. (No group is TAKEN: claim has untaken them.)
-- ARGV: 1 epoch, 2 version, 3 digest of that version's weights (decimal)
-- Returns: 1 if the branch continues, 0 if it was rewound; repeating it returns the same.
-- Refuses no_run, stale_epoch, wrong_state (a version ahead of the ledger, or one that a checkpoint has made final, or another
-- answer was given to this epoch before). Work: all active groups and what no checkpoint covers.
local absent = no_run() or fenced(ARGV[1])
if absent then return absent end
local version, digest = tonumber(ARGV[2]), ARGV[3]
if R.resumed == ARGV[1] then
  if R.resumed_version == version and R.resumed_digest == digest then return {'ok', R.resumed_continued} end
  return refuse('wrong_state', 'epoch ' .. ARGV[1] .. ' has resumed at version ' .. R.resumed_version)
end
if version > R.version then return refuse('wrong_state', 'version ' .. version .. ' is ahead of the ledger, which is at ' .. R.version) end
if version < R.checkpoint then
  return refuse('wrong_state', 'version ' .. version .. ' is older than the durable checkpoint of version ' .. R.checkpoint)
end
local old, known = R.version, R.digest
if version < old then
  local record = redis.call('HGET', K.steps, string.format('%.0f', version - 1))
  known = record and cjson.decode(record).digest or digest
end
local continued = version == old and (version == 0 or known == digest)
put('resumed', ARGV[1])
put('resumed_version', version)
put('resumed_digest', digest)
put('resumed_continued', continued and 1 or 0)
put('digest', digest)
if continued then
  redis.call('SADD', K.lineage, ARGV[1])
  append('resume', {epoch = ARGV[1], version = version, digest = digest, continued = true})
  return {'ok', 1}
end

local newest = known == digest and version or version - 1 -- newest version that is not abandoned
local waiting = {}
local function rewind(id, group)
  group.attempt, group.previous, group.why, group.step = 0, nil, nil, nil
  move(id, group, 'waiting')
  table.insert(waiting, tonumber(id))
end
for _, set in ipairs({K.live, K.expired}) do
  for _, id in ipairs(redis.call('ZRANGE', set, 0, -1)) do rewind(id, read(id)) end
end
for _, id in ipairs(redis.call('ZRANGE', K.scored, 0, -1)) do
  local group = read(id)
  if group.newest > newest then rewind(id, group) end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K.trained, version, '+inf')) do
  rewind(id, read(id))
  R.trained = R.trained - 1
end
put('trained', R.trained)
for step = version, old - 1 do
  redis.call('HDEL', K.steps, string.format('%.0f', step))
  redis.call('HDEL', K.reports, string.format('%.0f', step))
end
local record = redis.call('HGET', K.steps, string.format('%.0f', version - 1))
if record then -- the version is there again, perhaps of other weights
  record = cjson.decode(record)
  record.digest = digest
  redis.call('HSET', K.steps, string.format('%.0f', version - 1), cjson.encode(record))
end
put('version', version)
redis.call('DEL', K.lineage, K.manifest)
put('published', -1)
redis.call('SADD', K.lineage, ARGV[1])
table.sort(waiting)
append('resume', {epoch = ARGV[1], version = version, digest = digest, continued = false, waiting = nonempty(waiting)})
apply_pending()
return {'ok', 0}
