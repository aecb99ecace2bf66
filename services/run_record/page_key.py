"""Creates, validates and reads the key of the page, stored in a file that only the run's user can read.

The registry contains the page's URL without the key, because others may read the ledger and its files.
"""

import os
import secrets
import shlex
from contextlib import suppress
from pathlib import Path

from yarl import URL

from protocol.errors import SettingsError, error_text
from protocol.network.addresses import is_loopback

KEY_FILE = "monitor.key"
"""Name of the generated key's file in the run directory."""
SHORTEST_KEY = 16


def access_key(host: str, key_file: str, run_dir: Path) -> str:
    """Return the key that readers need; empty on loopback unless a key file is configured.

    Args:
        host: address on which the page is served.
        key_file: `monitor.key_file`; empty: `KEY_FILE` in the run directory, created if missing.
        run_dir: directory of the run.

    Raises:
        SettingsError: the key cannot be read or created, is too short, or other users can read it.
    """
    if is_loopback(host) and not key_file:
        return ""
    path = Path(key_file) if key_file else run_dir / KEY_FILE
    try:
        if not key_file:
            _make_key(path)
        return read_key(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"monitor.host = {host!r} needs a key: {path}: {error_text(error)}") from None


def add_key(page: str, host: str, key_file: str, run_dir: Path) -> str:
    """Add the key to the URL of a page, if it is required and this user can read it.

    Args:
        page: registered URL, without a key.
        host: address on which the page is served.
        key_file: `monitor.key_file`; empty: `KEY_FILE` in the run directory.
        run_dir: directory of the run.
    """
    if not is_loopback(host) or key_file:
        with suppress(OSError, UnicodeDecodeError, SettingsError):
            return str(URL(page).with_query(key=read_key(Path(key_file) if key_file else run_dir / KEY_FILE)))
    return page


def read_key(path: Path) -> str:
    """Return the key in a file.

    Raises:
        SettingsError: the key is too short, or other users can read the file.
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not text.
    """
    mode, key = path.stat().st_mode, path.read_text().strip()
    if mode & 0o077:
        raise SettingsError(f"{path}: others can read the key: chmod 600 {shlex.quote(str(path))}")
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable():
        raise SettingsError(f"{path}: a key has at least {SHORTEST_KEY} printable characters")
    return key


def _make_key(path: Path) -> None:
    """Write a random key, readable only by its owner, unless the file exists. Atomic."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if not path.exists():
            draft.touch(0o600)
            draft.write_text(secrets.token_urlsafe(24) + "\n")
            with suppress(FileExistsError):  # another process was faster
                os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
