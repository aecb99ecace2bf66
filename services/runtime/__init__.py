"""What every service process does: start, register, wait, drain, exit."""
