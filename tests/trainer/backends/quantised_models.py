"""Saves tiny quantised checkpoints, as published ones are."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rollout.engines.contract.models import tiny_model
from tests.contracts.engine_models import tiny_gpt_oss

BLOCK = 64
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
PROJECTION = "model.layers.0.self_attn.q_proj.weight"


def describe(model_dir: Path, **quantization: object) -> None:
    path = model_dir / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": quantization, "dtype": "bfloat16"}
    path.write_text(json.dumps(config))


def change(model_dir: Path, **tensors: torch.Tensor | None) -> None:
    path = model_dir / "model.safetensors"
    files = {**load_file(path), **tensors}
    save_file({name: t for name, t in files.items() if t is not None}, path, metadata={"format": "pt"})


def save_fp8(directory: Path) -> Path:
    """Save a model whose projections are 8 bits in blocks."""
    tiny_model(1, dtype=torch.bfloat16).to(torch.bfloat16).save_pretrained(directory)
    describe(directory, **FP8)
    files: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        files[name] = tensor
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax((1, 3)) / 448
            files[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
            files[f"{name}_scale_inv"] = scale
    save_file(files, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def save_mxfp4(directory: Path) -> Path:
    """Save a gpt-oss whose experts are random 4 bits with random exponents."""
    tiny_gpt_oss(1, dtype=torch.bfloat16).to(torch.bfloat16).save_pretrained(directory)
    describe(directory, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    generator = torch.Generator().manual_seed(1)
    files = load_file(directory / "model.safetensors")
    for name in [name for name in files if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = files.pop(name).shape
        shape = (experts, outer, inner // 32, 16)
        files[f"{name}_blocks"] = torch.randint(256, shape, generator=generator).to(torch.uint8)
        files[f"{name}_scales"] = torch.randint(110, 135, shape[:-1], generator=generator).to(torch.uint8)
    save_file(files, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
