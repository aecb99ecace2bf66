"""Finds where in the user's code an exception comes from."""

import traceback
from pathlib import Path

OURS = Path(__file__).resolve().parents[1]


def locate(error: BaseException, file: str = "") -> str:
    """Return `FILE:LINE` of the innermost place in the user's code that an exception passed.

    Args:
        error: the exception.
        file: a file of the user; places below its directory are preferred. Empty: any place that is neither
            ours nor of the import system.

    Returns:
        Empty if there is no such place.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not Path(frame.filename).is_relative_to(OURS)
    ]
    own = [frame for frame in frames if "/lib/python" not in frame.filename]
    if file:
        below = Path(file).parent
        own = [frame for frame in own if Path(frame.filename).is_relative_to(below)] or own
    chosen = (own or frames)[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else ""
