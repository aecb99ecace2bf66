"""Plans the tokens per micro-batch for the ranks' devices, and measures the memory of a step."""

import logging

import torch
import torch.distributed as dist

from protocol.errors import SettingsError
from trainer.config import TrainerConfig
from trainer.memory.expected import (
    FIRST_TOKENS,
    GIB,
    TOKENS_STEP,
    USED_SHARE,
    Planned,
    largest_budget,
    refusal,
)

log = logging.getLogger("tether.trainer")


class MemoryPlan:
    """Planned and measured memory of one rank's device; a CPU is not measured."""

    def __init__(self, work: Planned, device: torch.device, served: int = 0) -> None:
        """Plan before any allocation. A collective: the rank with the least memory determines the plan.

        Args:
            work: the run.
            device: device of the rank.
            served: bytes of versions that the rank keeps there for engines, and of a draft head.

        Raises:
            SettingsError: a step does not fit. The message names settings that would fit.
        """
        self._work, self._device, self._served = work, device, served
        self._measured = device.type == "cuda"
        self.tokens = work.trainer.micro_batch_tokens or FIRST_TOKENS[device.type]
        """Tokens per micro-batch, until a step runs out of memory."""
        if self._measured:
            self.tokens = planned_tokens(work, _available_bytes_of_ranks(work.trainer, device, served))
            if dist.get_rank() == 0:
                log.info("memory.expected tokens=%d peak=%s", self.tokens, work.expected(self.tokens))

    def begin_step(self) -> None:
        """Start measuring the peak."""
        if self._measured:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self, tokens: int) -> tuple[float | None, float | None]:
        """Return the highest allocated memory of a rank since `begin_step`, and the expected memory, GiB.

        Both include served versions and a draft head. None on a CPU. A collective.

        Args:
            tokens: token budget of the step.
        """
        peak = peak_gb(self._device)
        expected = self._work.expected(tokens).peak + self._served
        return peak, None if peak is None else expected / GIB


def peak_gb(device: torch.device) -> float | None:
    """Return the highest allocated memory of a rank since its step began, GiB; None on a CPU.

    A collective.
    """
    if device.type != "cuda":
        return None
    peak = torch.tensor(torch.cuda.max_memory_allocated(device) / GIB, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)


def planned_tokens(work: Planned, room: float) -> int:
    """Return the budget of a micro-batch: the setting, or the largest budget that fits.

    Args:
        work: the run.
        room: bytes available on a rank.

    Raises:
        SettingsError: the smallest budget does not fit. The message names settings that would fit.
    """
    tokens = work.trainer.micro_batch_tokens
    if not tokens:
        if most := largest_budget(work, room):
            return most
        raise SettingsError(refusal(work, room))
    whole = room / USED_SHARE
    if work.expected(min(tokens, TOKENS_STEP)).peak > whole:
        raise SettingsError(refusal(work, whole))
    if (expected := work.expected(tokens)).peak > whole:
        log.warning(
            "memory.tight tokens=%d expected=%s free_gb=%.1f: a step may run out of memory: lower "
            "trainer.micro_batch_tokens",
            tokens,
            expected,
            whole / GIB,
        )
    return tokens


def available_bytes(trainer: TrainerConfig, free: int, total: int, served: int) -> float:
    """Return the bytes of a device available for training.

    Args:
        trainer: section `[trainer]`.
        free: free bytes of the device.
        total: total bytes of the device.
        served: bytes of versions, and of a draft head, that the rank keeps there; `trainer.memory_gb`
            excludes them.
    """
    return trainer.memory_gb * GIB or USED_SHARE * (min(free, trainer.memory_fraction * total) - served)


def _available_bytes_of_ranks(trainer: TrainerConfig, device: torch.device, served: int) -> float:
    """Return the bytes available for training on every rank's device. A collective."""
    room = available_bytes(trainer, *torch.cuda.mem_get_info(device), served)
    least = torch.tensor(room, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)
