"""Repeats recorded steps, and compares two runs: `tether replay`, `rerun`, `bisect`.

`services/run_record/` reads the directory of a run for display.
"""
