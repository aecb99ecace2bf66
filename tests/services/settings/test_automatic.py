"""Tests what `auto` and settings that are not given become, by the machine's GPUs."""

import json
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.settings.automatic import (
    AUTOMATIC,
    Machine,
    choose_automatic,
    split_automatic,
    visible_gpus,
)
from services.settings.load import FILE, dump_settings, load_settings
from services.settings.sections import Settings

CPU = {
    "services.trainer_gpus": "",
    "services.rollout_gpus": "",
    "engine.dtype": "float32",
    "engine.enforce_eager": True,
    "engine.max_running": 64,
    "rollout.groups_in_flight": 32,
    "engine.memory_fraction": 0.85,
    "engine.threads": 1,
    "trainer.dtype": "float32",
    "trainer.threads": 1,
    "trainer.memory_fraction": 1.0,
    "trainer.micro_batch_tokens": 0,
    "weights.transport": "shm",
}
SHARED_GPU = {
    **CPU,
    "engine.dtype": "bfloat16",
    "engine.enforce_eager": False,
    "engine.max_running": 512,
    "engine.memory_fraction": 0.4,
    "trainer.dtype": "bfloat16",
    "trainer.memory_fraction": 0.6,
    "weights.transport": "ipc",
}
APART = {
    **SHARED_GPU,
    "services.trainer_gpus": "0",
    "services.rollout_gpus": "1,2,3",
    "engine.memory_fraction": 0.85,
    "trainer.memory_fraction": 1.0,
    "weights.transport": "nccl",
}


def chosen(machine: Machine, *overrides: str) -> dict[str, object]:
    settings = load_settings(None, overrides, {})  # on this machine: what was given stays
    settings = choose_automatic(settings, [name for name in AUTOMATIC if not given(name, overrides)], machine)
    return {name: getattr(getattr(settings, name.split(".")[0]), name.split(".")[1]) for name in AUTOMATIC}


def given(name: str, overrides: tuple[str, ...]) -> bool:
    return any(override.startswith(f"{name}=") for override in overrides)


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        ([], (), CPU),
        (["0"], (), SHARED_GPU),
        (["0", "1", "2", "3"], (), APART),
        (["0"], ("engine.name=scripted", "trainer.backend=scripted"), CPU),
        (["0"], ("engine.name=hf", "trainer.backend=reference"), {**CPU, "engine.memory_fraction": 0.4}),
        (["0"], ("trainer.device=cpu",), {**SHARED_GPU, "engine.memory_fraction": 0.85,
                                          "trainer.dtype": "float32", "trainer.memory_fraction": 1.0,
                                          "weights.transport": "shm"}),
        (["0"], ("engine.name=megatron",), {**SHARED_GPU, "engine.max_running": 64}),
        (["0"], ("engine.name=megatron", "colocated.enabled=true"),
         {**SHARED_GPU, "engine.enforce_eager": True, "engine.max_running": 64,
          "engine.memory_fraction": 0.5, "trainer.memory_fraction": 1.0}),
        (["0"], ("colocated.enabled=true",), {**SHARED_GPU, "engine.memory_fraction": 0.5,
                                               "trainer.memory_fraction": 1.0}),
        (["0"], ("services.rollouts=2",), {**SHARED_GPU, "engine.memory_fraction": 0.2}),
        (["0"], ("engine.dtype=float32",),
         {**SHARED_GPU, "engine.dtype": "float32", "trainer.dtype": "float32"}),
        (["0", "1"], ("parallel.tensor_model_parallel_size=2",), SHARED_GPU),
        (["0", "1", "2"], ("placement.reference=1",),
         {**APART, "services.trainer_gpus": "0,1", "services.rollout_gpus": "2"}),
        (["4", "5", "6"], ("services.trainer_gpus=6",),
         {**APART, "services.trainer_gpus": "6", "services.rollout_gpus": "4,5"}),
    ],
)  # fmt: skip
def test_automatic_settings_by_gpus(
    gpus: list[str], overrides: tuple[str, ...], expected: dict[str, object]
) -> None:
    assert chosen(Machine(gpus, cores=16, bfloat16=True), *overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        (("bound.groups_per_step=8", "bound.max_staleness=1"), 32),
        (("bound.groups_per_step=32", "bound.max_staleness=1"), 64),
        (("bound.groups_per_step=32", "bound.max_staleness=2"), 96),
        (("bound.groups_per_step=256", "bound.max_staleness=2"), 128),
        (("bound.groups_per_step=256", "engine.max_running=64"), 32),
        (("bound.groups_per_step=256", "sampling.samples_per_prompt=2"), 512),
        (("bound.groups_per_step=256", "environment.name=agent"), 32),
        (("bound.groups_per_step=256", "environment.name=openenv"), 32),
        (("bound.groups_per_step=256", "environment.name=tools", "environment.record=off"), 32),
        (("bound.groups_per_step=256", "rollout.groups_in_flight=7"), 7),
    ],
)
def test_a_worker_holds_what_the_bound_allows_and_its_engine_can_use(
    overrides: tuple[str, ...], groups: int
) -> None:
    assert chosen(Machine(["0"], cores=16), *overrides)["rollout.groups_in_flight"] == groups


@pytest.mark.parametrize(
    ("machine", "overrides", "threads", "dtypes"),
    [
        (Machine(cores=2), (), (1, 1), ("float32", "float32")),
        (Machine(cores=16), (), (8, 8), ("float32", "float32")),
        (Machine(cores=3, bfloat16=True), (), (2, 1), ("bfloat16", "bfloat16")),
        (Machine(cores=16, bfloat16=True), ("engine.name=hf",), (8, 8), ("float32", "float32")),
        (Machine(cores=16, bfloat16=True), ("engine.dtype=float32",), (8, 8), ("float32", "float32")),
        (Machine(cores=16), ("engine.dtype=bfloat16",), (8, 8), ("float32", "bfloat16")),
        (Machine(cores=16), ("engine.threads=3",), (13, 3), ("float32", "float32")),
        (Machine(cores=16), ("services.rollouts=3", "parallel.data_parallel_size=2"), (3, 3),
         ("float32", "float32")),
        (Machine(cores=16), ("services.rollouts=3", "eval.every=5"), (4, 3), ("float32", "float32")),
        (Machine(cores=16), ("engine.name=scripted",), (16, 1), ("float32", "float32")),
        (Machine(cores=16, bfloat16=True), ("trainer.backend=scripted",), (1, 16), ("float32", "float32")),
        (Machine(["0"], cores=64), (), (16, 1), ("bfloat16", "bfloat16")),
    ],
)  # fmt: skip
def test_automatic_threads_and_dtypes_by_processor(
    tmp_path: Path,
    machine: Machine,
    overrides: tuple[str, ...],
    threads: tuple[int, int],
    dtypes: tuple[str, str],
) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = chosen(machine, f"model.path={tmp_path}", *overrides)
    assert (found["trainer.threads"], found["engine.threads"]) == threads
    assert (found["trainer.dtype"], found["engine.dtype"]) == dtypes


def test_the_dtype_of_training_stays_as_it_was_chosen(tmp_path: Path) -> None:
    chosen_before = load_settings(None, ["trainer.dtype=bfloat16", "trainer.threads=7"], {})
    dump_settings(chosen_before, tmp_path / FILE)
    again = load_settings(None, [f"run.dir={tmp_path}"], {"CUDA_VISIBLE_DEVICES": ""})
    assert (again.trainer.dtype, again.trainer.threads) == ("bfloat16", 1)
    asked = load_settings(None, [f"run.dir={tmp_path}", "trainer.dtype=float32"], {})
    assert asked.trainer.dtype == "float32"


def test_auto_in_a_file_is_as_if_it_were_not_given(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    values: dict[str, dict[str, str]] = {}
    for dotted in AUTOMATIC:
        section, name = dotted.split(".")
        values.setdefault(section, {})[name] = "auto"
    path.write_text(json.dumps(values))
    settings = load_settings(str(path), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert settings == Settings() == load_settings(environ={"CUDA_VISIBLE_DEVICES": ""})


def test_auto_is_refused_where_nothing_chooses() -> None:
    with pytest.raises(SettingsError, match=r"engine\.kv_cache_mb"):
        load_settings(None, ["engine.kv_cache_mb=auto"], {})


def test_given_settings_are_not_chosen() -> None:
    values = {"engine": {"dtype": "bfloat16", "enforce_eager": "auto"}}
    assert set(AUTOMATIC) - set(split_automatic(values)) == {"engine.dtype"}
    assert values == {"engine": {"dtype": "bfloat16"}}


def test_a_build_without_cuda_sees_no_gpus() -> None:
    import torch

    expected = ["3", "5"] if torch.version.cuda else []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}) == expected
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
