"""An experiment: a commit that copies nothing. Two sets of weights lie on the GPU, each with CUDA graphs of
its own; a commit swaps them.

It reaches into vLLM: parameters are pointed at the other set's memory (for what runs without a graph), and
the dictionaries of captured graphs are exchanged. What it costs is the memory of a second set, which staging
takes anyway, and the graphs'. Nothing can follow it on the same engine.
"""

import time
from collections.abc import Iterator
from time import monotonic
from typing import Any

import torch

from rollout.engines.base import Request, Sampling
from tests.benchmarks.gpu.engine import MeasuredEngine
from tests.benchmarks.gpu.gaps import Phase

HEAD = "lm_head.weight"
PROBE = tuple(range(10, 26))


class WeightSets:
    """In the worker: two sets, one of them live. In the second the rows of the output layer are moved by one:
    tokens tell them apart."""

    def __init__(self, runner: Any) -> None:
        """Copy the weights and capture the graphs over the copy; no request may be running."""
        model = runner.get_model()
        named = dict(model.named_parameters())
        self._parameters = list(named.values())
        self._tensors = [
            [parameter.data for parameter in self._parameters],
            [parameter.data.clone() for parameter in self._parameters],
        ]
        self._holders = list(graph_holders(runner))
        self._graphs = [
            [getattr(holder, name) for holder, name in self._holders],
            [{} for _ in self._holders],
        ]
        self._live = 0
        if HEAD in named:
            index = list(named).index(HEAD)
            self._tensors[1][index].copy_(self._tensors[0][index].roll(1, 0))
        self.flip()
        if self._holders:
            runner.capture_model()
        self.flip()

    @property
    def graphs(self) -> list[int]:
        """How many were captured over each set."""
        return [sum(len(found) for found in graphs) for graphs in self._graphs]

    def flip(self) -> float:
        """Make the other set live. Returns the milliseconds that it took."""
        began = time.perf_counter()
        self._live = 1 - self._live
        for parameter, tensor in zip(self._parameters, self._tensors[self._live], strict=True):
            parameter.data = tensor
        for (holder, name), graphs in zip(self._holders, self._graphs[self._live], strict=True):
            setattr(holder, name, graphs)
        return (time.perf_counter() - began) * 1e3


def graph_holders(runner: Any) -> Iterator[tuple[Any, str]]:
    """Where vLLM keeps captured graphs: (object, attribute that is a dictionary of them). None on a CPU or in
    an eager engine."""
    if not torch.cuda.is_available() or runner.vllm_config.model_config.enforce_eager:
        return
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    for wrapper in list(CUDAGraphWrapper._all_instances):
        yield wrapper, "concrete_cudagraph_entries"
    manager = getattr(runner, "cudagraph_manager", None)
    if isinstance(getattr(manager, "graphs", None), dict):
        yield manager, "graphs"


class Flip:
    """The way of updating that is nothing but the swap: there is no transfer in it."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine

    async def prepare(self) -> None:
        self._graphs = await self._engine.worker("two_sets")

    async def update(self, version: int) -> tuple[list[Phase], dict[str, float]]:
        began = monotonic()
        took_ms = await self._engine.worker("flip")
        return [Phase("commit", began, monotonic())], {"pause_ms": took_ms, "graphs": float(self._graphs[1])}

    async def verify(self) -> bool:
        """Whether the first token moves by one with every swap, and both sets have as many graphs."""
        tokens = [await self._token()]
        for _ in range(2):
            await self._engine.worker("flip")
            tokens.append(await self._token())
        size = self._engine.vocabulary
        moved = tokens[2] == tokens[0] and (tokens[1] - tokens[0]) % size in (1, size - 1)
        return moved and self._graphs[0] == self._graphs[1]

    async def _token(self) -> int:
        completion = await self._engine.generate(
            Request(f"probe-{monotonic()}", PROBE, Sampling(max_tokens=2, temperature=0.0))
        )
        return completion.tokens[0]
