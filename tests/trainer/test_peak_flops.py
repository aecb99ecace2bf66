"""Tests the names of devices, and what share of their best is used."""

import pytest

from trainer.peak_flops import model_flops_utilization, peak_flops


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A1000", None),
        ("NVIDIA L40S", 362e12),
        ("", None),
    ],
)
def test_device_is_found_by_whole_words_of_its_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def test_utilization_is_null_where_something_is_not_known() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    assert model_flops_utilization(989e12, 2.0, [h100, h100]) == 0.25
    assert model_flops_utilization(None, 2.0, [h100]) is None
    assert model_flops_utilization(1.0, 2.0, [h100, "GPU"]) is None
    assert model_flops_utilization(1.0, 2.0, []) is None
    assert model_flops_utilization(1.0, 0.0, [h100]) is None
