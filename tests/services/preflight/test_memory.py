"""Tests what is said of the trainer's memory before a start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.host.machine import memory_limit
from services.preflight.memory import (
    check_host_memory,
    critic_workload,
    describe_memory,
    expected_gb,
    host_memory_problems,
    host_workload_of,
    memory_text,
    planned_of,
    shared_memory_problems,
    workload_of,
)
from services.preflight.model import ModelFacts, read_facts
from services.settings.load import load_settings
from services.settings.sections import Settings
from tests.trainer.megatron.models import save_model
from trainer.fsdp.memory.expected import ShardedWorkload
from trainer.megatron.memory.expected import expected_memory
from trainer.memory.expected import GIB

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
HUGE = {
    **QWEN,
    **{name: 40 * QWEN[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
    "num_key_value_heads": 80,
    "num_hidden_layers": 240,
}
"""Wide rather than deep: what is expected is added up over layers."""
FACTS = ModelFacts(Path("model"), QWEN, {}, is_made=True)


def settings(*overrides: str) -> Settings:
    return load_settings(None, ["trainer.dtype=bfloat16", *overrides], environ={"CUDA_VISIBLE_DEVICES": ""})


def test_a_budget_that_is_set_is_what_is_expected() -> None:
    given = settings("trainer.micro_batch_tokens=4096", "algorithm.kl_coef=0.1")
    memory = expected_memory(workload_of(given, FACTS), 4096)
    assert expected_gb(given, FACTS) == memory.peak / GIB
    text = memory_text(workload_of(given, FACTS))
    assert text == f"expected peak of a trainer rank at 4096 tokens a micro-batch: {memory}"


def test_memory_of_a_sharded_model_is_described_by_its_files(tmp_path: Path) -> None:
    facts = read_facts(save_model("qwen2", tmp_path))
    given = settings("trainer.backend=fsdp", "algorithm.kl_coef=0.1", "trainer.micro_batch_tokens=512")
    work = planned_of(given, facts)
    assert isinstance(work, ShardedWorkload)
    assert work.others == (work.model.parameters,)
    assert expected_gb(given, facts) == work.expected(512).peak / GIB
    assert memory_text(work).endswith(f"at 512 tokens a micro-batch: {work.expected(512)}")
    assert describe_memory(given, facts, environ={"CUDA_VISIBLE_DEVICES": ""}) == []
    offloaded = settings("trainer.backend=fsdp", "optimizer.cpu_offload=true")
    (line,) = describe_memory(offloaded, facts, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert line.startswith("memory   expected of the host: ")
    apart = settings("trainer.backend=fsdp", "algorithm.kl_coef=0.1", "placement.reference=1")
    assert planned_of(apart, facts) == replace(work, others=(), trainer=apart.trainer)
    assert planned_of(given, replace(facts, is_made=False)) is None


def test_a_budget_that_is_chosen_later_is_between_the_smallest_and_the_largest() -> None:
    work = workload_of(settings(), FACTS)
    assert expected_gb(settings(), FACTS) == expected_memory(work, 1024).peak / GIB
    most = expected_memory(work, 32768).peak / GIB
    assert f"at 1024 tokens a micro-batch, {most:.1f} GiB at 32768" in memory_text(work)


@pytest.mark.parametrize("overrides", [("trainer.backend=reference",), ("trainer.device=cpu",), ()])
def test_nothing_is_said_without_a_gpu_or_of_another_backend(overrides: tuple[str, ...]) -> None:
    environ: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": "0" if overrides else "-1"}
    assert describe_memory(settings(*overrides), FACTS, environ) == []
    if "trainer.backend=reference" in overrides:
        assert expected_gb(settings(*overrides), FACTS) is None


def test_a_critic_apart_is_in_its_own_ranks_memory_and_not_in_the_policys() -> None:
    ppo = ("algorithm.name=ppo", "critic.weight_decay=0.3")
    apart = settings(*ppo, "placement.critic=4", "placement.critic_tensor_parallel_size=2")
    alone = critic_workload(apart, FACTS)
    assert alone.architecture == workload_of(settings(*ppo), FACTS).critic
    assert workload_of(apart, FACTS).critic is None
    assert (alone.layout.tp, alone.layout.dp, alone.optimizer.weight_decay) == (2, 2, 0.3)
    beside, without = (expected_memory(workload_of(given, FACTS), 1024) for given in (settings(*ppo), apart))
    own = expected_memory(replace(alone, parallel=apart.parallel), 1024)
    assert beside.parameters == without.parameters + own.parameters
    assert beside.optimizer == without.optimizer + own.optimizer


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (("weights.transport=nccl",), 1),
        (("weights.transport=nccl", "weights.delta=true"), 2),
        (("weights.transport=ipc",), 2),
        (("weights.transport=nccl", "parallel.tensor_model_parallel_size=2"), 1 / 2),
        (("weights.transport=shm",), 0),
        (("weights.transport=nccl", "weights.backend=gloo"), 0),
        (("weights.transport=nccl", "lora.rank=4"), 0),  # the adapters alone
    ],
)
def test_versions_that_a_rank_serves_are_named(
    overrides: tuple[str, ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.settings.automatic._torch_has_cuda", lambda: True)
    facts = replace(FACTS, shapes={"weight": (1 << 30, 3)})
    given = settings(*overrides, "engine.dtype=bfloat16")
    served = share * (6 << 30)
    assert given.served_bytes(facts.parameters) == served
    lines = describe_memory(given, facts, {"CUDA_VISIBLE_DEVICES": "0,1"})
    named = [line for line in lines if line.startswith("memory   versions that each rank serves")]
    assert [f"{served / GIB:.1f} GiB" in line for line in named] == ([True] if share else [])


def test_the_host_is_described_where_masters_are_on_it() -> None:
    given = settings("optimizer.cpu_offload=true")
    (line,) = describe_memory(given, FACTS, {"CUDA_VISIBLE_DEVICES": ""})
    host = host_workload_of(given, FACTS, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert host is not None
    assert f"expected of the host: {host.expected()}; this one has {memory_limit() / GIB:.1f} GiB, " in line


def of_model(directory: Path, config: dict[str, Any], *overrides: str) -> Settings:
    """Settings of a run with the model of a configuration."""
    (directory / "config.json").write_text(json.dumps(config))
    return settings(f'model.path="{directory}"', *overrides)


def test_memory_that_no_host_has_is_refused_before_a_start_and_at_the_start(tmp_path: Path) -> None:
    (problem,) = host_memory_problems(settings(), replace(FACTS, config=HUGE))
    assert f"and this host has {memory_limit() / GIB:.1f} GiB; no setting" in str(problem)
    with pytest.raises(SettingsError, match="of its memory, and this host has free "):
        check_host_memory(of_model(tmp_path, HUGE), 1)


@pytest.mark.parametrize("backend", ["reference", "scripted"])
def test_other_backends_are_not_checked(backend: str) -> None:
    given = settings(f"trainer.backend={backend}")
    assert not list(host_memory_problems(given, replace(FACTS, config=HUGE)))
    check_host_memory(given, 1)  # without a model


def test_memory_that_a_host_has_is_no_problem(tmp_path: Path) -> None:
    assert not list(host_memory_problems(settings(), FACTS))
    check_host_memory(of_model(tmp_path, QWEN), 1)


def test_hosts_of_a_cluster_check_themselves() -> None:
    given = settings("cluster.nodes=2", "cluster.rendezvous=a:1", "parallel.data_parallel_size=2")
    assert not list(host_memory_problems(given, replace(FACTS, config=HUGE)))


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (("weights.keep=1000000",), True),
        (("weights.keep=2",), False),
        (("weights.keep=1000000", "weights.transport=disk"), False),
        (("weights.keep=1000000", "weights.directory=/weights"), False),
    ],
)
def test_versions_that_do_not_fit_into_shared_memory_are_refused(
    overrides: tuple[str, ...], is_refused: bool
) -> None:
    model = replace(FACTS, shapes={"w": (1024, 1024)})
    problems = [str(problem) for problem in shared_memory_problems(settings(*overrides), model)]
    assert len(problems) == is_refused
    said = f"1000000 versions, and one that is written, take {1000001 * 4 / 1024:.3f} GiB"
    assert all(said in text for text in problems)
