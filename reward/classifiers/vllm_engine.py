"""Computes the logits of a sequence classifier with vLLM; with several devices, in child processes.

The engine packs texts of different lengths into one pass, caches the prompt shared by the responses of a
group, and has kernels that transformers lacks. Its logits equal `hf.py`'s up to rounding.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from protocol.errors import SettingsError
from reward.classifiers.base import VISIBLE, Options, visible_gpu, without_padding


class VllmClassifier:
    """Classifier in vLLM's pooling runner; at most one per process."""

    _is_taken = False

    def __init__(self, options: Options) -> None:
        """Start the engine.

        Raises:
            SettingsError: this process already has a vLLM classifier, or this vLLM is built for another kind
                of device than the option `device`.
            Exception: any error of vLLM.
        """
        if VllmClassifier._is_taken:
            raise SettingsError("a reward worker can have one reward model with engine = 'vllm'")
        VllmClassifier._is_taken = True
        on_gpu = options.device != "cpu"
        _set_environment(options)
        torch.set_num_threads(options.threads)
        from vllm import LLM, PoolingParams
        from vllm.platforms import current_platform

        if current_platform.is_cpu() == on_gpu:
            raise SettingsError(
                f"option device: {options.device!r}, but the vLLM of this Python computes on "
                f"{'the CPU' if on_gpu else 'a GPU'}: name that, or use engine = 'transformers'"
            )
        sizes: dict[str, Any] = (
            {"gpu_memory_utilization": options.memory_fraction}
            if on_gpu
            else {"kv_cache_memory_bytes": options.kv_cache_mb << 20}
        )
        self._pad = json.loads((Path(options.path) / "config.json").read_bytes()).get("pad_token_id")
        self._parameters = PoolingParams(use_activation=False)
        self._llm = LLM(
            model=options.path,
            runner="pooling",
            dtype=options.dtype,  # type: ignore[arg-type]
            max_model_len=options.max_length or None,
            max_num_seqs=options.batch_size,
            enforce_eager=True,
            tensor_parallel_size=options.tensor_parallel_size,
            distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
            **sizes,
        )

    def logits(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each text."""
        prompts: Any = [{"prompt_token_ids": without_padding(tokens, self._pad)} for tokens in texts]
        outputs = self._llm.classify(prompts, pooling_params=self._parameters, use_tqdm=False)
        return [float(item.outputs.probs[0]) for item in outputs]


def _set_environment(options: Options) -> None:
    """Set the environment variables that vLLM reads at import.

    Raises:
        SettingsError: the process already uses another GPU.
    """
    kind, _, number = options.device.partition(":")
    if kind == "cuda" and number:
        if torch.cuda.is_initialized():
            raise SettingsError(
                f"option device: {options.device!r}: another verifier of the worker uses a GPU already; use "
                "cuda"
            )
        os.environ[VISIBLE] = visible_gpu(options.device, number)
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    ):
        os.environ.setdefault(name, value)
    if kind == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compilation takes longer than a small model's whole run
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
