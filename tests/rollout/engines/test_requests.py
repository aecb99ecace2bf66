"""Tests the reading of model configs and the spans of token versions."""

import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import EngineSettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.requests import NOT_UPDATED, check_fits, read_config, spans_from_marks, spans_of


def test_unreadable_model_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineSettingsError, match=r"config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineSettingsError, match="not a JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize(("engine", "kind"), NOT_UPDATED)
def test_a_model_whose_weights_an_engine_cannot_update_is_refused_by_name(engine: str, kind: str) -> None:
    model, place = {"model_type": kind}, Path("/models/here")
    check_fits(EngineConfig(name="sglang"), model, place)
    check_fits(EngineConfig(name=engine), {"model_type": "qwen2"}, place)
    with pytest.raises(
        EngineSettingsError, match=rf"'{engine}' cannot serve the {kind} in {place} .* use sglang"
    ):
        check_fits(EngineConfig(name=engine), model, place)


@pytest.mark.parametrize(
    ("model", "is_served"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, False),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, False),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            False,
        ),
        ({"model_type": "mistral", "sliding_window": 128}, True),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "qwen2", "sliding_window": 64}, True),
        ({"model_type": "qwen2", "sliding_window": 64, "layer_types": ["full_attention"]}, True),
        ({"model_type": "gemma2", "sliding_window": 64}, True),
    ],
)
def test_sglang_is_refused_for_windows_that_it_ignores(
    tmp_path: Path, model: dict[str, object], is_served: bool
) -> None:
    check_fits(EngineConfig(name="vllm", max_model_len=128), model, tmp_path)
    engine = EngineConfig(name="sglang", max_model_len=128)
    with nullcontext() if is_served else pytest.raises(EngineSettingsError, match="window of 64 tokens"):
        check_fits(engine, model, tmp_path)


@given(st.lists(st.integers(0, 3)))
def test_spans_give_the_version_of_every_token(versions: list[int]) -> None:
    spans = spans_of(versions)
    start = 0
    found = []
    for end, version in spans:
        assert end > start
        found += [version] * (end - start)
        start = end
    assert found == versions
    assert all(a[1] != b[1] for a, b in itertools.pairwise(spans))


def test_spans_skip_versions_without_tokens_and_end_at_the_last_token() -> None:
    assert spans_from_marks([(0, 1), (0, 2), (5, 3), (5, 4), (9, 5)], 7) == ((5, 2), (7, 4))
    assert spans_from_marks([(0, 1), (3, 1), (6, 1)], 9) == ((9, 1),)
    assert spans_from_marks([(0, 1)], 0) == ()
