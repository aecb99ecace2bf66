"""`python -m services.prepare`: make a run ready for services that are started one by one, as containers are.

Produces: the model, the run in the ledger, and RUN_DIR/settings.json, which the services read as `TETHER_CONFIG`. Harmless to repeat.
Exit codes are those of a service: 0 ready, 1 failed, 2 wrong settings.
"""

import asyncio
import sys

from services.process import configure_logging, connected, explain, ledger_url
from services.settings import Settings, dump_settings, load_settings
from services.supervisor import prepare


async def prepare_run(settings: Settings) -> str:
    """Make everything that the services of a run expect to find. Returns what the ledger's server does not promise, or nothing.

    Raises:
        SettingsError: naming what is wrong; the ledger is unchanged.
        Refused: the ledger has a run of this name that is another one; its settings stay as they are.
    """
    ledger_url(settings)  # refuses before a model is made
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    spec = await asyncio.to_thread(prepare, settings)
    async with connected(settings) as ledger:
        await ledger.create(spec)
        await ledger.drain(False)
        dump_settings(settings, settings.run_dir / "settings.json")
        return ledger.durability


def main() -> None:
    """Prepare the run that `TETHER_CONFIG` and the other variables describe."""
    configure_logging("prepare")
    try:
        settings = load_settings()
        warning = asyncio.run(prepare_run(settings))
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception as error:
        line, code = explain(error)
        print(f"tether prepare: {line}", file=sys.stderr)
        sys.exit(code)
    if warning:
        print(warning, file=sys.stderr)
    print(f"run {settings.run.name} is ready in {settings.run_dir}: {settings.run.steps} steps, model {settings.model_dir}")


if __name__ == "__main__":
    main()
