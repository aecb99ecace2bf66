"""Replays decode steps as CUDA graphs, one per padded number of sequences and pages.

A graph uses the memory addresses of its capture: inputs, weights (which commits overwrite in place) and
cache. When these are released, for example in sleep, the graphs must be dropped. Without a GPU, the same
padded steps run without capture.

Shapes: B sequences with one new token each, P pages of the longest, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from protocol.errors import EngineError
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.inference.cache import pages_for
from trainer.megatron.layers.experts.layer import counts_stay_on_device

LEAST_PAGES = 8
"""Number of pages of the narrowest graph; each further width doubles."""


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """Decode step with a fixed number of sequences and pages."""

    inputs: torch.Tensor
    """int64 [B, 2 + P], on the device; see `decode_inputs`."""
    run: Callable[[], object]
    """Computes the logits of `inputs`."""


class DecodeGraphs:
    """Padded decode steps of a model, created on first use. Not thread-safe."""

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor], running: int, length: int) -> None:
        """Start without steps.

        Args:
            step: maps inputs [B, 2 + P], on the device, to logits [B, V]; may be called repeatedly.
            running: maximum number of sequences of a step.
            length: tokens of the longest sequence.
        """
        self.on = False
        """Whether decode steps are padded and, on a GPU, captured; requires that `graph_refusal` is empty."""
        self._step, self._running, self._pages = step, running, pages_for(length)
        self.steps: dict[tuple[int, int], PaddedStep] = {}
        """(B, P) -> padded step."""
        self._logits = torch.empty(0)
        """float32 [running, V]: logits of the last step."""

    def logits(self, inputs: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
        """Return logits [B, V], which the next step overwrites.

        Args:
            inputs: result of `decode_inputs`.
            device: device of the model.

        Raises:
            EngineError: a step cannot be captured.
        """
        count = len(inputs)
        size = (
            padded_size(count, self._running),
            padded_size(max(LEAST_PAGES, len(inputs[0]) - 2), self._pages),
        )
        padded = torch.tensor(padded_inputs(inputs, *size))
        if size in self.steps:
            self.steps[size].inputs.copy_(padded)
        else:
            self.steps[size] = self._make(padded.to(device))
        self.steps[size].run()
        return self._logits[:count]

    def drop(self) -> None:
        """Release all steps and their memory. Idempotent."""
        self.steps.clear()
        self._logits = torch.empty(0)

    def _make(self, inputs: torch.Tensor) -> PaddedStep:
        """Return a step for inputs of this shape; `inputs` belong to the current step."""

        def run() -> None:
            found = self._step(inputs)
            if not len(self._logits):
                self._logits = found.new_empty((self._running, found.size(1)), dtype=torch.float32)
            self._logits[: len(inputs)].copy_(found)

        return PaddedStep(inputs, self._captured(run, *inputs.shape) if inputs.is_cuda else run)

    def _captured(self, run: Callable[[], None], count: int, width: int) -> Callable[[], object]:
        """Capture a step after a first run on the same stream, which compiles and loads all kernels.

        All graphs share one memory pool, because they replay one at a time. Other threads, such as one that
        stages a version, may use the device during the capture.
        """
        if not self.steps:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                run()
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            raise EngineError(
                f"engine megatron cannot capture a CUDA graph of {count} requests and {width - 2} pages; "
                f"set enforce_eager to true: {error}"
            ) from error
        return graph.replay


def decode_inputs(
    tokens: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return [B, 2 + P]: the token of each sequence, its number of cached tokens, and its pages.

    Rows are padded with the sequence's own page, so NaNs of other sequences are not read.
    """
    longest = max(map(len, tables))
    return [
        [token, length, *table, *[table[0]] * (longest - len(table))]
        for token, length, table in zip(tokens, lengths, tables, strict=True)
    ]


def padded_inputs(inputs: Sequence[Sequence[int]], count: int, pages: int) -> list[list[int]]:
    """Return inputs padded to `count` sequences and `pages` pages with copies of the first sequence.

    A copy stores the same entries at the same position.
    """
    rows = [[*row, *[row[2]] * (2 + pages - len(row))] for row in inputs]
    return rows + rows[:1] * (count - len(rows))


def padded_size(number: int, most: int) -> int:
    """Return the smallest power of two that is at least `number`, but at most `most`."""
    return min(most, 1 << (number - 1).bit_length())


def graph_refusal(architecture: Architecture, dtype: torch.dtype, records_experts: bool, ranks: int) -> str:
    """Return why no decode step of a model can be a graph; empty if steps without named adapters can."""
    experts = architecture.experts
    if ranks > 1:
        return "there are several tensor ranks"
    if records_experts:
        return "the experts of every pass are recorded"
    if experts.count and not counts_stay_on_device(dtype, architecture.hidden, experts.intermediate):
        return "the host waits for the tokens of each expert, but in bfloat16 with sizes divisible by 8"
    return ""
