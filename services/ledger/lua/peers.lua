-- List the processes that live; forget at most 128 whose time is over.
-- Returns: incarnation, JSON, incarnation, JSON ... in order of incarnation. Refuses nothing.
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', K.peers, '-inf', R.now, 'LIMIT', 0, MOST)) do
  redis.call('ZREM', K.peers, dead)
  redis.call('HDEL', K.peer_info, dead)
end
local live = redis.call('ZRANGEBYSCORE', K.peers, '(' .. string.format('%.0f', R.now), '+inf')
table.sort(live)
local answer = {'ok'}
for _, incarnation in ipairs(live) do
  table.insert(answer, incarnation)
  table.insert(answer, redis.call('HGET', K.peer_info, incarnation))
end
return answer
