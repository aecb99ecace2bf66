"""Runs the command `tether` with its own packages, even if others with the same names are installed."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main() -> None:
    """Run `tether`; exit with 1 if another distribution has replaced one of its packages."""
    found = importlib.util.find_spec("services")
    if found is None or found.origin is None or Path(found.origin).resolve().parents[1] != ROOT:
        sys.path.insert(0, str(ROOT))
        importlib.invalidate_caches()
    import services

    if not hasattr(services, "protect_imports"):
        sys.exit(
            f"tether: {services.__file__} belongs to another distribution, which has replaced it; "
            "install tether-rl into an environment without that one"
        )
    from services.cli import main as run

    run()


if __name__ == "__main__":
    main()
