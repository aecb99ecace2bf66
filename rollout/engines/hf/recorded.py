"""Regenerates a recorded request of the engine `hf`: each token under the version that sampled it.

A commit drops the KV cache of running requests, so the next token is computed from all previous tokens under
the new weights. The same happens here between the same two tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from rollout.engines.base import EngineConfig, Request
from rollout.engines.hf.decoder import decoder_of
from rollout.engines.hf.engine import load_model
from rollout.engines.in_process.running_request import RunningRequest

Tensors = Mapping[str, torch.Tensor]


class RecordedEngine:
    """Model and decoder equivalent to an engine with `batch_invariant`, for one request at a time."""

    def __init__(self, config: EngineConfig, model_dir: Path, tensors: Callable[[int], Tensors]) -> None:
        """Load the model.

        Args:
            config: settings of the engine that generated the request.
            model_dir: directory of the initial model.
            tensors: version -> its published tensors, by Hugging Face name.

        Raises:
            EngineError: the model cannot be loaded.
        """
        model = load_model(model_dir, config)
        self._views = checkpoint_views(model, model_tensors(model))
        self._decoder = decoder_of(model, row_by_row=True)(model)
        self._device = next(model.parameters()).device
        self._tensors, self._version, self._threads = tensors, -1, config.threads

    def generate(self, request: Request, versions: Iterable[int]) -> RunningRequest:
        """Generate a request, one token under each of `versions`, until its end."""
        torch.set_num_threads(self._threads)
        seed = request.sampling.seed
        assert seed is not None
        row = RunningRequest(request, torch.Generator(self._device).manual_seed(seed))
        for version in versions:
            if version != self._version:
                self._serve(version)
                self._decoder.forget([row])
            self._decoder.step([row], version)
            if row.finish_reason:
                break
        return row

    @torch.no_grad()
    def _serve(self, version: int) -> None:
        tensors = self._tensors(version)
        for name, view in self._views.items():
            view.copy_(tensors[name])
        self._version = version
