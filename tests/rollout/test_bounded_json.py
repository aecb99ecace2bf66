"""JSON of strangers: a large document reads as a small one does, up to its last value that is allowed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.bounded_json import MAX_VALUES, WHOLE, TooManyValues, parsed_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=30,
)
BLANK = " " * WHOLE
BROKEN = (
    "", "[1,", "[1,]", "[,]", "[1 2]", "[01]", "{1: 2}", '{"a": NaN}', "[1e999]", "[-Infinity]", '"\\ud800"',
    "[] []",
)  # fmt: skip


@given(value=VALUES, indent=st.sampled_from([None, 1]))
def test_a_large_document_reads_as_a_small_one(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert parsed_json(text + BLANK) == parsed_json(BLANK + text) == parsed_json(text) == value


@pytest.mark.parametrize("padding", ["", BLANK])
@pytest.mark.parametrize("text", BROKEN)
def test_text_that_is_no_json_is_refused(text: str, padding: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed_json(text + padding)


@pytest.mark.parametrize("inside", ["[]", "{}", "1", "null", '"x"', "1.5", "[1,1]"])
def test_values_are_read_up_to_the_last_one_that_is_allowed(inside: str) -> None:
    values = 3 if inside == "[1,1]" else 2 if inside in ("[]",) else 1
    count = (MAX_VALUES + 10) // values
    assert len(parsed_json(f"[{','.join([inside] * count)}]" + BLANK, 10)) == count
    with pytest.raises(TooManyValues, match="over 100000 values"):
        parsed_json(f"[{','.join([inside] * count)}]" + BLANK)


def test_values_of_objects_count() -> None:
    entries = ",".join(f'"{i}": 0' for i in range(MAX_VALUES))
    assert len(parsed_json("{" + entries + "}")) == MAX_VALUES
    with pytest.raises(TooManyValues):
        parsed_json("{" + entries + ', "one more": 0}')


def test_deep_documents_are_refused_whatever_their_size() -> None:
    for levels in (WHOLE // 2, WHOLE * 2):
        with pytest.raises(RecursionError):
            parsed_json("[" * levels)
