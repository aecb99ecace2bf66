"""Lists peak FLOP/s of devices, and computes the model FLOPs utilization (MFU) of a step."""

from collections.abc import Sequence

PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
}
"""Part of a device's name -> dense bf16 FLOP/s in the data sheet. The first matching entry counts."""


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device; None if its name is not in the table."""
    words = device.replace("-", " ").split()
    for name, flops in PEAK_BF16.items():
        parts = name.split()
        if any(words[i : i + len(parts)] == parts for i in range(len(words))):
            return flops
    return None


def model_flops_utilization(flops: float | None, seconds: float, devices: Sequence[str]) -> float | None:
    """Return the share of the devices' peak that a step used, 0 to 1; None if a number is unknown."""
    peaks = [peak_flops(device) for device in devices]
    if flops is None or seconds <= 0 or not peaks or None in peaks:
        return None
    return flops / (seconds * sum(peak for peak in peaks if peak is not None))
