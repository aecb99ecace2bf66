"""`python -m services.rollout`: leases prompt groups, generates them on one engine and sends them.

Consumes: leases from the ledger, weight manifests from the trainer. Produces: `Rollout` messages on the edge
`rollouts`. Waits for: the run in the ledger, the trainer's first weights, room under the bound, a reward
worker, the ingest's acknowledgement.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import resource
import time
from collections.abc import Callable
from pathlib import Path

from protocol.device.shared_layout import DESCRIPTION_KEY, TRANSPORT, description_file
from protocol.errors import EngineError, SettingsError
from protocol.host.key_proof import fetch_with_keys
from protocol.topics import CALLS, ROLLOUTS, WEIGHTS, Role
from rollout.engines.base import Engine, EngineConfig, Occupancy
from rollout.engines.multi_process.engine import MultiProcessEngine
from rollout.engines.registry import ENGINES, import_engine, make_engine
from rollout.environments.base import Environment
from rollout.environments.registry import make_environment
from rollout.prompts.registry import make_source
from rollout.render import Renderer
from services.bus.broadcast import Listener
from services.bus.sender import Sender
from services.gpu_sharing.device_lock import DeviceLock
from services.preflight.problem import refuse
from services.preflight.sampling import distribution_problems
from services.preflight.session_endpoint import session_endpoint_problems
from services.rollout.engine_profiles import EngineProfiles
from services.rollout.gpu_turn import EngineGpuTurn
from services.rollout.group_runner import GroupRunner
from services.rollout.weight_updater import WeightUpdater
from services.runtime.event_loop import running_loops
from services.runtime.main import service_main
from services.runtime.process import Process
from services.runtime.prompt_stream import check_stream
from services.runtime.user_modules import add_user_modules
from services.settings.engine_pool import restrict_staging
from services.settings.hub import fetch_model, hub_names
from services.settings.sections import Settings
from services.settings.shared_weights import can_share

RESERVED_FILES = 256
"""File descriptors of a worker apart from sessions: sockets of bus and ledger, weights, logs, the engine."""


async def serve(process: Process) -> None:
    """Run one rollout worker until it is stopped. A stopping worker finishes or releases its groups.

    Raises:
        SettingsError: there is no model, sampling differs from the trainer's, the prompts are not the run's,
            or the settings do not allow one of the worker's parts.
        PoisonedError: the engine may hold mixed weights.
    """
    settings = process.settings
    fetch_with_keys(settings.bus.curve_dir)
    refuse([*distribution_problems(settings.sampling), *session_endpoint_problems(settings)])
    await asyncio.to_thread(fetch_model, settings)
    add_user_modules(settings)
    prompts = await asyncio.to_thread(make_source, settings.prompts)
    if not await check_stream(process, prompts):
        return
    renderer = await asyncio.to_thread(Renderer, settings.model_dir, settings.rendering)
    environment = await _environment(settings)
    shared = _description(process)
    engine = make_engine(
        _engine_config(settings), settings.model_dir, process.incarnation, settings.lora, shared=shared
    )
    process.info["engine"] = settings.engine.name
    device = _device(settings, engine) if settings.colocated.enabled else None
    turn = EngineGpuTurn(process, device) if device else None
    try:
        if turn is not None and not await turn.acquire():
            return
        await _start(process, engine, shared)
        async with (
            process.connecting_socket(Listener, WEIGHTS) as listener,
            process.connecting_socket(Sender, ROLLOUTS) as sender,
            _calls(process, environment) as calls,
        ):
            runner = GroupRunner(process, engine, renderer, environment, prompts, sender, calls)
            profiles = EngineProfiles(process, engine, runner.nudge)
            updater = WeightUpdater(
                process,
                engine,
                listener,
                on_abort=runner.abort,
                on_applied=profiles.notify,
                on_turn=turn.notify if turn else None,
            )
            await _run(process, engine, runner, updater, turn, profiles)
    finally:
        await environment.close()
        await engine.close()
        if device is not None:
            device.close()


async def _environment(settings: Settings) -> Environment:
    """Open the environment and raise the limit of open files to the need of its samples."""
    environment = await asyncio.to_thread(make_environment, settings.environment)
    group_size = settings.sampling.samples_per_prompt
    allow_open_files(settings.rollout.groups_in_flight, group_size, environment.files_per_sample)
    environment.apply_engine_config(settings.engine)
    await environment.open()
    return environment


def _description(process: Process) -> Path | None:
    """Return the file that describes the engine's live weights to the trainer; None if it reads none."""
    settings = process.settings
    described = settings.weights.transport == TRANSPORT and can_share(settings.engine, settings.lora)
    return description_file(settings.run_dir, process.incarnation) if described else None


def allow_open_files(groups: int, samples: int, each: int) -> None:
    """Raise the process's limit of file descriptors to the need of all sessions in flight.

    Args:
        groups: `rollout.groups_in_flight`.
        samples: samples per group.
        each: file descriptors per sample (`Environment.files_per_sample`).

    Raises:
        SettingsError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = RESERVED_FILES + groups * samples * each
    if not each or soft == resource.RLIM_INFINITY or required <= soft:
        return
    if hard != resource.RLIM_INFINITY and required > hard:
        raise SettingsError(
            f"setting rollout.groups_in_flight: {groups} groups of {samples} samples are {groups * samples} "
            f"open sessions, which need {required} open files, and this process may have {hard}: raise that "
            f"limit (`ulimit -n {required}`), or lower groups_in_flight"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))


async def _start(process: Process, engine: Engine, shared: Path | None) -> None:
    """Start the engine; publish the start time, the draft digest and the file that describes its weights."""
    with process.waiting("engine start"):
        began = time.monotonic()
        await engine.start()
        process.info["draft_digest"] = engine.draft_digest or None
        process.info |= {DESCRIPTION_KEY: str(shared)} if shared else {}
        process.metrics.seconds.labels("engine_start").observe(time.monotonic() - began)
    await process.ready("engine")


async def _run(
    process: Process,
    engine: Engine,
    runner: GroupRunner,
    updater: WeightUpdater,
    turn: EngineGpuTurn | None,
    profiles: EngineProfiles,
) -> None:
    """Update the engine's weights while the runner generates groups, until the runner has drained."""
    loops = {
        "engine.occupancy": occupancy_loop(process, engine),
        "weights.listen": updater.listen_loop(),
        "weights.poll": updater.poll_loop(),
        "weights.apply": updater.apply_loop(),
        "engine.profiles": profiles.follow_loop(),
    }
    if turn is not None:
        loops["turns"] = turn.turns_loop(updater, runner.meter)
    async with running_loops(loops):
        await runner.run()
    await profiles.end()


async def occupancy_loop(process: Process, engine: Engine) -> None:
    """Write the engine's occupancy into the registry info once per heartbeat, until cancelled."""
    interval_s = process.settings.ledger.ttl_s / 3
    while True:
        found = await read_occupancy(engine, interval_s)
        shares = (found.kv_use, found.drafts_accepted)
        use, accepted = (None if share is None else round(share, 4) for share in shares)
        process.info.update(running=found.running, kv_use=use, drafts_accepted=accepted)
        await asyncio.sleep(interval_s)


async def read_occupancy(engine: Engine, limit_s: float) -> Occupancy:
    """Return the engine's occupancy; unknown if the engine does not answer within `limit_s` seconds.

    The tasks that generate report a dead engine.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await engine.occupancy()
    except (TimeoutError, EngineError):
        return Occupancy()


def _calls(
    process: Process, environment: Environment
) -> contextlib.AbstractAsyncContextManager[Sender | None]:
    """Return the connection to the ingest that records calls; it yields None if calls are not recorded."""
    # Recorded calls of earlier leases are context only; regenerated calls are trained.
    recorded = environment.has_calls and not process.settings.run.deterministic
    return process.connecting_socket(Sender, CALLS) if recorded else contextlib.nullcontext()


def _device(settings: Settings, engine: Engine) -> DeviceLock:
    """Open the device lock.

    Child processes of the engine also hold the lock, so it outlives a killed worker until they exit.
    """
    device = DeviceLock(settings.run_dir)
    if isinstance(engine, MultiProcessEngine):
        device.allow_children()
    return device


def _engine_config(settings: Settings) -> EngineConfig:
    """Return the engine's section merged with the requirements of other sections.

    On a shared GPU, sleep mode is enabled for engines that need it at start.
    """
    engine = restrict_staging(settings.engine, settings.weights.transport)
    sleeps = settings.colocated.enabled and ENGINES[engine.name].started_to_sleep
    return dataclasses.replace(
        engine,
        enable_sleep_mode=engine.enable_sleep_mode or sleeps,
        batch_invariant=engine.batch_invariant or settings.run.deterministic,
        enable_return_routed_experts=engine.enable_return_routed_experts or settings.trainer.routing_replay,
    )


def preload(settings: Settings) -> Callable[[], None] | None:
    """Import the modules of an engine for a spare; return a function that each fork calls first.

    The hub client is imported before the engine. Engines set HF_HUB_OFFLINE, which the client reads at
    import, and the service may still have to download a model.
    """
    if any(hub_names(settings)):
        importlib.import_module("huggingface_hub.constants")
    add_user_modules(settings)
    return import_engine(_engine_config(settings))


def main() -> None:
    """Run `python -m services.rollout`."""
    service_main(Role.ROLLOUT, serve)
