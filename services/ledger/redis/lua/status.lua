-- Read all counters at one moment.
-- Returns: JSON as `status()` in _shared.lua builds it. Refuses no_run.
return no_run() or {'ok', status()}
