"""Defines `tether push`, which uploads an exported model of a run to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from protocol.errors import SettingsError

EXPORTS = "exports"
"""Directory in a run directory with a model for each kept checkpoint."""


def push(
    run_dir: Annotated[Path, typer.Argument(metavar="D", help="run directory, such as runs/demo")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="model, made if there is none")],
    export: Annotated[str, typer.Option(help="best, or a name in D/exports; by default the newest")] = "",
    revision: Annotated[str, typer.Option(metavar="BRANCH", help="branch; main by default")] = "",
    private: Annotated[bool, typer.Option("--private/--public", help="of a model that is made")] = True,
) -> None:
    """Upload an exported model to the Hugging Face hub."""
    print(push_export(run_dir, name, export, revision, private))


def push_export(run_dir: Path, name: str, export: str, revision: str, private: bool) -> str:
    """Upload an export as one commit; return a line about it.

    Args:
        run_dir: directory of a current or ended run.
        name: OWNER/NAME on the hub.
        export: name of the export, such as best or step_00000020. Empty: the newest.
        revision: branch. Empty: main.
        private: whether a newly created repository is private.

    Raises:
        SettingsError: there is no such export, one of its files is damaged, or the hub rejects the upload.
    """
    from protocol.host.hub import is_hub_name, upload_model
    from trainer.storage.checksums import check_model_files

    if not is_hub_name(name):
        raise SettingsError(f"{name!r} is not OWNER/NAME, the name of a model on the hub")
    known = {path.name: path for path in sorted((run_dir / EXPORTS).glob("*step_*[0-9a-f]")) if path.is_dir()}
    links = (run_dir / EXPORTS / name for name in ("best", "adapter_best"))
    known |= {link.name: link for link in links if link.is_dir()}
    steps = [path for key, path in known.items() if key.startswith("step_")]
    directory = known.get(export) if export else next(reversed(steps), None)
    if directory is None:
        there = ", ".join(known) or "none yet: one is made with each checkpoint"
        raise SettingsError(f"no export {export or 'of a step'} in {run_dir / EXPORTS}; there are: {there}")
    check_model_files(directory)
    step = directory.resolve().name
    url = upload_model(directory.resolve(), name, revision, f"{step} of {run_dir.resolve().name}", private)
    return f"{step} is at {url}"
