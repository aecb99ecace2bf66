"""Draws reward and lag over the steps of a run, as PNG."""

from pathlib import Path

from services.observability.steps import read_steps


def plot_run(run_dir: Path) -> Path | None:
    """Draw `progress.png` in the run directory from metrics.jsonl.

    Returns:
        The path of the picture, or None if no step is committed yet.

    Raises:
        OSError: the picture cannot be written.
    """
    steps = read_steps(run_dir / "metrics.jsonl")
    if not steps:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x = [line["step"] for line in steps]
    figure, (reward, lag) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    reward.plot(x, [line["reward_mean"] for line in steps], color="tab:blue")
    reward.set_ylabel("mean reward")
    reward.grid(alpha=0.3)
    lag.plot(x, [line["lag_mean"] for line in steps], color="tab:orange", label="mean lag of trained tokens")
    lag.step(
        x, [line["lag_max"] for line in steps], color="tab:red", alpha=0.6, where="mid", label="largest lag"
    )
    lag.set_ylabel("versions")
    lag.set_xlabel("step")
    lag.legend(loc="lower right", ncols=2)
    lag.grid(alpha=0.3)
    figure.tight_layout()
    path = run_dir / "progress.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
