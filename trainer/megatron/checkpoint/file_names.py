"""Names the files of a checkpoint and what is in them."""

LAYOUT = "layout.json"
MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
"""What there is of each parameter that is stepped; Adam's moments from the first step on."""
VALUE = "value"
"""What there is of a parameter that the optimizer does not step, such as a bias that another rule changes."""
STEPS = "steps"
LOSS_SCALE = "loss_scale"
"""In float16: the factor, and the steps since it changed."""
RANDOM_CPU, RANDOM_CUDA = "random.cpu", "random.cuda"


def rank_file(rank: int) -> str:
    """Return the name of a global rank's file."""
    return f"rank-{rank:05d}.safetensors"


def part_name(kind: str, parameter: str, start: int) -> str:
    """Return the name of a range of a flat parameter, or of a moment of it."""
    return f"{kind}/{parameter}/{start}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Return kind, parameter and start; None if the name is of something else."""
    kind, _, rest = name.partition("/")
    parameter, _, start = rest.rpartition("/")
    return (kind, parameter, int(start)) if kind in (*KINDS, VALUE) and start.isdigit() else None
