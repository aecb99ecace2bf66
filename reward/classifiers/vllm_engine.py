"""Computes the logits of a sequence classifier by vLLM: in this process or, on several devices, its children.

The engine packs texts of different lengths into one pass, keeps the KV cache of the prompt that the responses
of a group share, and has kernels that transformers lacks. Its logits equal `hf.py`'s up to the rounding of
its data type.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from protocol.errors import SettingsError
from reward.classifiers.base import ClassifierConfig
from reward.classifiers.visible_gpus import VISIBLE, visible_gpu


class VllmClassifier:
    """A classifier in vLLM's pooling runner. A process can have one."""

    _is_taken = False

    def __init__(self, config: ClassifierConfig) -> None:
        """Start the engine.

        Raises:
            SettingsError: another one runs in this process, or this vLLM computes elsewhere than the option
                `device` says.
            Exception: any error of vLLM.
        """
        if VllmClassifier._is_taken:
            raise SettingsError("a reward worker can have one reward model with engine = 'vllm'")
        VllmClassifier._is_taken = True
        on_gpu = config.device != "cpu"
        _set_environment(config)
        torch.set_num_threads(config.threads)
        from vllm import LLM, PoolingParams
        from vllm.platforms import current_platform

        if current_platform.is_cpu() == on_gpu:
            raise SettingsError(
                f"option device: {config.device!r}, but the vLLM of this Python computes on "
                f"{'the CPU' if on_gpu else 'a GPU'}: name that, or use engine = 'transformers'"
            )
        sizes: dict[str, Any] = (
            {"gpu_memory_utilization": config.memory_fraction}
            if on_gpu
            else {"kv_cache_memory_bytes": config.kv_cache_mb << 20}
        )
        self._pad = json.loads((config.directory / "config.json").read_text()).get("pad_token_id")
        self._parameters = PoolingParams(use_activation=False)
        self._llm = LLM(
            model=str(config.directory),
            runner="pooling",
            dtype=config.dtype,  # type: ignore[arg-type]
            max_model_len=config.max_length or None,
            max_num_seqs=config.batch_size,
            enforce_eager=True,
            tensor_parallel_size=config.tensor_parallel_size,
            distributed_executor_backend="uni" if config.tensor_parallel_size == 1 else "mp",
            **sizes,
        )

    def logits(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each text."""
        prompts: Any = [{"prompt_token_ids": self._without_padding(tokens)} for tokens in texts]
        found = self._llm.classify(prompts, pooling_params=self._parameters, use_tqdm=False)
        return [float(item.outputs.probs[0]) for item in found]

    def _without_padding(self, tokens: Sequence[int]) -> list[int]:
        """Return a text up to its last token that is not padding: the engine reads it at its end."""
        end = len(tokens)
        while end > 1 and tokens[end - 1] == self._pad:
            end -= 1
        return list(tokens[:end])


def _set_environment(config: ClassifierConfig) -> None:
    """Set what vLLM reads from the environment, before it is imported.

    Raises:
        SettingsError: another GPU of the process is in use already.
    """
    kind, _, number = config.device.partition(":")
    if kind == "cuda" and number:
        if torch.cuda.is_initialized():
            raise SettingsError(
                f"option device: {config.device!r}: another verifier of the worker uses a GPU already; use "
                "cuda"
            )
        os.environ[VISIBLE] = visible_gpu(config.device, number)
    os.environ |= {
        "OMP_NUM_THREADS": str(config.threads),
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
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than a small model's whole run
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
