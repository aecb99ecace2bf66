"""Runs `python -m services.reward`: scores rollouts. A run may have any number of these stateless workers.

Consumes: `Rollout` messages. Produces: `ScoredRollout`, or `ScoreFailure` if no score could be computed or
the scored group is too large for a frame. Waits for: rollouts, and the ingest's acknowledgement. A rollout is
acknowledged once the ingest has acknowledged its score; until then its sender keeps it.
"""

import asyncio
import functools
import logging

from protocol.codec import MAX_FRAME_BYTES
from protocol.errors import FrameTooLarge
from protocol.messages import Rollout, ScoredRollout, ScoreFailure
from protocol.topics import ROLLOUTS, SCORED, Role
from reward.score import score_rollout
from reward.workers.group_scoring import FELL_BACK, TIMED_OUT
from reward.workers.pool import ScorePool
from services.bus.receiver import Delivery, Receiver
from services.bus.sender import Declined, Sender
from services.observability.busy import BusyMeter
from services.run_record.progress import FAILED
from services.runtime.main import service_main
from services.runtime.process import Process
from services.runtime.user_modules import add_user_modules
from trainer.algorithms.registry import check_turn_scores

log = logging.getLogger("tether.reward")


async def serve(process: Process) -> None:
    """Run one reward worker until it is stopped.

    A stopping worker finishes its rollouts within `rollout.drain_s`. Rollout workers send the remaining
    rollouts to another reward worker.
    """
    settings = process.settings
    async with (
        ScorePool(settings.reward, add_user_modules(settings)) as pool,
        process.binding_socket(Receiver, ROLLOUTS) as receiver,
        process.connecting_socket(Sender, SCORED) as sender,
    ):
        if pool.scores_turns:
            check_turn_scores(settings.algorithm, reward_model=settings.reward_model.path)
        process.metrics.watch_labelled(
            "tether_verifier",
            "Calls of verifiers: how many, how long, and what they cost",
            ("verifier", "what"),
            lambda: pool.counts,
        )
        process.info["endpoints"] = {ROLLOUTS.name: receiver.endpoint}
        meter = BusyMeter()
        process.on_heartbeat.append(lambda: process.info.update(meter.reading()))
        await process.register()
        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(
                _accept_loop(process, tasks, pool, receiver, sender, meter), name="reward.accept"
            )
            await process.stop.wait()
            accepting.cancel()
            held = [task for task in asyncio.all_tasks() if task.get_name().startswith("score-")]
            if held:
                await asyncio.wait(held, timeout=settings.rollout.drain_s)
            for task in held:
                task.cancel()


async def _accept_loop(
    process: Process,
    tasks: asyncio.TaskGroup,
    pool: ScorePool,
    receiver: Receiver,
    sender: Sender,
    meter: BusyMeter,
) -> None:
    """Score each rollout in its own task; the receiver's credit bounds the number of tasks."""
    while True:
        delivery = await receiver.receive()
        tasks.create_task(
            _score(process, pool, receiver, sender, meter, delivery), name=f"score-{delivery.envelope.id}"
        )


async def _score(
    process: Process,
    pool: ScorePool,
    receiver: Receiver,
    sender: Sender,
    meter: BusyMeter,
    delivery: Delivery,
) -> None:
    envelope, rollout = delivery.envelope, delivery.message
    assert isinstance(rollout, Rollout)
    with meter.working(), process.working("scores groups"):
        result = await score_rollout(rollout, pool, process.incarnation)
    await _note_outcome(process, result)
    process.metrics.seconds.labels("score").observe(getattr(result, "score_s", 0.0))
    send = functools.partial(
        sender.send, id=envelope.id, epoch=envelope.epoch, group=envelope.group, token=envelope.token
    )
    try:
        with process.waiting(f"ingest for group {rollout.group}"):
            try:
                await send(result)
            except FrameTooLarge as error:
                failure = _too_large(process, rollout, error)
                await _note_outcome(process, failure)
                await send(failure)
    except (Declined, FrameTooLarge) as refusal:
        receiver.refuse(delivery, str(refusal))
    else:
        receiver.ack(delivery)


def _too_large(process: Process, rollout: Rollout, error: FrameTooLarge) -> ScoreFailure:
    """Return the failure of a group that fits a frame only without its scores.

    Without this failure the error would end every reward worker that receives the group.
    """
    log.warning("score.too_large group=%d error=%s", rollout.group, error)
    text = (
        "the group does not fit a frame with its scores and what judges said: raise setting "
        f"bus.max_frame_bytes, {process.settings.bus.max_frame_bytes} (at most {MAX_FRAME_BYTES}), or lower "
        "sampling.max_tokens or sampling.samples_per_prompt"
    )
    return ScoreFailure(
        group=rollout.group, token=rollout.token, verifier="", error=text, scorer=process.incarnation
    )


async def _note_outcome(process: Process, result: ScoredRollout | ScoreFailure) -> None:
    """Count a result and the responses that got `reward.timeout_score`; register a new failure."""
    process.metrics.count(f"reward.{type(result).__name__}")
    if isinstance(result, ScoreFailure):
        text = f"{result.verifier or 'reward'}: {result.error}"
        is_new = process.info.get(FAILED) != text
        process.info[FAILED] = text
        if is_new:
            await process.register()
        return
    if FELL_BACK in result.components:
        process.metrics.count("reward.fell_back", int(result.components[FELL_BACK].numpy().sum()))
    if TIMED_OUT in result.components:
        given_up = result.components[TIMED_OUT].numpy()
        process.metrics.count("reward.timed_out", int(given_up.sum()))
        log.warning(
            "score.timed_out group=%d samples=%s limit_s=%s score=%s",
            result.rollout.group,
            given_up.nonzero()[0].tolist(),
            process.settings.reward.timeout_s,
            process.settings.reward.timeout_score,
        )


if __name__ == "__main__":
    service_main(Role.REWARD, serve)
