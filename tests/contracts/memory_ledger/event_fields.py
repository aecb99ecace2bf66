from typing import Any

import msgspec

from services.ledger.event_log.events import LedgerEvent


def fields_of(event: LedgerEvent) -> dict[str, Any]:
    """An event as JSON values, in the order in which the log has them."""
    head = {"seq": event.seq, "time_ms": event.time_ms}
    fields: dict[str, Any] = msgspec.to_builtins(event, str_keys=True)
    return head | {"event": event.kind} | fields
