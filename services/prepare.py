"""Prepares a run before its services start: `python -m services.prepare`.

For services that are started one by one, as containers are. `tether up` does the same itself.

Produces: the model, the run in the ledger, and RUN_DIR/settings.json, which the services read as
`TETHER_CONFIG`. Harmless to repeat. Exit codes are those of a service: 0 ready, 1 failed, 2 wrong settings.
"""

import asyncio
import sys
from collections.abc import Sequence

from protocol.errors import SettingsError
from reward.verifiers.registry import make_verifier
from rollout.environments.registry import make_environment
from rollout.prompts.registry import make_source
from rollout.render import Renderer
from services.ledger.interface import RunSpec
from services.ledger_recovery.reconcile import reconcile
from services.runtime.errors import configure_logging, describe_error
from services.runtime.resume import start_or_resume
from services.runtime.run_ledger import ledger_url, open_ledger
from services.runtime.user_modules import add_user_modules
from services.settings.load import load_settings
from services.settings.resume import changes_since_last_start
from services.settings.sections import Settings


def prepare(settings: Settings) -> RunSpec:
    """Check what can be checked before anything starts, and make the random model if one is configured.

    Returns:
        What the ledger has to know of the run.

    Raises:
        SettingsError: names what is wrong.
    """
    changes_since_last_start(settings)
    add_user_modules(settings)
    make_environment(settings.environment)
    for verifier in settings.reward.verifiers:
        make_verifier(verifier.name, verifier.options)
    if settings.model.scratch is not None:
        from trainer.random_model import build_scratch  # imports torch

        build_scratch(settings.model.scratch, settings.model_dir)
    if not (settings.model_dir / "config.json").is_file():
        raise SettingsError(
            "no model: set model.path to a Hugging Face directory, or fill in [model.scratch]"
        )
    source = make_source(settings.prompts)
    Renderer(settings.model_dir, settings.render).prompt_tokens(source.at(0))
    bound = settings.bound
    return RunSpec(
        run=settings.run.name,
        fingerprint=source.fingerprint,
        prompts=source.size,
        steps=settings.run.steps,
        bound=bound.bound,
        max_attempts=bound.max_attempts,
        drop_share=bound.drop_share,
        drop_window=bound.drop_window,
    )


async def prepare_run(settings: Settings) -> Sequence[str]:
    """Make everything that the services of a run expect to find.

    Returns:
        Lines for the user: the bound in force, what changed since the last start, how durable the ledger's
        server is.

    Raises:
        SettingsError: names what is wrong; ledger and settings.json are unchanged.
    """
    ledger_url(settings)  # before a model is made, which takes time
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    spec = await asyncio.to_thread(prepare, settings)
    async with open_ledger(settings) as ledger:
        await reconcile(ledger, settings)
        return [*await start_or_resume(ledger, settings, spec), ledger.durability]


def main() -> None:
    """Prepare the run that `TETHER_CONFIG` and the other variables describe."""
    configure_logging("prepare")
    try:
        settings = load_settings()
        lines = asyncio.run(prepare_run(settings))
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception as error:
        line, code = describe_error(error)
        print(f"tether prepare: {line}", file=sys.stderr)
        sys.exit(code)
    for line in filter(None, lines):
        print(line, file=sys.stderr)
    print(
        f"run {settings.run.name} is ready in {settings.run_dir}: "
        f"{settings.run.steps} steps, model {settings.model_dir}"
    )


if __name__ == "__main__":
    main()
