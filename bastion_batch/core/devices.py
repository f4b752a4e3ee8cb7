"""What known accelerators can do, from their makers' data sheets.

Figures are dense bfloat16 with float32 accumulation, which is half of what a sheet states "with
sparsity"; each source says what is written there. A device or a dtype that is not listed, a part
of a device (MIG) included, is measured instead. The figures are a prior: calibration fits what the
engine reaches of them. To be checked against the sheets themselves: those of A100, A10, L4, L40S,
RTX A6000, RTX 4090 and RTX 5090 are from memory, the others agree with secondary pages.
"""

from typing import NamedTuple


class DeviceSpeed(NamedTuple):
    """Peak speed of a device."""

    flops: float
    """FLOP/s, in the pass's dtype."""
    bandwidth: float
    """Bytes/s from and to memory."""
    source: str = "given"
    """Where the figures come from: a data sheet and what it states, or a measurement."""


KNOWN_DEVICES = {
    "NVIDIA B200": DeviceSpeed(
        2250e12, 8e12, "NVIDIA Blackwell architecture brief, HGX B200: BF16 2.25 PF dense, 8 TB/s"
    ),
    "NVIDIA H200": DeviceSpeed(
        989.5e12, 4.8e12, "NVIDIA H200 data sheet, SXM: BF16 1,979 TF with sparsity, 4.8 TB/s"
    ),
    "NVIDIA H200 NVL": DeviceSpeed(
        835.5e12, 4.8e12, "NVIDIA H200 data sheet, NVL: BF16 1,671 TF with sparsity, 4.8 TB/s"
    ),
    "NVIDIA H100 80GB HBM3": DeviceSpeed(
        989.5e12, 3.35e12, "NVIDIA H100 data sheet, SXM: BF16 1,979 TF with sparsity, 3.35 TB/s"
    ),
    "NVIDIA H100 NVL": DeviceSpeed(
        835.5e12, 3.9e12, "NVIDIA H100 data sheet, NVL: BF16 1,671 TF with sparsity, 3.9 TB/s"
    ),
    "NVIDIA H100 PCIe": DeviceSpeed(
        756.5e12, 2e12, "NVIDIA H100 data sheet, PCIe: BF16 1,513 TF with sparsity, 2 TB/s"
    ),
    "NVIDIA A100-SXM4-80GB": DeviceSpeed(
        312e12, 2.039e12, "NVIDIA A100 data sheet, 80GB SXM: BF16 312 TF dense, 2,039 GB/s"
    ),
    "NVIDIA A100 80GB PCIe": DeviceSpeed(
        312e12, 1.935e12, "NVIDIA A100 data sheet, 80GB PCIe: BF16 312 TF dense, 1,935 GB/s"
    ),
    "NVIDIA A100-SXM4-40GB": DeviceSpeed(
        312e12, 1.555e12, "NVIDIA A100 data sheet, 40GB SXM: BF16 312 TF dense, 1,555 GB/s"
    ),
    "NVIDIA A100-PCIE-40GB": DeviceSpeed(
        312e12, 1.555e12, "NVIDIA A100 data sheet, 40GB PCIe: BF16 312 TF dense, 1,555 GB/s"
    ),
    "NVIDIA A10": DeviceSpeed(125e12, 600e9, "NVIDIA A10 data sheet: BF16 125 TF dense, 600 GB/s"),
    "NVIDIA L40S": DeviceSpeed(
        362.05e12, 864e9, "NVIDIA L40S data sheet: BF16 362.05 TF dense, 864 GB/s"
    ),
    "NVIDIA L4": DeviceSpeed(
        121e12, 300e9, "NVIDIA L4 data sheet: BF16 242 TF with sparsity, 300 GB/s"
    ),
    "NVIDIA RTX A6000": DeviceSpeed(
        154.8e12, 768e9, "NVIDIA GA102 architecture paper, RTX A6000: BF16 154.8 TF, 768 GB/s"
    ),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": DeviceSpeed(
        503.8e12,
        1.792e12,
        "NVIDIA RTX Blackwell PRO architecture paper: BF16 503.8 TF dense, 1,792 GB/s",
    ),
    "NVIDIA GeForce RTX 5090": DeviceSpeed(
        209.5e12,
        1.792e12,
        "NVIDIA RTX Blackwell architecture paper, RTX 5090: BF16 209.5 TF dense, 1,792 GB/s",
    ),
    "NVIDIA GeForce RTX 4090": DeviceSpeed(
        165.2e12,
        1.008e12,
        "NVIDIA Ada architecture paper, RTX 4090: BF16 165.2 TF dense, 1,008 GB/s",
    ),
}
"""By the whole name that CUDA reports; a variant under another name is another device."""
