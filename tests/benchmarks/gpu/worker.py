"""The engine's worker with a clock on its steps, and with what the usual ways of loading weights need.
Measured, not shipped."""

import importlib.util
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

# isort: skip - it wants to be the first of ours in vLLM's process
from rollout.engines.vllm.worker import WorkerExtension
from tests.benchmarks.gpu import stand_in
from tests.benchmarks.gpu.flip import WeightSets
from tests.benchmarks.gpu.groups import broadcast, join_pair
from tests.benchmarks.gpu.shapes import device, settle


class MeasuredWorker(WorkerExtension):
    """What `bench_` methods there are is called by `collective_rpc`, as the project's own `tether_` methods
    are."""

    def bench_clock(self) -> None:
        """Write down every step from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model
        self._bench_steps: list[tuple[float, int, bool]] = []

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            requests = len(scheduler_output.scheduled_new_reqs) + len(
                scheduler_output.scheduled_cached_reqs.req_ids
            )
            if requests:
                prefill = scheduler_output.total_num_scheduled_tokens != requests
                self._bench_steps.append((time.monotonic(), requests, prefill))
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def bench_steps(self) -> list[tuple[float, int, bool]]:
        """The steps since the last call: (time, requests, prefill)."""
        found, self._bench_steps = self._bench_steps, []
        return found

    def bench_memory(self) -> dict[str, int]:
        """Bytes of the device and of the host that are free, and the size of the KV cache."""
        free, device = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        cache = self.model_runner.kv_cache_config  # type: ignore[attr-defined]
        tokens = self.vllm_config.cache_config.block_size * cache.num_blocks  # type: ignore[attr-defined]
        return {
            "device_free": free,
            "device": device,
            "host_available": int(psutil.virtual_memory().available),
            "kv_cache": sum(int(tensor.size) for tensor in cache.kv_cache_tensors),
            "kv_cache_tokens": int(tokens),
        }

    def bench_transfer(self, backend: str) -> None:
        """Give the worker vLLM's own weight transfer of that name, as `weight_transfer_config` would at the
        start."""
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        stand_in.install()
        if backend == "ipc" and importlib.util.find_spec("ray") is None:
            sys.modules["ray"] = types.ModuleType("ray")  # imported for callers that use Ray; none here does
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend),
            self.vllm_config,  # type: ignore[attr-defined]
            self.device,  # type: ignore[attr-defined]
            self.model_runner.get_model(),  # type: ignore[attr-defined]
        )

    def bench_two_sets(self) -> list[int]:
        """Make a second set of weights to swap with. Returns how many CUDA graphs there are over each."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():  # type: ignore[attr-defined]
            self._bench_sets = WeightSets(self.model_runner)  # type: ignore[attr-defined]
        return self._bench_sets.graphs

    def bench_flip(self) -> float:
        """Swap the sets. Returns the milliseconds that it took."""
        return self._bench_sets.flip()

    def bench_join(self, port: int) -> None:
        """Join the trainer's group of two."""
        self._bench_group = join_pair(port, rank=1)

    def bench_receive(self, shapes: Sequence[tuple[str, Sequence[int]]], dtype: str) -> float:
        """Receive each tensor by a broadcast of its own and load it. Returns the milliseconds that it
        took."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        began = time.perf_counter()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():  # type: ignore[attr-defined]
            for name, shape in shapes:
                tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device())
                broadcast(self._bench_group, tensor)
                model.load_weights([(name, tensor)])
        settle()
        return (time.perf_counter() - began) * 1e3
