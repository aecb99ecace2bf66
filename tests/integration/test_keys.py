"""`tether keys`: makes them once, readable by the owner alone, and never over others."""

from pathlib import Path

from tests.integration.command import tether


def test_keys_are_made_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert tether("keys", str(keys)).returncode == 0
    secret = keys / "server.key_secret"
    before = secret.read_bytes()
    assert secret.stat().st_mode & 0o077 == 0
    again = tether("keys", str(keys))
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert secret.read_bytes() == before
