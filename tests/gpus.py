"""The GPUs of this machine that tests may use."""

import os

import torch


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
