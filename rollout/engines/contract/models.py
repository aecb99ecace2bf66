"""Creates tiny models for engine tests, writes versions of their weights, and checks greedy tokens.

The check recomputes the tokens with plain transformers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.device.shared_layout import HELD, MASTERS, VERSION
from protocol.device.shared_tensors import SharedTensors
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import BucketLayout, manifest_digest
from protocol.weights.digests import digest

VOCAB = 512


def tiny_model(seed: int, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """Return a Qwen2 model with 2 layers and weights so large that two models soon generate different tokens.

    It computes in float32; its weights are rounded to `dtype`.
    """
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).eval()
    randomize(model, seed, dtype)
    return model


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int, dtype: torch.dtype) -> None:
    """Draw every weight from a normal distribution, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0, 0.15, generator=generator)
        parameter.copy_(parameter.to(dtype))


def weights(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return checkpoint name -> copy of the tensor; tied tensors occur once."""
    views = checkpoint_views(model, model_tensors(model))
    return {name: view.to(dtype, copy=True) for name, view in views.items()}


def entries_of(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> tuple[list[TensorEntry], list[int]]:
    """Assign tensors to buckets; return their entries and the bucket sizes."""
    layout = BucketLayout(bucket_bytes)
    entries = []
    for name, tensor in tensors.items():
        bucket, offset = layout.place(name, tensor.nbytes)
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        entries.append(TensorEntry(name, dtype, shape, bucket, offset, tensor.nbytes, digest(_raw(tensor))))
    return entries, layout.buckets


def manifest(
    transport: str,
    location: str,
    entries: Sequence[TensorEntry],
    buckets: Sequence[int],
    version: int,
    epoch: str = "e1",
) -> WeightManifest:
    """Return a manifest with the digest of its entries."""
    return WeightManifest(
        epoch=epoch,
        version=version,
        transport=transport,
        location=location,
        buckets=tuple(buckets),
        tensors=tuple(entries),
        digest=manifest_digest(entries),
    )


def write_shm(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    version: int,
    *,
    epoch: str = "e1",
    bucket_bytes: int = 200_000,
) -> WeightManifest:
    """Write a version to one file per bucket; return its manifest."""
    directory.mkdir(parents=True)
    entries, buckets = entries_of(tensors, bucket_bytes)
    memory = [bytearray(n) for n in buckets]
    for entry in entries:
        memory[entry.bucket][entry.offset : entry.offset + entry.nbytes] = _raw(tensors[entry.name])
    for index, data in enumerate(memory):
        (directory / f"bucket_{index:05d}.bin").write_bytes(data)
    return manifest("shm", str(directory), entries, buckets, version, epoch)


def write_shared(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    version: int,
    *,
    epoch: str = "e1",
    dtype: torch.dtype | None = None,
) -> tuple[WeightManifest, dict[str, torch.Tensor], SharedTensors]:
    """Write the file that describes a trainer's masters.

    Args:
        dtype: dtype of the version; None: dtype of the masters.

    Returns:
        The manifest, the masters, and their memory.
    """
    room = SharedTensors([torch.tensor(version), *tensors.values()])
    held, *moved = room.tensors
    masters = dict(zip(tensors, moved, strict=True))
    room.write(path, {MASTERS: masters, HELD: {VERSION: held}})
    entries, buckets = entries_of(
        {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}, 1 << 30
    )
    return manifest("shared", str(path), entries, buckets, version, epoch), masters, room


@torch.no_grad()
def switched_logits(
    rows: Sequence[tuple[int, PreTrainedModel]],
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    recompute: bool,
) -> torch.Tensor:
    """Return the logits [T, V] that each token is sampled from if the model is switched between tokens.

    Each row is computed in one forward pass: its inputs are known, so decoding would give the same logits.

    Args:
        rows: (end, model): tokens up to `end` come from this model; ends increase, and the last is T.
        prompt: [P] token ids.
        tokens: [T] token ids.
        recompute: whether the KV cache is recomputed at a switch, or kept.
    """
    ids = [*prompt, *tokens]
    first = len(prompt) - 1
    cache, start = DynamicCache(), 0
    parts = []
    for end, model in rows:
        fed = 0 if recompute or start == 0 else first + start
        cache = cache if fed else DynamicCache()
        output = model(torch.tensor([ids[fed : first + end]]), past_key_values=cache, use_cache=True)
        parts.append(output.logits[0, start - end :])
        start = end
    return torch.cat(parts)


def follows(
    rows: Sequence[tuple[int, PreTrainedModel]],
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    recompute: bool,
    margin: float = 0.0,
) -> bool:
    """Return whether tokens are greedy under models that are switched between tokens.

    Args:
        rows: see `switched_logits`; the result is False if a row is empty or the last end is not T.
        prompt: [P] token ids.
        tokens: [T] token ids.
        recompute: see `switched_logits`.
        margin: tolerated distance of a token's logit from the largest.
    """
    ends = [end for end, _ in rows]
    if any(end <= start for start, end in zip([0, *ends], ends, strict=False)) or ends[-1] != len(tokens):
        return False
    seen = switched_logits(rows, prompt, tokens, recompute=recompute)
    chosen = seen.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((chosen >= seen.max(-1).values - margin).all())


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, V] that each of `tokens` was sampled from."""
    found: torch.Tensor = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return found


def _raw(tensor: torch.Tensor) -> memoryview:
    return np.from_dlpack(tensor.contiguous().reshape(-1).view(torch.uint8)).data
