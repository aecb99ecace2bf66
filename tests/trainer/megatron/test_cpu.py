"""Tests what the patches of `cpu.py` do not change, in a separate process, as they are made once."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from trainer.megatron import cpu
cpu.install()
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
config = Qwen2Config(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2
)
model = Qwen2ForCausalLM(config)
model.save_pretrained(sys.argv[1])
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert torch.equal(model.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
with torch.device("meta"):
    made = torch.zeros(1), torch.tensor([1]), torch.empty(1)
assert all(tensor.is_meta for tensor in made)
assert torch.zeros(1, device="cuda").device.type == "cpu"
"""


def test_models_load_as_ever_beside_megatron_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
