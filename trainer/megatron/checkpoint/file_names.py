"""Names the files of a checkpoint and the tensors in them."""

LAYOUT = "layout.json"
MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
"""Tensors of each parameter that the optimizer steps; Adam's moments exist from the first step on."""
VALUE = "value"
"""Tensor of a parameter that the optimizer does not step, such as the bias of a router."""
STEPS = "steps"
LOSS_SCALE = "loss_scale"
"""Only in float16: (loss scale, steps since it changed)."""
RANDOM_CPU, RANDOM_CUDA = "random.cpu", "random.cuda"


def rank_file(rank: int) -> str:
    """Return the name of a global rank's file."""
    return f"rank-{rank:05d}.safetensors"


def part_name(kind: str, parameter: str, start: int) -> str:
    """Return the name of a range of a flat parameter, or of the same range of a moment."""
    return f"{kind}/{parameter}/{start}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Return (kind, parameter, start); None if the name is no part of a parameter."""
    kind, _, rest = name.partition("/")
    parameter, _, start = rest.rpartition("/")
    return (kind, parameter, int(start)) if kind in (*KINDS, VALUE) and start.isdigit() else None
