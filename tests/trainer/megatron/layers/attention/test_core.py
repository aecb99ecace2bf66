"""Tests that a layer's core takes all it needs from the description of the sequences."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.attention.terms import AttentionTerms
from trainer.megatron.layers.attention.core import PackedAttention
from trainer.megatron.layers.attention.rotary import Rotary, packed_sequences

FREQUENCIES = 1.0 / 100.0 ** (torch.arange(4) / 4)


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
