"""Formats durations and rates of steps for users."""


def seconds_text(seconds: float) -> str:
    """Format a duration: 5 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // part:.0f} {smaller}"
    return f"{seconds:.0f} s"


def rate_text(step_s: float, remaining_steps: int) -> str:
    """Format the rate of steps and the remaining time: "2.5 s a step  ETA 3 min 20 s".

    Args:
        step_s: seconds between two steps.
        remaining_steps: number of remaining steps.
    """
    rate = f"{step_s:.1f} s a step" if step_s >= 1 else f"{1 / step_s:.1f} steps/s"
    return f"{rate}  ETA {seconds_text(step_s * remaining_steps)}"
