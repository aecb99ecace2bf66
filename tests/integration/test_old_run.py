"""Resumes runs that commit 1a6dd8a made: their directories still verify, replay, trace and resume.

What users have on their disks outlives the code that wrote it. tests/fixtures/README.md says how the runs
were made: `reference` was interrupted at version 7, with a checkpoint of version 6 and two groups that wait
to be trained; `megatron` came to its end.

Batches are compared bit for bit. Losses and weights are not: another kind of CPU adds up floats in another
order, so that weights made here need not have the digest that was recorded there. They are equal as far as
float32 tells, and a wrong step is far outside of that.
"""

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.ledger.embedded_server import EmbeddedServer
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.reader import committed_steps, read_events
from services.ledger.event_log.trace import trace
from services.ledger.verify.result import AuditResult
from services.ledger.verify.verifier import verify
from services.ledger_recovery.reconcile import reconcile
from services.observability.steps import read_steps
from services.runtime.run_ledger import open_ledger
from services.runtime.training import build_backend
from services.settings.load import dump_settings, run_settings
from services.tools.replay import RecordedRun, nearest_checkpoint, replay_step
from tests.integration.command import audit, tether_up
from tests.integration.loop import ROOT
from trainer.algorithms.registry import make_algorithm
from trainer.backends.step import run_step_on_all_ranks
from trainer.reference.backend import ReferenceBackend
from trainer.roles.models import RankModels
from trainer.storage.archive import Archive

PACKED = ROOT / "tests/fixtures/run_1a6dd8a.tar.gz"
VERSIONS = {"reference": 7, "megatron": 5}
PROVEN = {
    "reference": AuditResult(issued=23, trained=21, dropped=0, active=2, max_lag=2, bound=2, steps=7),
    "megatron": AuditResult(issued=15, trained=15, dropped=0, active=0, max_lag=1, bound=1, steps=5),
}
ARCHIVED = range(4)
"""Steps of either run whose records are in the archive; those of the others are in the spool."""
SCORED = (21, 22)
"""Groups of `reference` that were scored and not yet trained."""
ATOL = 1e-4
"""Tolerance of weights. Other instruction sets make a difference of 3e-6; a checkpoint without one moment of
Adam one of 1e-3 or more."""
RUNS = pytest.mark.parametrize("name", VERSIONS)

# `tether up` loads two models, on a machine that may have other things to do
pytestmark = pytest.mark.timeout(600)


def unpacked(to: Path) -> Path:
    with tarfile.open(PACKED) as tar:
        tar.extractall(to, filter="data")
    return to


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs, to be read only."""
    return unpacked(tmp_path_factory.mktemp("old"))


@RUNS
def test_every_old_setting_is_known_and_means_what_it_did(runs: Path, tmp_path: Path, name: str) -> None:
    settings = run_settings(runs / name)
    assert settings.run_dir == runs / name
    assert settings.trainer.backend == name
    dump_settings(settings, tmp_path / "settings.json")
    old, new = (json.loads((place / "settings.json").read_text()) for place in (runs / name, tmp_path))
    old["run"]["dir"] = str(runs / name)
    old["prompts"]["path"] = str(Path.cwd() / old["prompts"]["path"])  # what it was relative to
    for section, values in old.items():
        assert within(new[section], values) == values, section


def within(new: Any, old: Any) -> Any:
    """What `new` has of the keys of `old`, also in tables of lists."""
    if isinstance(old, dict):
        return {key: within(new.get(key), value) for key, value in old.items()}
    if isinstance(old, list) and isinstance(new, list):
        return [within(*both) for both in zip(new, old, strict=True)]
    return new


@RUNS
def test_an_old_log_is_proven(runs: Path, name: str) -> None:
    assert verify(runs / name / FILE) == PROVEN[name]


@RUNS
def test_every_old_batch_is_built_again_bit_for_bit(runs: Path, name: str) -> None:
    settings = run_settings(runs / name)
    lines = read_steps(runs / name / "metrics.jsonl")
    assert Archive(runs / name / "archive").steps() == list(ARCHIVED)
    assert [line["step"] for line in lines] == list(range(VERSIONS[name]))
    for step, line in enumerate(lines):
        facts = replay_step(settings, step, train=False)
        assert facts["equal"], facts
        assert facts["digest"] == line["batch_digest"] != ""
        assert (facts["trained_tokens"], facts["lag_max"]) == (line["trained_tokens"], line["lag_max"])


@pytest.mark.parametrize(
    ("name", "step", "start"),
    [("reference", 5, 4), ("reference", 6, 6), ("megatron", 4, 4)],
)
def test_an_old_step_is_repeated(runs: Path, name: str, step: int, start: int) -> None:
    """From the nearest checkpoint.

    Over several steps of the reference backend losses differ by more: that commit's did not train the padding
    token's embedding. `repeated` compares those steps without that difference.
    """
    facts = replay_step(run_settings(runs / name), step, train=True)
    assert facts["equal"]
    train = facts["train"]
    assert train["equal"]
    assert train["from_version"] == start
    rel = 1e-4 if name == "reference" else 1e-5
    assert train["loss"] == pytest.approx(read_steps(runs / name / "metrics.jsonl")[step]["loss"], rel=rel)


@pytest.mark.parametrize(("name", "step"), [("reference", 3), ("reference", 5), ("megatron", 4)])
def test_an_old_checkpoint_leads_to_the_old_weights(runs: Path, name: str, step: int) -> None:
    exported = load_file(runs / name / f"exports/step_{step + 1:08d}/model.safetensors")
    made = repeated(runs / name, step)
    assert made.keys() == exported.keys()
    for tensor, value in made.items():
        torch.testing.assert_close(
            value, exported[tensor], rtol=0, atol=ATOL, msg=lambda text, tensor=tensor: f"{tensor}: {text}"
        )


def repeated(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """The model after a step, made here from the newest checkpoint before it, or from the initial model.

    Where that commit's reference backend did not train the padding token's embedding, neither does it here:
    all else has to be as it was.
    """
    settings = run_settings(run_dir)
    start = nearest_checkpoint(settings, step)
    first = start.version if start else 0
    past = RecordedRun(settings, range(first, step + 1))
    backend = build_backend(settings)
    if isinstance(backend, ReferenceBackend):
        embedding = backend.model.get_submodule("model.embed_tokens")
        assert isinstance(embedding, torch.nn.Embedding)
        embedding.padding_idx = 0
    try:
        if start is not None:
            start.verify()
            backend.restore(start.directory)
        for number in range(first, step + 1):
            run_step_on_all_ranks(
                RankModels(backend), make_algorithm(settings.algorithm), past.command(number)
            )
        return {name: tensor.clone() for name, tensor in backend.export_model()}
    finally:
        backend.close()


@pytest.mark.parametrize(("name", "step"), [("reference", ARCHIVED[-1]), ("reference", 6), ("megatron", 4)])
def test_an_old_group_is_traced_from_lease_to_commit(runs: Path, name: str, step: int) -> None:
    log = runs / name / FILE
    group = committed_steps(read_events(log), range(step, step + 1))[step].record.groups[0]
    moments = trace(read_events(log), group.group)
    assert [moment.event for moment in moments] == ["lease", "accept", "take", "commit"]
    lease, accept, take, commit = moments
    assert (lease.facts["token"], lease.facts["version"], lease.facts["deadline"]) == (
        group.token,
        group.version,
        group.deadline,
    )
    assert accept.facts["counts"] == {str(version): n for version, n in group.counts.items()}
    assert (take.facts["step"], take.facts["place"]) == (step, 0)
    assert commit.facts["lag_max"] <= group.max_staleness
    assert commit.state == "trained"


@RUNS
async def test_a_lost_ledger_is_built_anew_from_what_an_old_run_left(tmp_path: Path, name: str) -> None:
    run_dir = unpacked(tmp_path) / name
    shutil.rmtree(run_dir / "ledger")
    server = EmbeddedServer(run_dir / "ledger")
    settings = run_settings(run_dir)
    settings = replace(settings, ledger=replace(settings.ledger, url=await server.start()))
    try:
        async with open_ledger(settings) as ledger:
            await reconcile(ledger, settings)
            status = await ledger.status()
            records = await ledger.step_records(0)
    finally:
        await server.stop()
    proven = PROVEN[name]
    assert (status.version, status.trained, status.dropped, status.active) == (
        proven.steps,
        proven.trained,
        0,
        proven.active,
    )
    assert [record.step for record in records] == [
        step for step in range(proven.steps) if step not in ARCHIVED
    ]


def test_an_old_run_goes_on(tmp_path: Path) -> None:
    run_dir = unpacked(tmp_path) / "reference"
    log, metrics = (run_dir / FILE).read_bytes(), (run_dir / "metrics.jsonl").read_bytes()
    version, out = VERSIONS["reference"] + 2, tmp_path / "up.log"
    with tether_up(
        str(run_dir / "settings.json"), "--run-dir", str(run_dir), "--steps", str(version), output=out
    ) as up:
        code = up.wait(400)
    said = out.read_text()
    assert code == 0, said
    assert f"done at version {version} of {version}" in said
    trainer = (run_dir / "logs/trainer.log").read_text()
    assert (
        "replay.step step=6" in trainer
    )  # from the checkpoint of version 6 and what the spool held; the ledger decides what follows
    assert "replay.missing" not in trainer
    went_on(run_dir, version, log, metrics)


def went_on(run_dir: Path, version: int, log: bytes, metrics: bytes) -> None:
    """Whether a run stands at a version, after a past with this log and these metrics."""
    assert (run_dir / FILE).read_bytes().startswith(log)
    assert (run_dir / "metrics.jsonl").read_bytes().startswith(metrics)
    assert [line["step"] for line in read_steps(run_dir / "metrics.jsonl")] == list(range(version))
    result: dict[str, Any] = audit(run_dir)
    assert (result["code"], result["violations"]) == (0, [])
    assert (result["steps"], result["trained"], result["bound"]) == (version, 3 * version, 2)
    for group in SCORED:  # before the interruption; trained after it
        assert trace(read_events(run_dir / FILE), group)[-1].state == "trained"
    settings = run_settings(run_dir)
    assert Archive(run_dir / "archive").steps() == list(
        range(version - 1)
    )  # what the old spool held is there now
    for step in range(version):
        assert replay_step(settings, step, train=False)["equal"], step
