"""Settings of other trainers, as settings of tether."""
