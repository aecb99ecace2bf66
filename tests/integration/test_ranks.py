"""A run whose trainer has two ranks, started by torchrun as `tether up` does it, and the replay of one of its
steps. Each rank sends the engine its part of every version."""

import json
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from services.gpu_sharing.device_lock import DeviceLock
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.command import audit, processes_of, tether, tether_here, tether_up, until
from tests.integration.loop import ROOT

RANKS = ("trainer/", "services/trainer/", "services/runtime/", "rollout/weights/", "rollout/staging/",
         "protocol/weights/", "protocol/device/")  # fmt: skip
LAYOUTS = [
    pytest.param("megatron", "tensor_model_parallel_size", "nccl", marks=slow_unless_changed(*RANKS)),
    pytest.param("megatron", "tensor_model_parallel_size", "ipc", marks=pytest.mark.slow),
    pytest.param("megatron", "pipeline_model_parallel_size", "nccl", marks=pytest.mark.slow),
    pytest.param("megatron", "tensor_model_parallel_size", "shm", marks=pytest.mark.slow),
    pytest.param("megatron", "data_parallel_size", "ipc", marks=pytest.mark.slow),
    pytest.param("fsdp", "data_parallel_size", "ipc", marks=slow_unless_changed("trainer/fsdp/")),
    pytest.param("fsdp", "data_parallel_size", "nccl", marks=pytest.mark.slow),
    pytest.param("fsdp", "tensor_model_parallel_size", "nccl", marks=slow_unless_changed("trainer/fsdp/")),
]


@pytest.mark.parametrize(("backend", "layout", "transport"), LAYOUTS)
def test_two_ranks_make_all_steps(tmp_path: Path, backend: str, layout: str, transport: str) -> None:
    overrides = (
        f"trainer.backend={backend}",
        f"parallel.{layout}=2",
        "engine.name=hf",
        f"weights.transport={transport}",
        "eval.at_end=false",
        "trainer.checkpoint_every=2",
        "bound.max_staleness=0",
        "services.restarts=0",
        "monitor.enabled=false",
    )
    words = [word for override in overrides for word in ("--set", override)]
    result = tether(
        "up",
        str(ROOT / "deploy/configs/demo.toml"),
        "--steps",
        "4",
        "--run-dir",
        str(tmp_path),
        *words,
        seconds=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert [step["step"] for step in read_steps(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert audit(tmp_path)["violations"] == []
    # the engine computes with what the trainer does, piece by piece
    errors = [step["mismatch"]["0"]["error_max"] for step in read_steps(tmp_path / "metrics.jsonl")]
    assert max(errors) < 1e-4
    files = (tmp_path / "exports/step_00000004").glob("model-*-of-00002.safetensors")  # one of each rank
    assert len(list(files)) == 2
    other = ("--set", "algorithm.clip_high=0.3", "--set", "algorithm.entropy_coef=0.1")
    replay = tether_here("replay", tmp_path, "--step", 3, "--train", *other, "--json")
    assert replay.returncode == 0, replay.stdout + replay.stderr
    facts = json.loads(replay.stdout)
    norms = {facts["train"][which]["grad_norm"] for which in ("other", "repeated")}
    assert len(norms) == 2
    assert min(norms) > 0
    assert (facts["equal"], facts["train"]["from_version"], facts["train"]["weights_equal"]) == (
        True,
        2,
        True,
    )
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_model_learns_whose_experts_are_on_two_ranks(tmp_path: Path) -> None:
    overrides = ("run.steps=12", "eval.at_end=false", "services.restarts=0")
    words = [word for override in overrides for word in ("--set", override)]
    config = str(ROOT / "deploy/configs/experts.toml")
    result = tether("up", config, "--run-dir", str(tmp_path), *words, seconds=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert audit(tmp_path)["violations"] == []
    steps = read_steps(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(12))
    assert sum(step["reward_mean"] for step in steps[-3:]) / 3 > steps[0]["reward_mean"] + 0.1
    assert all(1 <= step["expert_load_max"] <= 2 and 0 <= step["expert_load_min"] <= 1 for step in steps)
    index = json.loads((tmp_path / "exports/step_00000012/model.safetensors.index.json").read_text())
    files = [file for name, file in index["weight_map"].items() if ".experts." in name]
    assert len(files) == 2 * 4 * 3
    assert len(set(files)) == 2  # each rank has written its own experts
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "replay"),
    [("hf", "true"), pytest.param("vllm", "false", marks=pytest.mark.engine)],
)
def test_experts_of_two_ranks_are_served_by_other_engines(tmp_path: Path, engine: str, replay: str) -> None:
    overrides = (
        f"engine.name={engine}", f"trainer.routing_replay={replay}", "bound.max_staleness=0", "run.steps=4",
        "sampling.max_tokens=4", "eval.at_end=false", "services.restarts=0",
    )  # fmt: skip
    words = [word for override in overrides for word in ("--set", override)]
    config = str(ROOT / "deploy/configs/experts.toml")
    result = tether("up", config, "--run-dir", str(tmp_path), *words, seconds=400)
    assert result.returncode == 0, result.stdout + result.stderr
    errors = [step["mismatch"]["0"]["error_max"] for step in read_steps(tmp_path / "metrics.jsonl")]
    assert len(errors) == 4
    assert max(errors) < 1e-4
    assert audit(tmp_path)["violations"] == []
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("layout", "transport"),
    [
        ("tensor_model_parallel_size", "ipc"),
        ("tensor_model_parallel_size", "nccl"),
        ("pipeline_model_parallel_size", "nccl"),
    ],
)
@pytest.mark.parametrize("engine_ranks", [1, 2])
def test_ranks_of_vllm_compute_with_the_slices_of_the_trainers_ranks(
    tmp_path: Path, layout: str, transport: str, engine_ranks: int
) -> None:
    overrides = (
        f"parallel.{layout}=2", f"engine.tensor_parallel_size={engine_ranks}",
        f"weights.transport={transport}",
        "eval.at_end=false", "services.restarts=0", "bound.max_staleness=0", "run.steps=4",
    )  # fmt: skip
    words = [word for override in overrides for word in ("--set", override)]
    demo = str(ROOT / "deploy/configs/demo.toml")
    result = tether("up", demo, "--run-dir", str(tmp_path), *words, seconds=400)
    assert result.returncode == 0, result.stdout + result.stderr
    errors = [step["mismatch"]["0"]["error_max"] for step in read_steps(tmp_path / "metrics.jsonl")]
    assert len(errors) == 4
    assert max(errors) < 1e-4
    assert audit(tmp_path)["violations"] == []
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_ranks_hold_the_device_of_a_colocated_run_until_the_last_has_ended(tmp_path: Path) -> None:
    overrides = (
        "parallel.tensor_model_parallel_size=2", "engine.name=hf", "eval.at_end=false",
        "colocated.enabled=true", "run.steps=8", "sampling.max_tokens=24", "weights.transport=ipc",
    )  # fmt: skip
    arguments = [
        str(ROOT / "deploy/configs/demo.toml"),
        *(word for override in overrides for word in ("--set", override)),
    ]
    with tether_up(*arguments, "--run-dir", str(tmp_path), output=tmp_path / "up.log") as up:
        until(lambda: len(read_steps(tmp_path / "metrics.jsonl")) >= 1, seconds=180, what="the first step")
        with closing(DeviceLock(tmp_path)) as device:
            ranks: list[psutil.Process] = []

            def stopped_in_its_turn() -> bool:
                found = [psutil.Process(pid) for pid in device.holders()]
                ranks[:] = [process for process in found if "RANK" in process.environ()]
                for process in ranks:
                    process.suspend()
                if len(ranks) == 2 and {process.pid for process in ranks} <= set(device.holders()):
                    return True
                for process in ranks:
                    process.resume()
                return False

            until(stopped_in_its_turn, seconds=180, what="the trainer's turn")
            zero, one = sorted(ranks, key=lambda process: process.environ()["RANK"])
            zero.kill()
            zero.wait(60)
            assert one.pid in device.holders()
            one.resume()
        assert up.wait(240) == 0, (tmp_path / "up.log").read_text()
    assert [step["step"] for step in read_steps(tmp_path / "metrics.jsonl")] == list(range(8))
    assert audit(tmp_path)["violations"] == []
    assert processes_of(tmp_path) == []
