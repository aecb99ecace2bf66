"""Tests `services.pool`: which engine each worker gets, and which pools are refused."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.settings.engine_pool import pool_variables
from services.settings.load import dump_settings, load_settings

POOL = """
[engine]
max_model_len = 64

[[services.pool]]
count = 2
engine = { name = "scripted", seconds_per_token = 0.5 }

[[services.pool]]
[services.pool.engine]
name = "sglang"
python = "/opt/sglang/bin/python"
environment = { PYTHONPATH = '/a "b"', OMP_NUM_THREADS = "1" }
"""


def test_each_worker_of_a_pool_gets_its_own_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(POOL)
    settings = load_settings(str(path), environ={})
    assert settings.services.rollout_workers == 3
    dump_settings(settings, tmp_path / "settings.json")
    engines = [
        load_settings(
            str(tmp_path / "settings.json"), environ=pool_variables(settings.services.pool, index)
        ).engine
        for index in range(4)
    ]
    assert [engine.name for engine in engines] == ["scripted", "scripted", "sglang", "scripted"]
    assert [engine.max_model_len for engine in engines] == [64] * 4
    assert engines[0].seconds_per_token == 0.5
    assert engines[2].python == "/opt/sglang/bin/python"
    assert engines[2].environment == {"PYTHONPATH": '/a "b"', "OMP_NUM_THREADS": "1"}


def test_without_a_pool_every_worker_has_the_one_engine() -> None:
    settings = load_settings(overrides=["services.rollouts=2"], environ={})
    assert settings.services.rollout_workers == 2
    assert pool_variables(settings.services.pool, 0) == {}


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("[{ cout = 1 }]", r"services\.pool\.0\.cout is not known; did you mean 'count'\?"),
        ("[{ count = 0 }]", r"services\.pool\.0\.count: 0 is not between 1 and 10000"),
        (
            "[{}, { engine = { nmae = 'hf' } }]",
            r"services\.pool\.1\.engine\.nmae is not known; did you mean 'name'\?",
        ),
        ("[{ engine = { name = 'sgland' } }]", r"services\.pool\.0\.engine\.name.*sglang"),
        ("[{ engine = { max_running = 0 } }]", r"services\.pool\.0\.engine\.max_running: 0 is not between 1"),
        ("[{ engine = { max_running = 'many' } }]", r"services\.pool\.0\.engine\.max_running"),
        (
            "[{ engine = { dtype = 'bfloat16' } }]",
            r"services\.pool\.0\.engine\.dtype: bfloat16, but weights are published in .* float32",
        ),
        (
            "[{ engine = { name = 'sglang', drafts = 'model' } }]",
            r"services\.pool\.0\.engine\.drafts: engine 'sglang' verifies no drafts; use vllm",
        ),
        (
            "[{ engine = { draft_model = '/heads/one' } }]",
            r"services\.pool\.0\.engine\.draft_model: no drafts come from it while .* is 'off'",
        ),
        (
            "[{}, { engine = { name = 'vllm', drafts = 'model', draft_model = '/e', draft_lr = 1e-4 } }]",
            r"services\.pool\.1\.engine\.draft_lr: 0\.0001, but .* engine\.draft_lr, 0\.0, trains",
        ),
    ],
)
def test_a_wrong_pool_is_refused_by_name(pool: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings(overrides=[f"services.pool={pool}"], environ={})


def test_a_pool_and_a_number_of_workers_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"services\.pool and services\.rollouts"):
        load_settings(overrides=["services.pool=[{ count = 1 }]", "services.rollouts=2"], environ={})
