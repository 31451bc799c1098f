"""The architecture table: what a GPU has per SM and in whole, as plain numbers and without a driver.

Heuristics, the occupancy calculator, the roofline bound and every backend's validity rule read this table,
so that a machine without a GPU plans exactly as one with it. `Arch.of_device` describes the GPU at hand.

Sources: NVIDIA CUDA C++ Programming Guide 13.0, table "Technical Specifications per Compute Capability" (limits per SM
and per CTA, allocation units); the vendor's data sheets and architecture white papers of A100, RTX A6000, RTX 4090,
H100 and H200 (SM count, L2, bandwidth, dense peak rates, boost clock). Peak rates are dense, without structured
sparsity, at the boost clock that the vendor quotes; fp16 rates are those with fp32 accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

KIB = 1024
MIB = 1024 * KIB
LINE = 128
"""Bytes of a line of the L2 cache, on every GPU of the table."""
SECTOR = 32
"""Bytes of a sector, the part of a line that memory reads and writes at a time."""

_CTAS_PER_SM = {(8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32, (10, 3): 32, (12, 0): 24}


@dataclass(frozen=True)
class Arch:
    """One GPU model, or a generic member of a compute capability (`generic` is then True).

    Sizes are bytes, bandwidth bytes/s, clock MHz, rates 1e12 operations/s (a multiply-add is two). Hashable and
    tensor-free.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    clock_mhz: int
    l2_bytes: int
    hbm_bytes_per_s: float
    peaks: tuple[tuple[str, float], ...]
    smem_per_sm: int
    smem_per_cta: int
    threads_per_sm: int
    ctas_per_sm: int
    registers_per_sm: int = 64 * KIB
    registers_per_cta: int = 64 * KIB
    registers_per_thread: int = 255
    register_unit: int = 256  # registers are allocated to a warp in units of this many
    smem_unit: int = 128  # shared memory is allocated to a CTA in units of this many bytes
    smem_reserved_per_cta: int = KIB  # the system's own share of shared memory, taken for every resident CTA
    smem_static_limit: int = 48 * KIB  # above this a kernel must opt in to dynamic shared memory
    threads_per_cta: int = 1024
    warp_granularity: int = 4  # warps of a CTA are allocated in multiples of this (one per SM sub-partition)
    warp_size: int = 32
    max_cluster: int = 1  # portable limit of CTAs in a cluster
    clusters: tuple[tuple[int, int], ...] = ()
    """(CTAs of a cluster, clusters that run at a time), as the driver answered on such a GPU with one CTA an SM. Of
    other sizes as many run as the SMs allow; see `residency`."""
    watts_per_sm: float = 4.4  # an SM's share of the power limit above the idle draw, as on an H200 of 700 W
    generic: bool = False
    similar: str = (
        ""  # for a device that the table lacks: the entry whose figures stand in for those it does not report
    )

    @property
    def remark(self) -> str:
        """For a device that is only similar to an entry of the table, what that means; empty for one that is in it."""
        if not self.similar:
            return ""
        return (
            f"{self.name} is not in the table of GPUs: it counts as similar to {self.similar}, with the SMs and sizes "
            f"that the device reports; rates are those of {self.similar} in proportion, and winners measured on "
            f"{self.similar} do not count"
        )

    def __hash__(self) -> int:
        # Every choice looks up what it remembers by the GPU: these fields tell GPUs apart, and all would take 1 us.
        return hash((self.name, self.capability, self.sm_count))

    @property
    def warps_per_sm(self) -> int:
        return self.threads_per_sm // self.warp_size

    @property
    def target(self) -> str:
        """The compiler's name of the architecture: `sm_80`, `sm_90a` (with Hopper's own instructions), ..."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def peak(self, dtype: str) -> float:
        """Dense peak in TFLOP/s of `float32` (CUDA cores), `tfloat32`, `float16`, `bfloat16`, `float8`, ...

        Raises ValueError for a dtype this architecture has no unit for.
        """
        rates = dict(self.peaks)
        rate = rates.get(dtype)
        if rate is None:
            known = ", ".join(rates)
            raise ValueError(f"dtype: {dtype!r} has no peak rate on {self.name}; known here: {known}")
        return rate

    @staticmethod
    def of_device(index: int | None = None) -> Arch:
        """The architecture of CUDA device `index` (the current one when None): the table's entry where the device is
        that very model, else an entry of the device's own name that is `similar` to one; see `from_properties`.

        One of a compute capability below 8.0 is described too, though no kernel of this library runs on it: backends
        refuse it by name. Raises RuntimeError without a CUDA device.
        """
        cached = None if index is None else _OF_DEVICE.get(index)
        if cached is not None:
            return cached
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(
                "Arch.of_device: torch sees no CUDA device; name an architecture instead, e.g. arch.get('H200')"
            )
        device = torch.cuda.current_device() if index is None else index
        cached = _OF_DEVICE.get(device)
        if cached is None:
            cached = _OF_DEVICE[device] = from_properties(torch.cuda.get_device_properties(device))
        return cached


_OF_DEVICE: dict[int, Arch] = {}  # what a device is never changes within a process

_SM80 = {
    "capability": (8, 0),
    "smem_per_sm": 164 * KIB,
    "smem_per_cta": 163 * KIB,
    "threads_per_sm": 2048,
    "ctas_per_sm": 32,
}
_SM86 = {
    "capability": (8, 6),
    "smem_per_sm": 100 * KIB,
    "smem_per_cta": 99 * KIB,
    "threads_per_sm": 1536,
    "ctas_per_sm": 16,
}
_SM89 = {**_SM86, "capability": (8, 9), "ctas_per_sm": 24}
_SM90 = {
    "capability": (9, 0),
    "smem_per_sm": 228 * KIB,
    "smem_per_cta": 227 * KIB,
    "threads_per_sm": 2048,
    "ctas_per_sm": 32,
    "max_cluster": 8,
}
_SXM = {**_SM90, "clusters": ((4, 30), (8, 15))}
"""The chip of an H100 SXM and of an H200."""

_A100 = {"float32": 19.5, "tfloat32": 156.0, "float16": 312.0, "int8": 624.0, "float64": 19.5}
_A6000 = {"float32": 38.7, "tfloat32": 77.4, "float16": 154.8, "int8": 309.7, "float64": 0.605}
_4090 = {"float32": 82.6, "tfloat32": 82.6, "float16": 165.2, "int8": 660.6, "float64": 1.29, "float8": 330.3}
_H100_PCIE = {"float32": 51.2, "tfloat32": 378.0, "float16": 756.0, "int8": 1513.0, "float64": 51.2, "float8": 1513.0}
_H100_SXM = {"float32": 66.9, "tfloat32": 494.7, "float16": 989.4, "int8": 1978.9, "float64": 66.9, "float8": 1978.9}


def _arch(
    name: str, limits: dict[str, Any], sm_count: int, clock_mhz: int, l2_mib: int, hbm: float, rates: dict[str, float]
) -> Arch:
    peaks = {**rates, "bfloat16": rates["float16"]}
    return Arch(
        name=name, sm_count=sm_count, clock_mhz=clock_mhz, l2_bytes=l2_mib * MIB, hbm_bytes_per_s=hbm,
        peaks=tuple((unit, peaks[unit]) for unit in _UNITS if unit in peaks), generic=name.startswith("sm_"), **limits,
    )  # fmt: skip


_UNITS = ("float32", "tfloat32", "float16", "bfloat16", "int8", "float64", "float8")
_TABLE = (
    # name, limits, SMs, MHz, MiB of L2, bytes/s of memory, TFLOP/s
    _arch("A100", _SM80, 108, 1410, 40, 2.039e12, _A100),
    _arch("A6000", _SM86, 84, 1800, 6, 0.768e12, _A6000),
    _arch("RTX 4090", _SM89, 128, 2520, 72, 1.008e12, _4090),
    _arch("H100 PCIe", _SM90, 114, 1755, 50, 2.039e12, _H100_PCIE),
    _arch("H100 SXM", _SXM, 132, 1980, 50, 3.352e12, _H100_SXM),
    _arch("H200", _SXM, 132, 1980, 60, 4.8e12, _H100_SXM),
    # Generic entries: the limits are exact for the compute capability; counts, clock and rates are those of its first
    # model.
    _arch("sm_80", _SM80, 108, 1410, 40, 1.555e12, _A100),
    _arch("sm_86", _SM86, 84, 1800, 6, 0.768e12, _A6000),
    _arch("sm_89", _SM89, 128, 2520, 72, 1.008e12, _4090),
    _arch("sm_90", _SXM, 132, 1980, 50, 3.352e12, _H100_SXM),
)
ARCHS: Mapping[str, Arch] = MappingProxyType({arch.name: arch for arch in _TABLE})

_MODELS = {
    "A100-SXM4-80GB": ("A100", 80),
    "A100-SXM-80GB": ("A100", 80),
    "RTX A6000": ("A6000", 48),
    "GeForce RTX 4090": ("RTX 4090", 24),
    "H100 PCIe": ("H100 PCIe", 80),
    "H100 80GB HBM3": ("H100 SXM", 80),
    "H200": ("H200", 140),
}
"""Name of a device as the driver prints it, without the vendor -> (entry of the table, its memory in GiB)."""
_RELATIVES = (
    (r"A[18]00\b.*\b80GB", "A100"),
    (r"RTX 4090", "RTX 4090"),
    (r"RTX A6000", "A6000"),
    (r"H100 PCIe", "H100 PCIe"),
    (r"H200|GH200 144G", "H200"),
    (r"H[18]00|GH200", "H100 SXM"),
)
"""(pattern of a device's name, the entry that it resembles most), matched in this order. Any other device resembles the
generic entry of its compute capability."""
_ALIKE = 0.1
"""Share by which a model's memory and bandwidth may differ from the table's: error correction takes 1/16 of the memory,
and vendors round."""
_VENDOR = "NVIDIA "


def get(name: str) -> Arch:
    """The table's entry `name` (letter case and spaces do not matter; `sm_90a` and `sm90` mean `sm_90`).

    Raises ValueError naming the known entries.
    """
    if not isinstance(name, str):
        raise TypeError(f"arch: got {type(name).__name__}, expected the name of an entry, one of {', '.join(ARCHS)}")
    wanted = _fold(name)
    for key, arch in ARCHS.items():
        if wanted in (_fold(key), _fold(key) + "a" if arch.generic else _fold(key)):
            return arch
    known = (f"{key} or {arch.target}" if arch.generic and arch.target != key else key for key, arch in ARCHS.items())
    raise ValueError(f"arch: {name!r} is not in the table; known: {', '.join(known)}")


def _fold(name: str) -> str:
    return name.lower().replace(" ", "").replace("_", "").replace("-", "")


def from_properties(properties: Any) -> Arch:
    """The `Arch` of a device with torch's `properties` (or any object with the same attributes).

    The device is a model of the table when its name, compute capability, SM count and, where they are reported, memory
    and bandwidth are those of the model. Any other device (another memory, a laptop's chip, a MIG slice) gets an entry
    with its own name: limits of its compute capability; SMs, sizes, clock and bandwidth as the device reports them; and
    for the rest the figures of the entry `similar`, rates in proportion to SMs and clock.

    A compute capability below 8.0 has no peak rates, and the limits that the device reports.
    """
    printed = str(properties.name).strip()
    capability = (int(properties.major), int(properties.minor))
    sm_count = int(properties.multi_processor_count)
    reported = {
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "smem_per_sm": getattr(properties, "shared_memory_per_multiprocessor", None),
        "smem_per_cta": getattr(properties, "shared_memory_per_block_optin", None),
        "threads_per_sm": getattr(properties, "max_threads_per_multi_processor", None),
        "registers_per_sm": getattr(properties, "regs_per_multiprocessor", None),
        "ctas_per_sm": _CTAS_PER_SM.get(capability),
    }
    known: dict[str, Any] = {key: int(value) for key, value in reported.items() if value}
    memory = (getattr(properties, "total_memory", 0) or 0) / 1024**3
    bandwidth = _bandwidth(properties)
    entry, entry_memory = _model(printed)
    if (
        entry is not None
        and (entry.capability, entry.sm_count) == (capability, sm_count)
        and _is_alike(memory, entry_memory)
        and _is_alike(bandwidth, entry.hbm_bytes_per_s)
    ):
        return replace(entry, **known)
    base = _relative(printed, capability)
    clock = int(getattr(properties, "clock_rate", 0) or 0) // 1000 or base.clock_mhz
    # A device with fewer SMs, or a slice of one, has the same rate per SM and clock.
    share = sm_count / base.sm_count
    if " MIG " in printed:  # a slice has as much of the bandwidth as of the memory; what it reports is the whole GPU's
        _, whole = _model(printed.split(" MIG ")[0])
        bandwidth = base.hbm_bytes_per_s * (memory / whole if memory and whole else share)
    rates = tuple((name, rate * share * (clock / base.clock_mhz)) for name, rate in base.peaks)
    is_whole = (base.capability, base.sm_count) == (capability, sm_count)
    return replace(
        base,
        name=printed,
        capability=capability,
        sm_count=sm_count,
        clock_mhz=clock,
        hbm_bytes_per_s=bandwidth or base.hbm_bytes_per_s,
        peaks=rates,
        clusters=base.clusters if is_whole else (),
        generic=True,
        similar=base.name if base.peaks else "",
        **known,
    )


def _model(printed: str) -> tuple[Arch | None, int]:
    """(the table's entry of the device name that the driver prints, GiB of memory of that model), or (None, 0)."""
    key, memory = _MODELS.get(printed.removeprefix(_VENDOR), ("", 0))
    return ARCHS.get(key), memory


def _relative(printed: str, capability: tuple[int, int]) -> Arch:
    """The entry that a device of that name resembles; without peak rates for one older than every kernel."""
    for pattern, key in _RELATIVES:
        if ARCHS[key].capability == capability and re.match(pattern, re.sub(r"^(NVIDIA )?(GeForce )?", "", printed)):
            return ARCHS[key]
    older = [arch for arch in ARCHS.values() if arch.generic and arch.capability <= capability]
    return max(older, key=lambda arch: arch.capability) if older else replace(ARCHS["sm_80"], peaks=())


def _bandwidth(properties: Any) -> float:
    """Bytes/s that the memory clock (kHz, two transfers a clock) and the bus width (bits) give; 0 if not reported."""
    clock = getattr(properties, "memory_clock_rate", 0) or 0
    return 2e3 * clock * (getattr(properties, "memory_bus_width", 0) or 0) / 8


def _is_alike(reported: float, expected: float) -> bool:
    return not reported or abs(reported / expected - 1) <= _ALIKE
