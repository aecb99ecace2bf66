"""Every Lua script documents itself, and is loaded again by a server that lost it."""

import itertools
from pathlib import Path

import pytest

from services.ledger.redis import scripts
from tests.contracts.ledger_rig import SCRIPTS, Driver, RedisRig


async def test_scripts_survive_a_flush(valkey_url: str) -> None:
    rig = await RedisRig.start(valkey_url)
    driver = await Driver(rig).begin(B=1)
    rig.server.script_flush()
    await driver.step(1)
    await rig.close()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_takes_returns_and_refuses(name: str) -> None:
    lines = (Path(scripts.__file__).parent / "lua" / f"{name}.lua").read_text().splitlines()
    header = "\n".join(itertools.takewhile(lambda line: line.startswith("--"), lines))
    assert "Returns" in header
    assert "Refuses" in header
    assert ("ARGV:" in header) == any("ARGV[" in line for line in lines)
