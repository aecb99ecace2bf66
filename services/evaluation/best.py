"""Keeps the version with the best score as a Hugging Face directory.

- RUN_DIR/exports/best_step_00000040-0123456789abcdef: the scored model in the engines' dtype, named by
  version and digest
- RUN_DIR/exports/best: a link to this directory
- RUN_DIR/exports/best.json: version, set, score and standard error

The name includes the digest because a version has other weights after a rewind. With adapters, directories
with the prefix `adapter_` contain them in PEFT's format, and the model contains the merged weights. Exports
of checkpoints are pruned independently.
"""

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from protocol.errors import SettingsError, WeightError
from protocol.host.atomic_file import write_atomically
from protocol.messages import WeightManifest
from protocol.weights.draft_head import without_head
from protocol.weights.lora import adapter_targets
from protocol.weights.slices import all_of
from rollout.weights.registry import make_receiver
from services.run_record.evaluations import BEST, Evaluation, counted_evaluations, last_lines
from services.settings.evaluation import BestScore
from services.settings.sections import Settings
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.lora import merged, save_adapter
from trainer.storage.checksums import sealed
from trainer.storage.hf_export import write_hf

log = logging.getLogger("tether.evaluation")

LINK = "best"
READ_S = 600.0
"""Timeout of reading a snapshot, seconds."""
NAME = re.compile(r"best_step_(\d{8,})-([0-9a-f]{16})")


def best_of(evaluations: Iterable[Evaluation], choice: BestScore) -> Evaluation | None:
    """Return the evaluation with the highest score, the earliest on ties; None without scores.

    For a version that was scored again with other weights, the later evaluation counts. `choice.set` must
    name a set.
    """
    found = [(e.score(choice.metric)[0], e) for e in last_lines(evaluations) if e.set == choice.set]
    known = [(score, e) for score, e in found if score is not None]
    return max(known, key=lambda item: item[0])[1] if known else None


class BestCheckpoint:
    """Best version of a run so far. Methods block."""

    def __init__(self, settings: Settings, choice: BestScore) -> None:
        """Store the arguments. `choice.set` must name a set."""
        self._settings = settings
        self._choice = choice
        self._directory = settings.run_dir / "exports"

    def keep(self, evaluation: Evaluation, manifest: WeightManifest) -> None:
        """Write the model of an evaluation that is better than the kept ones, before its line is written.

        Writing the model first prevents a crash from leaving a line without a model. If the model cannot be
        written, the error is logged and the previous model stays.

        Args:
            evaluation: evaluation that is not in eval.jsonl yet.
            manifest: manifest of the scored snapshot.
        """
        kept = self._kept_models()
        counted = counted_evaluations(self._settings.run_dir, evaluation)
        candidates = [e for e in counted if e is evaluation or e.key[:2] in kept]
        if best_of(candidates, self._choice) is not evaluation:
            return
        try:
            self._write(self._directory / f"best_step_{evaluation.version:08d}-{evaluation.digest}", manifest)
        except (OSError, SafetensorError, SettingsError, WeightError) as error:
            log.error("best.failed version=%d error=%s", evaluation.version, error)

    def publish(self) -> None:
        """Point `best` and `best.json` to the best kept version, and remove the others.

        Nothing changes while eval.jsonl lacks a kept version: after a rewind, until a version is scored
        again.
        """
        snapshots = self._kept_models()
        counted = counted_evaluations(self._settings.run_dir)
        best = best_of([e for e in counted if e.key[:2] in snapshots], self._choice)
        if best is None:
            return
        name = snapshots[best.key[:2]]
        self._link(LINK, name)
        if (self._directory / f"adapter_{name}").is_dir():
            self._link(f"adapter_{LINK}", f"adapter_{name}")
        score, stderr = best.score(self._choice.metric)
        facts = {
            "version": best.version,
            "step": best.step,
            "set": best.set,
            "metric": self._choice.metric,
            "score": score,
            "stderr": stderr,
            "digest": best.digest,
            "directory": name,
        }
        data = sealed(msgspec.json.format(msgspec.json.encode(facts)))
        write_atomically(self._settings.run_dir / BEST, data)
        for old in (*self._directory.glob("best_step_*"), *self._directory.glob("adapter_best_step_*")):
            if old.name not in (name, f"adapter_{name}"):
                shutil.rmtree(old, ignore_errors=True)

    def _kept_models(self) -> dict[tuple[int, str], str]:
        """Return (version, digest) -> directory of each kept model."""
        names = {}
        for path in self._directory.glob("best_step_*"):
            if (match := NAME.fullmatch(path.name)) and path.is_dir():
                names[int(match[1]), match[2]] = path.name
        return names

    def _write(self, target: Path, manifest: WeightManifest) -> None:
        lora, source = self._settings.lora, self._settings.model_dir
        received = make_receiver(manifest.transport).slices(manifest, all_of(manifest), READ_S)
        snapshot = {part.entry.name: part.tensor.clone() for parts in received for part in parts}
        if not lora.rank:
            write_hf(iter(without_head(snapshot).items()), target, source)
            return
        published = dataclasses.replace(lora, alpha=float(lora.rank), use_rslora=False)  # B is scaled
        save_adapter(snapshot.items(), target.with_name(f"adapter_{target.name}"), published, source)
        with SafetensorsReader(source) as reader:
            base = {name: reader.whole(name) for name in sorted(reader.names)}
        for item in adapter_targets({name: tuple(tensor.shape) for name, tensor in base.items()}, lora):
            base[item.weight] = merged(item, base[item.weight], snapshot, published)
        write_hf(iter(base.items()), target, source)

    def _link(self, name: str, target: str) -> None:
        """Replace a link atomically."""
        aside = self._directory / f"{name}.tmp"
        aside.unlink(missing_ok=True)
        aside.symlink_to(target)
        os.replace(aside, self._directory / name)
