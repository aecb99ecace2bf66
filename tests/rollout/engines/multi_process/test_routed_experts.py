"""Tests that the experts an engine reports become those of a completion, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from protocol.errors import EngineError
from protocol.messages import UNKNOWN_EXPERT
from rollout.engines.multi_process.routed_experts import Mixture, recorded_experts

NAMES = [
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.shared_experts.down_proj.weight",
    "model.layers.2.mlp.experts.0.down_proj.weight",
    "model.layers.2.mlp.experts.1.down_proj.weight",
    "model.layers.3.block_sparse_moe.experts.0.w1.weight",
    "model.layers.10.mlp.experts.gate_up_proj",
    "model.layers.11.mlp.experts.0.down_proj.weight",
]
ROWS = np.stack([np.arange(24).reshape(4, 6) + 100 * token for token in range(5)]).reshape(5, 12, 2)
"""Of five inputs, twelve layers, two experts each."""


MIXTURE = Mixture((2, 10), 12, 2)


def test_layers_with_experts_are_those_of_the_checkpoints_names() -> None:
    model = {"num_hidden_layers": 11, "num_experts_per_tok": 2}
    assert Mixture.of(NAMES, model, Path("m")) == Mixture((2, 3, 10), 11, 2)
    for names, given in ((NAMES[:2], model), (NAMES, {"num_hidden_layers": 11})):
        with pytest.raises(EngineError, match=r"enable_return_routed_experts: the model in m has no experts"):
            Mixture.of(names, given, Path("m"))


def test_rows_are_read_from_their_bytes() -> None:
    data = ROWS.astype(np.int32).tobytes()
    np.testing.assert_array_equal(MIXTURE.rows(data), ROWS)
    assert [MIXTURE.rows(wrong) for wrong in (b"", data[:-1], data[:-4])] == [None] * 3


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_experts_are_those_of_the_layers_that_have_some(dtype: type) -> None:
    rows = (ROWS % 100).astype(dtype)
    found = recorded_experts("r", rows, MIXTURE, 5)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, rows[:, [2, 10]])


def test_a_row_that_no_pass_has_written_is_unknown() -> None:
    rows = ROWS.copy()
    rows[1, 2], rows[2, 10] = 0, -1
    found = recorded_experts("r", rows, MIXTURE, 5)
    assert (found[1, 0] == UNKNOWN_EXPERT).all()
    assert (found[2, 1] == UNKNOWN_EXPERT).all()
    assert (found != UNKNOWN_EXPERT).sum() == found.size - 4
    alone = recorded_experts("r", rows[:, :, :1], MIXTURE, 5)
    assert alone[1, 0, 0] == 0


@pytest.mark.parametrize(
    ("rows", "words"), [(None, "None"), (ROWS, r"\[5, 12, 2\] for 6"), (ROWS[0], r"\[12, 2\]")]
)
def test_another_number_of_rows_is_refused(rows: np.ndarray | None, words: str) -> None:
    with pytest.raises(EngineError, match=rf"request r: .*{words}"):
        recorded_experts("r", rows, MIXTURE, 6)
    with pytest.raises(EngineError, match="layers up to 12"):
        recorded_experts("r", ROWS, Mixture((2, 12), 13, 2), 5)


def test_what_an_aborted_request_lacks_is_unknown() -> None:
    found = recorded_experts("r", ROWS, MIXTURE, 7, aborted=True)
    np.testing.assert_array_equal(found[:5], ROWS[:, [2, 10]])
    assert (found[5:] == UNKNOWN_EXPERT).all()
    np.testing.assert_array_equal(recorded_experts("r", ROWS, MIXTURE, 3, aborted=True), ROWS[:3, [2, 10]])
