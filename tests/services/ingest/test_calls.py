"""Which calls and results of tools are journalled, and which are refused."""

from typing import Any

import msgspec
import pytest

from protocol.errors import ProtocolError
from protocol.messages import Call
from protocol.tensors import Array
from services.ingest.calls import check_call
from tests.protocol.samples import CALL, RESULT


@pytest.mark.parametrize("call", [CALL, RESULT], ids=["call", "result"])
def test_a_call_and_a_result_are_taken(call: Call) -> None:
    check_call(call)


IDS = Array.of([1, 2], "int32")
WRONG: dict[str, tuple[Call, dict[str, Any], str]] = {
    "no tokens": (CALL, {"tokens": Array.of([], "int32")}, "logprobs"),
    "another count": (CALL, {"logprobs": Array.of([-0.5], "float32")}, "logprobs"),
    "not finite": (CALL, {"logprobs": Array.of([-0.5, float("nan")], "float32")}, "logprobs is not finite"),
    "above 0": (
        CALL,
        {"logprobs": Array.of([-0.5, 2.64], "float32")},
        "logprobs of sample 0 has 2.64 for token 1, above 0",
    ),
    "spans": (CALL, {"spans": Array.of([[1, 3]], "int32")}, "spans do not cover 2 tokens"),
    "parent": (CALL, {"parent": 1}, "parent is 1 of call 1"),
    "result of a call": (CALL, {"result": b"1"}, "result has no name"),
    "name without a result": (RESULT, {"result": b""}, "result has no name, or its name no result"),
    "tokens of a result": (RESULT, {"tokens": IDS}, "tokens is not empty, and the call is a result"),
    "context of a result": (RESULT, {"inserted": IDS}, "inserted is not empty"),
    "number of a result": (RESULT, {"number": -1}, "number is -1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_call_that_contradicts_itself_is_refused(what: str) -> None:
    call, changes, why = WRONG[what]
    with pytest.raises(ProtocolError, match=f"group 7: {why}"):
        check_call(msgspec.structs.replace(call, **changes))


def test_a_first_call_is_journalled_though_attempts_ended_before_it() -> None:
    check_call(msgspec.structs.replace(CALL, attempt=3, number=0, parent=-1))


@pytest.mark.parametrize("field", ["number", "attempt"])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_number_that_the_spool_cannot_hold_is_named(field: str, value: int) -> None:
    with pytest.raises(ProtocolError, match=f"group 7: {field} is {value}"):
        check_call(msgspec.structs.replace(CALL, **{field: value}))
