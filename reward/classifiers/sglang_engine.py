"""Computes the logits of a sequence classifier with SGLang, in a child process with SGLang's Python.

The engine packs texts of different lengths into one pass, and shards the model over devices. Its logits equal
`hf.py`'s up to rounding.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from protocol.errors import SettingsError
from reward.classifiers import sglang_child
from reward.classifiers.base import VISIBLE, Options, visible_gpu, without_padding

BIAS = "score.bias"
"""Bias of the head in some of SGLang's classifiers. If the checkpoint has no bias, SGLang would keep torch's
random initialization."""
BIAS_FILE = "tether_head_bias.safetensors"
INDEX = "model.safetensors.index.json"
RESERVED = 8
"""Context positions that SGLang reserves."""
ENDED = 70
"""Exit code of a worker process whose SGLang process exited."""


class SglangClassifier:
    """Classifier in an SGLang engine. The engine ends with this process."""

    def __init__(self, options: Options) -> None:
        """Start the engine.

        Raises:
            SettingsError: the engine does not start. The message names the option if an option is the cause.
        """
        on_gpu = options.device != "cpu"
        if on_gpu and options.dtype == "float32":
            raise SettingsError(
                "option dtype: float32: SGLang's kernels on a GPU compute in bfloat16 or float16; use one"
            )
        facts = json.loads((Path(options.path) / "config.json").read_bytes())
        self._pad = facts.get("pad_token_id")
        with tempfile.TemporaryDirectory(prefix="tether-reward-") as directory:
            write_model(Path(options.path), Path(directory))
            self._child = _start_child(options, on_gpu=on_gpu)
            try:
                self._ask({**_arguments(options, facts, on_gpu=on_gpu), "model_path": directory})
            except (EOFError, BrokenPipeError):
                raise SettingsError(
                    f"option engine: sglang: SGLang ended with code {self._end()} at its start; the log of "
                    "the reward worker says why"
                ) from None
            except RuntimeError as error:
                self._end()
                raise SettingsError(f"option engine: sglang: {error}") from None

    def logits(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each text. If SGLang has exited, exit this process; the pool replaces it."""
        try:
            answer = self._ask([without_padding(tokens, self._pad) for tokens in texts])
        except (EOFError, BrokenPipeError):
            print(f"reward.sglang_ended code={self._child.wait()}", file=sys.stderr, flush=True)
            os._exit(ENDED)
        return [float(logit) for logit in answer["logits"]]

    def _ask(self, question: Any) -> dict[str, Any]:
        """Send the child one line, and return its answer.

        Raises:
            EOFError: the child has exited.
            RuntimeError: the child answered with an error.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(" ".join(str(answer["error"]).split())[:300])
        return answer

    def _end(self) -> int:
        """Close the child's pipes, which ends the child; return its exit code."""
        with suppress(BrokenPipeError), self._child:
            pass
        return self._child.wait()


def _start_child(options: Options, *, on_gpu: bool) -> "subprocess.Popen[str]":
    """Start SGLang's Python with `sglang_child.py`, in a new process group.

    Raises:
        SettingsError: the interpreter cannot be started.
    """
    python = options.python or sys.executable
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if not on_gpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    elif number := options.device.partition(":")[2]:
        environment[VISIBLE] = visible_gpu(options.device, number)
    try:
        return subprocess.Popen(
            [python, str(sglang_child.__file__)],
            env={**environment, **options.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise SettingsError(f"option python: {python}: {error.strerror}") from None


def _arguments(options: Options, facts: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of SGLang's engine, except the model path.

    Args:
        options: options of the verifier.
        facts: the model's config.json.
        on_gpu: whether the engine runs on GPUs.
    """
    given: dict[str, Any] = {
        "is_embedding": True,
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "tp_size": options.tensor_parallel_size,
        "max_running_requests": options.batch_size,
        "disable_cuda_graph": True,
        "log_level": "warning",
    }
    if options.max_length:
        given["context_length"] = options.max_length + RESERVED
    if on_gpu:
        return given | {"mem_fraction_static": options.memory_fraction}
    tokens = (options.kv_cache_mb << 20) // token_bytes(facts, options.dtype)
    return given | {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": tokens}


def token_bytes(facts: dict[str, Any], dtype: str) -> int:
    """Return the KV cache bytes per token, at least 1, from a model's config.json."""
    heads = int(facts.get("num_attention_heads") or 1)
    kv_heads = int(facts.get("num_key_value_heads") or heads)
    head_dim = int(facts.get("head_dim") or int(facts.get("hidden_size") or 0) // heads)
    layers = int(facts.get("num_hidden_layers") or 1)
    return max(1, 2 * layers * kv_heads * head_dim * getattr(torch, dtype).itemsize)


def write_model(directory: Path, into: Path) -> None:
    """Write links to a model's files, and a zero bias for a head without bias.

    Raises:
        SettingsError: the weights are not safetensors.
    """
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise SettingsError(f"option engine: sglang: {directory} holds no *.safetensors")
    for path in directory.iterdir():
        (into / path.name).symlink_to(path.resolve())
    for path in weights:
        with safe_open(str(path), framework="pt") as file:
            if BIAS in file.keys():  # noqa: SIM118 (not a mapping)
                return
    save_file({BIAS: torch.zeros(1)}, into / BIAS_FILE, metadata={"format": "pt"})
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_bytes())
        index["weight_map"][BIAS] = BIAS_FILE
        (into / INDEX).unlink()
        (into / INDEX).write_text(json.dumps(index))
