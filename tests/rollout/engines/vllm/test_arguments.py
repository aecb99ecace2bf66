"""Compares the table of refused arguments with the installed vLLM's own."""

from dataclasses import fields
from pathlib import Path

import pytest

from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import tiny_model
from rollout.engines.vllm.arguments import CHANGEABLE, REFUSED, argument_names
from rollout.engines.vllm.launch import engine_arguments

pytestmark = pytest.mark.xdist_group("vllm-recompute")  # the process in which the contract imports vLLM


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The arguments as vLLM has them, whose import takes seconds of each process that collects this file."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in fields(AsyncEngineArgs)}


def test_names_that_are_read_are_those_of_the_installed_engine(known: set[str]) -> None:
    found = argument_names(EngineConfig())
    assert set(found) == {name for name in known if not name.startswith("_")}
    assert len(found) == len(set(found))


def test_every_name_of_the_table_is_an_argument(known: set[str]) -> None:
    assert REFUSED.keys() | CHANGEABLE <= known
    assert not REFUSED.keys() & CHANGEABLE


@pytest.mark.parametrize("lora", [NO_ADAPTERS, LoraConfig(rank=8)])
def test_every_argument_that_the_engine_sets_is_in_the_table(tmp_path: Path, lora: LoraConfig) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(attention_backend="FLASH_ATTN", enable_return_routed_experts=True)
    assert engine_arguments(config, tmp_path, "rollout.0.a", lora).keys() <= REFUSED.keys() | CHANGEABLE


def test_given_arguments_are_passed_as_they_are(tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    given = {"max_num_batched_tokens": 4096, "compilation_config": {"level": 0}}
    arguments = engine_arguments(EngineConfig(arguments=given), tmp_path, "rollout.0.a", NO_ADAPTERS)
    assert given.items() <= arguments.items()
