"""What known accelerators can do, from their makers' data sheets (dense bfloat16, no sparsity).

Names are substrings of what CUDA reports; the first match wins. A device that is not listed is
measured instead. The figures are a prior: calibration fits what the engine reaches of them.
"""

from typing import NamedTuple


class DeviceSpeed(NamedTuple):
    """Peak speed of a device."""

    flops: float
    """FLOP/s."""
    bandwidth: float
    """Bytes/s from and to memory."""


KNOWN_DEVICES = {
    "B200": DeviceSpeed(2250e12, 8.0e12),
    "H200": DeviceSpeed(989e12, 4.8e12),
    "H100 PCIe": DeviceSpeed(756e12, 2.0e12),
    "H100 NVL": DeviceSpeed(835e12, 3.9e12),
    "H100": DeviceSpeed(989e12, 3.35e12),
    "A100-SXM4-40GB": DeviceSpeed(312e12, 1.555e12),
    "A100-PCIE-40GB": DeviceSpeed(312e12, 1.555e12),
    "A100": DeviceSpeed(312e12, 2.0e12),
    "L40S": DeviceSpeed(362e12, 864e9),
    "RTX PRO 6000": DeviceSpeed(504e12, 1.79e12),
    "RTX A6000": DeviceSpeed(155e12, 768e9),
    "RTX 5090": DeviceSpeed(210e12, 1.79e12),
    "RTX 4090": DeviceSpeed(165e12, 1.008e12),
}
