"""Compares the table of refused arguments with the installed SGLang's own."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.engines.arguments import check_known
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import tiny_model
from rollout.engines.sglang.arguments import CHANGEABLE, REFUSED, argument_names, option_words
from rollout.engines.sglang.launch import adapter_options, server_command
from tests.changes import SGLANG, slow_unless_changed
from tests.contracts.sglang_environment import sglang_settings

FIELDS = """
import json
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs
print(json.dumps([field.name for field in record_fields(ServerArgs)]))
"""


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(name="sglang", enable_return_routed_experts=True, **sglang_settings())


@pytest.fixture(scope="module")
def known(config: EngineConfig) -> set[str]:
    """The arguments as SGLang's own interpreter has them."""
    command, environ = [config.python, "-c", FIELDS], {**os.environ, **config.environment}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout.splitlines()[-1]))


@slow_unless_changed(*SGLANG)
def test_names_that_are_read_are_those_of_the_installed_engine(config: EngineConfig, known: set[str]) -> None:
    assert set(argument_names(config)) == {name for name in known if not name.startswith("_")}


@slow_unless_changed(*SGLANG)
def test_every_name_of_the_table_is_an_argument(known: set[str]) -> None:
    assert REFUSED.keys() | CHANGEABLE <= known
    assert not REFUSED.keys() & CHANGEABLE


def test_every_argument_that_the_engine_sets_is_in_the_table(config: EngineConfig, tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    command = server_command(config, tmp_path, "rollout.0.a", 4000) + adapter_options({"policy": tmp_path})
    options = {word[2:].partition("=")[0].replace("-", "_") for word in command if word.startswith("--")}
    assert options <= REFUSED.keys() | CHANGEABLE


def test_unknown_argument_is_named_with_the_nearest_one(config: EngineConfig) -> None:
    wrong = replace(config, arguments={"moe_runner": "triton"})
    with pytest.raises(SettingsError, match=r"argument of sglang 'moe_runner' is not known; did you mean"):
        check_known(wrong, "engine.arguments")
    check_known(replace(wrong, python="/nowhere/python"), "engine.arguments")  # it may be on another host


def test_given_arguments_follow_on_the_command_line(tmp_path: Path) -> None:
    assert option_words({"page_size": 16, "enable_mixed_chunk": True, "lora_strict_loading": False}) == [
        "--page-size=16",
        "--enable-mixed-chunk",
        "--no-lora-strict-loading",
    ]
    assert option_words({"cuda_graph_bs_decode": [1, 2], "mm_process_config": {"a": 1}}) == [
        "--cuda-graph-bs-decode",
        "1",
        "2",
        '--mm-process-config={"a": 1}',
    ]
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(name="sglang", arguments={"page_size": 16})
    assert server_command(config, tmp_path, "rollout.0.a", 4000)[-1] == "--page-size=16"
