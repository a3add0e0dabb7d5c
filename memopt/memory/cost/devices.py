"""Figures of devices, for plans made without them.

Peak rates are those of the makers' data sheets, dense (a figure "with sparsity" is halved) and with float32
accumulation; memory is the maker's round figure. Sources, all by NVIDIA: H100 Tensor Core GPU data sheet (SXM5, PCIe),
H200 data sheet, DGX B200 data sheet (one eighth), A100 data sheet (SXM4), A10, L4, L40S and T4 data sheets, Tesla V100
data sheet (SXM2), and the GA102, Ada and RTX Blackwell architecture white papers, appendix A, for the GeForce cards.
"bfloat16" of V100 and T4, which lack it in hardware, is their float32 rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# What a kernel launched from Python costs before it does anything.
_LAUNCH = 5e-6
# What copies of pinned memory reach of PCIe's sixteen lanes, in 10⁹ bytes per second, by its generation: 54 was
# measured on an H100, either way.
_PCIE = {3: 12.0, 4: 24.0, 5: 54.0}
# So that the operators of one step add up to what torch.compile's steps of Llama and of a U-Net take on an H100
# (138 and 29.7 ms), within some 10 %.
_REACHED = (0.7, 0.4, 0.85)


@dataclasses.dataclass(frozen=True)
class Device:
    """What bounds the speed of a device.

    Attributes:
        name: what a user calls it.
        title: its full name.
        type: "cuda" or "cpu".
        flops: peak operations per second by dtype ("float16", …), and by "tf32".
        bytes_per_second: peak traffic to its memory.
        memory_bytes: its memory; 0 where that is not known.
        launch_seconds: the least time of one operator.
        reached: shares of the peaks that large operators really reach: matrix products and attention, convolutions,
            traffic.
        link: bytes per second to the host's pinned memory and from it; 0 where there is nothing to be moved there.
        traffic: measured times of operators that only move bytes, as (bytes, seconds), rising in both; in place of
            `bytes_per_second` and `launch_seconds` where there are any.
    """

    name: str
    title: str
    type: str
    flops: Mapping[str, float]
    bytes_per_second: float
    memory_bytes: int = 0
    launch_seconds: float = _LAUNCH
    reached: tuple[float, float, float] = _REACHED
    link: tuple[float, float] = (0.0, 0.0)
    traffic: tuple[tuple[int, float], ...] = ()


def _cuda(
    name: str,
    title: str,
    gigabytes: int,
    bandwidth: float,
    half: float,
    single: float,
    double: float,
    *,
    pcie: int = 4,
    **rates: float,
) -> Device:
    """An NVIDIA device: bandwidth in 10⁹ bytes per second, rates in 10¹² operations per second, PCIe's generation."""
    found = {
        "float16": half,
        "bfloat16": half,
        "tf32": max(half / 2, single),
        "float32": single,
        "float64": double,
        **rates,
    }
    flops = {dtype: float(round(rate * 1e12)) for dtype, rate in found.items()}
    link = _PCIE[pcie] * 1e9, _PCIE[pcie] * 1e9
    return Device(name, f"NVIDIA {title}", "cuda", flops, bandwidth * 1e9, gigabytes * 10**9, link=link)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _cuda("b200", "B200", 180, 8000, 2250, 75, 37, pcie=5),
        _cuda("h200", "H200", 141, 4800, 989.4, 66.9, 66.9, pcie=5),
        _cuda("h100", "H100 SXM5 80GB", 80, 3350, 989.4, 66.9, 66.9, pcie=5),
        _cuda("h100-pcie", "H100 PCIe 80GB", 80, 2000, 756, 51.2, 51.2, pcie=5),
        _cuda("a100", "A100 SXM4 80GB", 80, 2039, 312, 19.5, 19.5),
        _cuda("a100-40gb", "A100 SXM4 40GB", 40, 1555, 312, 19.5, 19.5),
        _cuda("l40s", "L40S", 48, 864, 362, 91.6, 1.4),
        _cuda("l4", "L4", 24, 300, 121, 30.3, 0.47),
        _cuda("a10", "A10", 24, 600, 125, 31.2, 0.98),
        _cuda("v100", "V100 SXM2 32GB", 32, 900, 125, 15.7, 7.8, pcie=3, bfloat16=15.7, tf32=15.7),
        _cuda("t4", "T4", 16, 320, 65, 8.1, 0.25, pcie=3, bfloat16=8.1, tf32=8.1),
        _cuda("rtx5090", "GeForce RTX 5090", 32, 1792, 209.5, 104.8, 1.64, pcie=5),
        _cuda("rtx4090", "GeForce RTX 4090", 24, 1008, 165.2, 82.6, 1.29),
        _cuda("rtx3090", "GeForce RTX 3090", 24, 936, 71, 35.6, 0.56),
    )
}

# One core of a processor that nothing is known of: orders of magnitude.
CPU = Device(
    "cpu",
    "CPU",
    "cpu",
    {"float16": 2e10, "bfloat16": 2e10, "tf32": 5e10, "float32": 5e10, "float64": 2.5e10},
    1e10,
    launch_seconds=1e-6,
    reached=(1.0, 1.0, 1.0),
)


def find(name: str) -> Device:
    """Return the device of this name; upper and lower case, blanks, "-" and "_" make no difference.

    Raises:
        ValueError: there is none; the message lists those that are known.
    """
    plain = _plain(name)
    for known, device in DEVICES.items():
        if _plain(known) == plain:
            return device
    raise ValueError(f"unknown device {name!r}: known are {', '.join(DEVICES)}")


def _plain(name: str) -> str:
    return "".join(name.lower().replace("-", " ").replace("_", " ").split())


def typical(device_type: str) -> Device:
    """What to assume of a device of this type when nothing else is known."""
    return DEVICES["a100"] if device_type == "cuda" else CPU
