"""Validates models and requests for all engines, and converts token versions into spans."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.choices import did_you_mean
from protocol.errors import EngineSettingsError, InvalidRequest, Unsupported
from protocol.host.json_file import read_object
from protocol.weights.lora import LoraConfig
from rollout.engines.base import EngineConfig, Request

NOT_UPDATED = {
    ("vllm", "phi"): "its loader fills non-parameter tensors, which updates cannot reach",
}
"""(engine, `model_type`) whose weights cannot be updated -> reason."""
NO_WINDOWS = {
    "sglang": (
        "ministral",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "starcoder2",
    ),
}
"""Engine -> `model_type`s for which it ignores the sliding window of config.json."""


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the model's config.json.

    Raises:
        EngineSettingsError: the directory or file is missing, or the file is not JSON.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise EngineSettingsError(f"model directory {model_dir} does not exist{_suggestion(model_dir)}")
    return read_object(path, str(path), kind=EngineSettingsError)


def check_positions(config: EngineConfig, model: Mapping[str, Any], model_dir: Path) -> None:
    """Check that the model has the positions of `max_model_len`. Raises EngineSettingsError."""
    positions = model.get("max_position_embeddings")
    if isinstance(positions, int) and config.max_model_len > positions:
        raise EngineSettingsError(
            f"max_model_len {config.max_model_len} exceeds the {positions} positions of {model_dir}; set "
            f"engine.max_model_len to {positions} or less"
        )


def check_fits(config: EngineConfig, model: dict[str, Any], model_dir: Path) -> None:
    """Check the engine's settings against the model's config.

    Raises:
        EngineSettingsError: a setting does not fit the model; the message names it.
    """
    check_positions(config, model, model_dir)
    heads = int(model.get("num_attention_heads") or 0)
    if heads and heads % config.tensor_parallel_size:
        raise EngineSettingsError(
            f"tensor_parallel_size {config.tensor_parallel_size} does not divide "
            f"the {heads} heads of {model_dir}"
        )
    kind = str(model.get("model_type"))
    if (why := NOT_UPDATED.get((config.name, kind))) is not None:
        raise EngineSettingsError(
            f"engine.name {config.name!r} cannot serve the {kind} in {model_dir} in training: {why}; "
            "use sglang or hf"
        )
    window = _window_of(model)
    if kind in NO_WINDOWS.get(config.name, ()) and 0 < window < config.max_model_len:
        raise EngineSettingsError(
            f"max_model_len {config.max_model_len} exceeds the sliding window of {window} tokens of "
            f"{model_dir}, which {config.name} ignores in {kind}: set it to {window} or less, or use vllm"
        )


def _window_of(model: Mapping[str, Any]) -> int:
    """Return the sliding window of a model's config, even if only some layers use it; 0: none."""
    kinds = model.get("layer_types")
    if kinds is None:
        # Qwen's configs contain a window even if it is disabled
        has_windows = bool(
            model.get("use_sliding_window", not str(model.get("model_type")).startswith("qwen"))
        )
    else:
        has_windows = "sliding_attention" in kinds
    return int(model.get("sliding_window") or 0) if has_windows else 0


def head_dim_of(model: Mapping[str, Any]) -> int:
    """Return the attention head size according to the model's config; 0 if unknown."""
    heads = int(model.get("num_attention_heads") or 0)
    return int(model.get("head_dim") or (int(model.get("hidden_size", 0)) // heads if heads else 0))


def kv_bytes(model: Mapping[str, Any], itemsize: int) -> int:
    """Return the size of one token's keys and values over all layers, bytes; 0 if unknown.

    Args:
        model: config of the model.
        itemsize: bytes per number.
    """
    kv_heads = int(model.get("num_key_value_heads") or model.get("num_attention_heads") or 0)
    return 2 * int(model.get("num_hidden_layers") or 0) * kv_heads * head_dim_of(model) * itemsize


def check_adapters(lora: LoraConfig, model_dir: Path) -> None:
    """Check that the model directory has base weights if an adapter is served.

    Raises:
        EngineSettingsError: the model directory has no safetensors.
    """
    if lora.rank and not any(model_dir.glob("*.safetensors")):
        raise EngineSettingsError(
            f"setting lora.rank: adapters need the model's own weights, and {model_dir} holds no safetensors"
        )


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_model_len: int,
    running: Iterable[str] = (),
    no_seeds: str = "",
    adapters: Collection[str] = (),
) -> None:
    """Raise if the engine cannot run a request.

    Args:
        vocab_size: size of the model's vocabulary.
        max_model_len: maximum length of prompt plus completion, tokens.
        running: ids of running requests.
        no_seeds: why the engine lacks per-request seeds; empty: it supports them.
        adapters: names of the available adapters.

    Raises:
        InvalidRequest: the request is invalid; the message names the request and the fault.
        Unsupported: the request has a seed, and the engine does not support seeds.
    """
    name, prompt, sampling = request.id, request.prompt, request.sampling
    if name in running:
        raise InvalidRequest(f"request {name}: one of that id is running")
    if not prompt:
        raise InvalidRequest(f"request {name}: the prompt is empty")
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"request {name}: max_tokens is {sampling.max_tokens}, must be at least 1")
    if len(prompt) + sampling.max_tokens > max_model_len:
        raise InvalidRequest(
            f"request {name}: prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} "
            f"exceed max_model_len {max_model_len}"
        )
    for kind, ids in (("token", prompt), ("stop token", sampling.stop_token_ids)):
        if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise InvalidRequest(
                f"request {name}: {kind} id {wrong} is out of range, the vocabulary has {vocab_size}"
            )
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise InvalidRequest(
            f"request {name}: temperature {sampling.temperature}, top_p {sampling.top_p}, "
            f"top_k {sampling.top_k} are not all in range"
        )
    if request.adapter and request.adapter not in adapters:
        raise InvalidRequest(f"request {name}: no adapter {request.adapter!r}, only {list(adapters)}")
    if no_seeds and sampling.seed is not None:
        raise Unsupported(f"request {name}: {no_seeds}")


def spans_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return rows (end, version) from the version of each token, [T]."""
    return spans_from_marks(
        [(0, versions[0])] + [(i, v) for i, v in enumerate(versions) if v != versions[i - 1]]
        if versions
        else [],
        len(versions),
    )


def spans_from_marks(marks: Sequence[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """Return rows (end, version) for `count` tokens.

    Args:
        marks: (first token, version), ascending from token 0.
        count: number of tokens; later marks are ignored.
    """
    rows: list[tuple[int, int]] = []
    for i, (start, version) in enumerate(marks):
        end = min(marks[i + 1][0] if i + 1 < len(marks) else count, count)
        if end <= start:
            continue
        if rows and rows[-1][1] == version:
            rows.pop()
        rows.append((end, version))
    return tuple(rows)


def _suggestion(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    return f"; {did_you_mean(path.name, siblings)}" if siblings else ""
