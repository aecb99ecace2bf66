"""Declares two operators that torchvision looks up when it is imported: its CUDA build cannot define them with a CPU torch."""

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
