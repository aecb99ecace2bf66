"""A service that cannot be forked from its spare, which has a thread; it ends with exit code 7."""

import sys
import threading

from services.settings.sections import Settings


def preload(_: Settings) -> None:
    """Start a thread that stays, as a library might that is imported."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(7)
