"""Checks that the trainer can train the engines' draft head."""

from protocol.device.shared_layout import TRANSPORT
from protocol.errors import SettingsError
from services.settings.engine_pool import engine_with
from services.settings.sections import Settings
from trainer.registry import BACKENDS


def check_draft_training(settings: Settings) -> None:
    """Check the settings that `engine.draft_lr` requires; without it all pass.

    Raises:
        SettingsError: names the first setting that does not fit, and what it has to be.
    """
    for is_wrong, problem in _problems(settings) if settings.engine.draft_lr else ():
        if is_wrong:
            raise SettingsError(f"setting engine.draft_lr: {problem}, or set it to 0")


def _problems(settings: Settings) -> tuple[tuple[bool, str], ...]:
    engine, trainer, able = settings.engine, settings.trainer, BACKENDS.having("drafts")
    others = [*(entry.engine for entry in settings.services.pool), settings.eval.engine]
    heads = {engine_with(engine, changes, "engine").trained_head for changes in others}
    return (
        (not engine.draft_model, "there is no head to train; name one in engine.draft_model"),
        (
            not heads <= {"", engine.draft_model},
            "one head is trained; let services.pool and eval.engine name no other draft_model",
        ),
        (
            trainer.backend not in able,
            f"trainer.backend {trainer.backend!r} gives no hidden states; use {' or '.join(able)}",
        ),
        (
            settings.parallel.world_size != 1,
            f"a head is trained on one rank, and [parallel] has {settings.parallel.world_size}; use one",
        ),
        (
            settings.weights.transport == TRANSPORT,
            f"with weights.transport {TRANSPORT!r} the engine has the only copy of what is trained; use shm",
        ),
        (
            settings.colocated.enabled,
            "a trainer that gives its GPU to the engines (colocated.enabled) has no idle time; use two GPUs",
        ),
        (
            settings.run.deterministic,
            "how much of it an idle trainer learns cannot be repeated; leave run.deterministic out",
        ),
    )
