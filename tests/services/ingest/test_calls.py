"""Which calls are journalled, and why others are refused."""

import pytest
from msgspec.structs import replace

from protocol.errors import ProtocolError
from services.ingest.calls import check_call
from tests.protocol.samples import CALL


def test_a_first_call_is_journalled_though_attempts_ended_before_it() -> None:
    check_call(replace(CALL, attempt=3, number=0, parent=-1))


@pytest.mark.parametrize("field", ["number", "attempt"])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_number_that_the_spool_cannot_hold_is_named(field: str, value: int) -> None:
    with pytest.raises(ProtocolError, match=f"group 7: {field} is {value}"):
        check_call(replace(CALL, **{field: value}))
