"""Runs `tether serve`: one engine and its endpoint, until a signal; with `follow` on a run's newest version.

Consumes: a model directory, or the versions of a run as files. Produces: answers. Waits for: requests, and
the first version of a followed run. Needs no ledger, bus or other process.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from protocol.errors import PoisonedError, SettingsError, WeightError, error_text
from protocol.network.addresses import is_loopback
from protocol.validation import validated
from protocol.weights.lora import NO_ADAPTERS
from rollout.engines.base import Engine, Sampling
from rollout.engines.registry import make_engine
from rollout.engines.requests import check_positions, read_config
from rollout.environments.session import SessionOptions
from rollout.render import RenderConfig, Renderer
from rollout.sessions.answers.reader import AnswerReader
from services.preflight.problem import refuse
from services.preflight.session_endpoint import listening_problems
from services.run_record.page_key import read_key
from services.runtime.event_loop import running_loops, stop_at_signals
from services.runtime.user_modules import add_user_modules
from services.serving.endpoint import GenerationEndpoint
from services.serving.source import Serving
from services.serving.versions import PublishedVersions, Versions, versions_of
from services.settings.hub import fetch_model
from services.settings.sections import Settings

log = logging.getLogger("tether.serving")

POLL_S = 0.5
"""Seconds between two searches for a version."""
RETRY_S = 5.0
"""Seconds before a failed staging is retried."""


async def serve(serving: Serving, stop: asyncio.Event, announce: Callable[[str], None]) -> None:
    """Serve until `stop` is set; `announce` gets the base URL when requests are accepted.

    Raises:
        SettingsError: there is no model, or the settings do not allow engine, renderer or address.
        EngineError: the engine does not start, or has ended.
        PoisonedError: the engine may hold mixed weights.
    """
    settings, config = serving.settings, serving.settings.environment
    refuse(listening_problems(config))
    key = _key(serving)
    add_user_modules(settings)
    directory = await asyncio.to_thread(fetch_model, settings)
    settings = _fitted(serving, directory)
    renderer = await asyncio.to_thread(Renderer, directory, _rendering(settings))
    options = _options(settings)
    reader = AnswerReader(
        options.tool_syntax, options.reasoning_syntax, settings.engine.python, settings.engine.environment
    )
    versions = await asyncio.to_thread(versions_of, settings) if serving.follows else None
    published = isinstance(versions, PublishedVersions)  # exports contain merged adapters
    lora = settings.lora if published else NO_ADAPTERS
    # exported versions contain no draft head
    served = settings.engine if published else replace(settings.engine, draft_lr=0.0)
    engine = make_engine(served, directory, "serve", lora, named=serving.adapters)
    endpoint = GenerationEndpoint(
        engine,
        renderer,
        reader,
        config,
        model=serving.name,
        sampling=_sampling(settings, renderer),
        max_model_len=settings.engine.max_model_len,
        key=key,
        follows=serving.follows,
        body_mb=options.body_mb,
        adapters=list(serving.adapters),
    )
    try:
        await engine.start()
        await endpoint.start()
        announce(endpoint.url)
        await _run(engine, versions, stop)
    finally:
        await endpoint.close()
        await reader.close()
        await engine.close()
        if versions is not None:
            versions.close()


async def _run(engine: Engine, versions: Versions | None, stop: asyncio.Event) -> None:
    """Wait for `stop`; meanwhile update the engine to the newest version."""
    loops = {"serving.check": _check_loop(engine)}
    if versions is not None:
        loops["serving.follow"] = follow_loop(engine, versions)
    async with running_loops(loops):
        await stop.wait()


async def _check_loop(engine: Engine) -> None:
    """Raise EngineError once the engine has ended, which ends the server."""
    while True:
        await asyncio.sleep(POLL_S)
        await engine.check()


async def follow_loop(engine: Engine, versions: Versions) -> None:
    """Stage and commit each newest version until cancelled; after a failure the live version stays.

    Raises:
        PoisonedError: the engine must not be used any more.
    """
    log.info("serving.follow from=%s", versions.origin)
    while True:
        try:
            manifest = await asyncio.to_thread(versions.newest)
            live = engine.served
            if manifest is None or (manifest.epoch, manifest.version) == (live.epoch, live.version):
                await asyncio.sleep(POLL_S)
                continue
            await engine.stage(manifest)
            await engine.commit(manifest)
            log.info("serving.version version=%d epoch=%s", manifest.version, manifest.epoch)
        except PoisonedError:
            raise
        except WeightError as error:  # the trainer may have removed the version in favour of a newer one
            log.warning("serving.version_failed error=%s", error)
            await asyncio.sleep(RETRY_S)


def _fitted(serving: Serving, directory: Path) -> Settings:
    """Return the settings with a length within the model's positions.

    Raises:
        SettingsError: a set length is above them, or the model has no weights.
    """
    if not serving.follows and not any(directory.glob("*.safetensors")):
        raise SettingsError(f"no safetensors in {directory}: an engine would serve random weights")
    config, model = serving.settings.engine, read_config(directory)
    positions = model.get("max_position_embeddings")
    if not serving.length_is_given and isinstance(positions, int):
        config = replace(config, max_model_len=min(config.max_model_len, positions))
    check_positions(config, model, directory)
    return replace(serving.settings, engine=config)


def _rendering(settings: Settings) -> RenderConfig:
    """Return section `[render]` with a prompt limit that leaves room for at least one token."""
    prompt_limit = settings.render.max_prompt_tokens or max(1, settings.engine.max_model_len - 1)
    return replace(settings.render, max_prompt_tokens=prompt_limit)


def _sampling(settings: Settings, renderer: Renderer) -> Sampling:
    """Return the sampling parameters of requests without their own."""
    config = settings.sampling
    return Sampling(
        max_tokens=settings.engine.max_model_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=renderer.stop_token_ids,
    )


def _options(settings: Settings) -> SessionOptions:
    """Return the session options in the environment's settings."""
    names = SessionOptions.__dataclass_fields__
    given = {name: value for name, value in settings.environment.options.items() if name in names}
    return validated(SessionOptions, given, "setting environment.options.")


def _key(serving: Serving) -> str:
    """Return the API key. Raises SettingsError if a server off loopback has none."""
    config = serving.settings.environment
    if not serving.key_file:
        if config.advertise or not is_loopback(config.host):
            raise SettingsError(f"others can reach {config.advertise or config.host}: give --key-file")
        return ""
    try:
        return read_key(Path(serving.key_file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error_text(error)
        raise SettingsError(f"--key-file {serving.key_file}: {reason}") from None


async def serve_until_signal(serving: Serving, announce: Callable[[str], None]) -> None:
    """Serve as `serve`, until SIGINT or SIGTERM; a second signal cancels, also during the engine's start."""
    stop = asyncio.Event()
    stop_at_signals(stop)
    await serve(serving, stop, announce)
