"""Stands in for what a CPU lacks in SGLang's processes: two operators of torchvision, and pinned memory.

torchvision looks the operators up when it is imported: its CUDA build cannot define them with a CPU torch.
SGLang's adapter layers pin small tensors on any device, which torch refuses where there is no accelerator:
here they stay where they are.
"""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def plain(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return plain


torch.tensor, torch.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)
torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[assignment]
