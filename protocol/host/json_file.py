"""Reads files that contain one JSON object; error messages name the file."""

import json
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError, error_text


def read_object(
    path: Path, what: str, remedy: str = "", kind: type[SettingsError] = SettingsError
) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        what: beginning of the message.
        remedy: end of the message, which says what to do.

    Raises:
        SettingsError: the file cannot be read, or contains no JSON object.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise kind(f"{what}: {error_text(error)}{remedy}") from None
    if not isinstance(found, dict):
        raise kind(f"{what}: it is not a JSON object{remedy}")
    return found
