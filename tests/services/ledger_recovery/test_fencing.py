"""Tests what a trainer says of what has fenced it."""

import json
from pathlib import Path

from services.ledger_recovery.fencing import fence_reason
from tests.contracts.ledger_rebuild import restored
from tests.contracts.ledger_rig import Driver, MemoryRig, spec

REBUILT = "the ledger of run r lost writes and was rebuilt (ledger.rebuilt in logs/ingest.log)"


async def test_a_rebuild_is_not_blamed_on_another_trainer(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin(B=1)
    await driver.step(1)
    ledger = driver.ledger
    await ledger.claim("e2")
    assert await fence_reason(ledger, tmp_path, "r") == "another trainer has taken over run r"
    status, events = await ledger.status(), await ledger.events(0, 1000)
    await ledger.rebuild(spec("r", E=1, B=1), restored(events, found=status.sequence))
    assert await fence_reason(ledger, tmp_path, "r") == REBUILT
    rebuilt = await ledger.events(status.sequence, 1000)
    (tmp_path / "audit.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*events, *rebuilt]))
    await ledger.archived((await ledger.status()).sequence)
    assert await ledger.events(0, 1000) == []
    assert await fence_reason(ledger, tmp_path, "r") == REBUILT
    await ledger.claim("e3")
    assert await fence_reason(ledger, tmp_path, "r") == "another trainer has taken over run r"
