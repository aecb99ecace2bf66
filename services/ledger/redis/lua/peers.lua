-- List the processes whose time-to-live is not over; forget at most 128 others.
-- Returns: incarnation, JSON, incarnation, JSON ... in order of incarnation. Refuses nothing.
reap_peers()
local live = redis.call('ZRANGEBYSCORE', K.peers, '(' .. string.format('%.0f', now()), '+inf')
table.sort(live)
local answer = {'ok'}
for _, incarnation in ipairs(live) do
  table.insert(answer, incarnation)
  table.insert(answer, redis.call('HGET', K.peer_info, incarnation))
end
return answer
