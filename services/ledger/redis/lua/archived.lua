-- Forget events up to `sequence`, which the archive holds. The ingest calls this all the time, which keeps the run's clock going.
-- ARGV: 1 sequence
-- Returns nothing; a smaller sequence than before changes nothing. Refuses no_run, wrong_state (an event that is not written yet).
local absent = no_run()
if absent then return absent end
now()
local sequence = tonumber(ARGV[1])
if sequence > R.sequence then return refuse('wrong_state', 'event ' .. sequence .. ' is not written; the last is ' .. R.sequence) end
if sequence > R.archived then
  put('archived', sequence)
  redis.call('XTRIM', K.events, 'MINID', string.format('%.0f-0', sequence + 1))
end
return {'ok'}
