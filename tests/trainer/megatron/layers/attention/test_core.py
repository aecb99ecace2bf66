"""Tests which kernel computes attention, and that a layer's core takes all it needs from the description."""

import inspect

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.megatron.layers.attention.core import FUSED, OPTIONAL, PackedAttention, by_segments, kernel_for
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.megatron.layers.attention.sequences import packed_sequences
from trainer.megatron.layers.attention.terms import AttentionTerms

FREQUENCIES = 1.0 / 100.0 ** (torch.arange(4) / 4)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)]
)
def test_without_16_bits_on_cuda_attention_goes_by_segments(device: str, dtype: torch.dtype) -> None:
    assert kernel_for(device, dtype) is by_segments


def test_16_bits_on_cuda_use_a_fused_kernel() -> None:
    assert kernel_for("cuda", torch.bfloat16) in FUSED.values()


def test_bounded_scores_are_left_to_kernels_that_know_them() -> None:
    bounded = AttentionTerms(softcap=50.0)
    kernel = kernel_for("cuda", torch.bfloat16, bounded)
    assert kernel in (by_segments, *(FUSED[module] for module in OPTIONAL))
    assert kernel_for("cpu", torch.float32, bounded) is by_segments


def test_kernels_that_know_sinks_take_them() -> None:
    knowing = [kernel for module, kernel in FUSED.items() if "sinks" in OPTIONAL.get(module, ())]
    assert knowing
    assert all("sinks" in inspect.signature(kernel).parameters for kernel in [*knowing, by_segments])


def test_a_sequence_is_computed_as_if_it_were_alone() -> None:
    core = PackedAttention(
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4), AttentionTerms()
    )
    lengths = [9, 3, 20, 1]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), heads, 8, generator=generator) for heads in (4, 2, 2))
    together = core(query, key, value, None, packed_seq_params=describe(lengths))
    alone = [
        core(*tensors, None, packed_seq_params=describe([len(tensors[0])]))
        for tensors in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=0)


def describe(lengths: list[int]) -> object:
    return packed_sequences(lengths, [Rotary(FREQUENCIES)], torch.float32, segmented=True)
