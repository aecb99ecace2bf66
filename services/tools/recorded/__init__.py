"""Makes recorded steps again, and compares two runs: `tether replay`, `rerun`, `bisect`.

`services/run_record/` reads a run for people.
"""
