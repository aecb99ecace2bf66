"""Loads models beside the patches for a CPU; a program of its own, as the patches are made once."""

import sys

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trainer.megatron import cpu


def main() -> None:
    cpu.install()
    config = Qwen2Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(sys.argv[1])
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert torch.equal(model.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    with torch.device("meta"):
        made = torch.zeros(1), torch.tensor([1]), torch.empty(1)
    assert all(tensor.is_meta for tensor in made)
    assert torch.zeros(1, device="cuda").device.type == "cpu"


if __name__ == "__main__":
    main()
