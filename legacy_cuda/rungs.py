"""The rungs of the two ladders: what each is called, what it takes, and what others published for it.

A rung is one file under `kernels/` with one kernel template. Its parameters are listed in the order of the template's
arguments after the signature. Adding a rung is a file and an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"

_SIEBOHM = "siboehm/SGEMM_CUDA, RTX A6000"
_4090 = "others' ladder on an RTX 4090"
_H200 = "others' ladder on an H200 at 8192"
_H100 = "others' ladder on an H100 PCIe"


@dataclass(frozen=True)
class Published:
    """A figure that somebody else published, on their GPU: it sets the bar and claims nothing about ours.

    gpu: a name of `cutegemm.hardware.arch`. share: of cuBLAS (of PyTorch for 16-bit), 0..1. tflops: absolute, where it
    was given.
    """

    gpu: str
    source: str
    share: float | None = None
    tflops: float | None = None

    def __str__(self) -> str:
        share = "" if self.share is None else f"{100 * self.share:.3g} %"
        tflops = "" if self.tflops is None else f"{self.tflops:.3g} TF"
        return f"{self.gpu} {' = '.join(part for part in (tflops, share) if part)}"


LADDERS: Mapping[str, tuple[str, ...]] = {"fp32": ("fp32",), "16bit": ("fp16", "bf16")}
"""The dtypes of A and B that the rungs of each ladder take."""


@dataclass(frozen=True)
class Rung:
    """One rung.

    name: what `config=` accepts. ladder: one of `LADDERS`. file: under `kernels/`. kernel: the template's name. kind:
    which validity rule of `legacy_cuda.config` holds. dtypes: of A and B. defaults: parameters by name in template
    order.
    vector: most elements of A and B that are read at once. bar: TFLOP/s to meet on an H200 at 8192^3, or None.
    """

    name: str
    ladder: str
    file: str
    kind: str
    idea: str
    defaults: Mapping[str, int]
    published: tuple[Published, ...] = ()
    vector: int = 1
    bar: float | None = None

    @property
    def kernel(self) -> str:
        return self.name

    @property
    def dtypes(self) -> tuple[str, ...]:
        return LADDERS[self.ladder]

    @property
    def source(self) -> Path:
        return KERNELS / self.file

    @property
    def tensor_cores(self) -> bool:
        return self.kind.startswith("wmma")


def _tile(bm: int, bn: int, bk: int, tm: int, tn: int) -> dict[str, int]:
    return {"bm": bm, "bn": bn, "bk": bk, "tm": tm, "tn": tn}


def _warp(bm: int, bn: int, bk: int, wm: int, wn: int, wniter: int, tm: int, tn: int) -> dict[str, int]:
    return {"bm": bm, "bn": bn, "bk": bk, "wm": wm, "wn": wn, "wniter": wniter, "tm": tm, "tn": tn}


def _wmma(bm: int, bn: int, bk: int, warps_m: int, warps_n: int) -> dict[str, int]:
    return {"bm": bm, "bn": bn, "bk": bk, "warps_m": warps_m, "warps_n": warps_n}


RUNGS: Mapping[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung(
            "naive",
            "fp32",
            "01_naive.cuh",
            "dot",
            "one thread, one output, walking down a column: uncoalesced on purpose",
            {"bm": 32, "bn": 32},
            (
                Published("A6000", _SIEBOHM, 0.013),
                Published("RTX 4090", _4090, 0.008),
                Published("H100 PCIe", _H100, tflops=0.243),
            ),
        ),
        Rung(
            "coalesced",
            "fp32",
            "02_coalesced.cuh",
            "dot",
            "consecutive threads walk along a row",
            {"bm": 32, "bn": 32},
            (
                Published("A6000", _SIEBOHM, 0.085),
                Published("RTX 4090", _4090, 0.06),
                Published("H100 PCIe", _H100, tflops=3.171),
                Published("H200", _H200, 0.08, 4.1),
            ),
            bar=4.1,
        ),
        Rung(
            "block_tile",
            "fp32",
            "03_block_tile.cuh",
            "block",
            "tiles of A and B staged in shared memory",
            {"bm": 32, "bn": 32, "bk": 32},
            (Published("A6000", _SIEBOHM, 0.128), Published("H200", _H200, 0.17, 8.9)),
            bar=8.9,
        ),
        Rung(
            "warp_shuffle",
            "fp32",
            "04_warp_shuffle.cuh",
            "shuffle",
            "values broadcast between the lanes of a warp instead of shared memory",
            {"warps": 4},
        ),
        Rung(
            "register_tile",
            "fp32",
            "05_register_tile.cuh",
            "register",
            "2x2 outputs a thread straight from global memory",
            {"bm": 32, "bn": 32, "tm": 2, "tn": 2},
        ),
        Rung(
            "thread_tile_1d",
            "fp32",
            "06_thread_tile_1d.cuh",
            "tile_1d",
            "TM outputs of one column a thread, B's value in a register",
            {"bm": 64, "bn": 64, "bk": 8, "tm": 8},
            (Published("A6000", _SIEBOHM, 0.365), Published("RTX 4090", _4090, 0.22)),
        ),
        Rung(
            "thread_tile_2d",
            "fp32",
            "07_thread_tile_2d.cuh",
            "tile_2d",
            "TM x TN outer products from register fragments",
            _tile(128, 128, 8, 8, 8),
            (
                Published("A6000", _SIEBOHM, 0.687),
                Published("RTX 4090", _4090, 0.37),
                Published("H200", _H200, 0.36, 18.6),
            ),
            bar=18.6,
        ),
        Rung(
            "vectorized_global",
            "fp32",
            "08_vectorized_global.cuh",
            "plain",
            "16-byte global loads, A transposed into shared memory",
            _tile(128, 128, 8, 8, 8),
            (Published("H200", _H200, 0.63, 32.5),),
            vector=4,
            bar=32.5,
        ),
        Rung(
            "vectorized_both",
            "fp32",
            "09_vectorized_both.cuh",
            "plain",
            "16-byte shared loads of the fragments, too",
            _tile(128, 128, 8, 8, 8),
            (
                Published("A6000", _SIEBOHM, 0.784),
                Published("RTX 4090", _4090, 0.46),
                Published("H200", _H200, 0.66, 33.9),
            ),
            vector=4,
            bar=33.9,
        ),
        Rung(
            "padded",
            "fp32",
            "10_padded.cuh",
            "patch",
            "bank-conflict free by padded lines",
            _tile(128, 128, 8, 8, 8),
            vector=4,
        ),
        Rung(
            "swizzled",
            "fp32",
            "11_swizzled.cuh",
            "swizzled",
            "bank-conflict free by XOR-swizzled addresses",
            _tile(128, 128, 8, 8, 8),
            vector=4,
        ),
        Rung(
            "double_buffer_shared",
            "fp32",
            "12_double_buffer_shared.cuh",
            "double_buffer",
            "two shared stages: the next tile is loaded while this one is multiplied",
            _tile(128, 128, 16, 8, 8),
            (Published("H200", _H200, 0.81, 41.3),),
            vector=4,
            bar=41.3,
        ),
        Rung(
            "double_buffer_registers",
            "fp32",
            "13_double_buffer_registers.cuh",
            "double_buffer",
            "the next fragment is prefetched into a second register set as well",
            _tile(128, 128, 16, 8, 8),
            (Published("H200", _H200, 0.81, 41.5),),
            vector=4,
            bar=41.5,
        ),
        Rung(
            "async_copy",
            "fp32",
            "14_async_copy.cuh",
            "async",
            "cp.async from global to shared memory",
            _tile(128, 128, 16, 8, 8),
            (Published("H200", _H200, 0.83, 42.8),),
            vector=4,
            bar=42.8,
        ),
        Rung(
            "warp_tile",
            "fp32",
            "15_warp_tile.cuh",
            "warp",
            "CTA tile -> warp tile -> warp subtiles -> thread tile",
            _warp(128, 128, 16, 64, 64, 4, 8, 4),
            (Published("A6000", _SIEBOHM, 0.937), Published("RTX 4090", _4090, 0.54)),
            vector=4,
        ),
        Rung(
            "warp_tile_async",
            "fp32",
            "16_warp_tile_async.cuh",
            "warp_async",
            "warp tiles fed by a ring of cp.async stages: what the autotuner searches",
            {**_warp(64, 128, 8, 32, 128, 2, 4, 4), "stages": 3, "group": 8},
            vector=4,
        ),
        Rung(
            "warp_tile_16bit",
            "16bit",
            "17_warp_tile_16bit.cuh",
            "warp",
            "the warp tile with 16-bit operands, no tensor cores",
            _warp(128, 128, 16, 64, 64, 4, 8, 4),
            (Published("RTX 4090", _4090, 0.25),),
            vector=4,
        ),
        Rung(
            "wmma_naive",
            "16bit",
            "18_wmma_naive.cuh",
            "wmma_naive",
            "one warp, one 16x16 output tile, fragments from global memory",
            {"warps": 4},
        ),
        Rung(
            "wmma_warp_tile",
            "16bit",
            "19_wmma_warp_tile.cuh",
            "wmma",
            "shared-memory tiles, 4x4 warps of 4x2 WMMA tiles",
            _wmma(256, 128, 16, 4, 4),
            (Published("RTX 4090", _4090, 0.41),),
            vector=8,
        ),
        Rung(
            "wmma_double_buffer",
            "16bit",
            "20_wmma_double_buffer.cuh",
            "wmma_double_buffer",
            "two shared stages",
            _wmma(256, 128, 16, 4, 4),
            (Published("RTX 4090", f"{_4090}: about 30 % over the single buffer", 0.53),),
            vector=8,
        ),
    )
}


AUTOTUNED: Mapping[str, tuple[Published, ...]] = {
    "thread_tile": (Published("A6000", _SIEBOHM, 0.848), Published("H200", _H200, 0.89, 45.4)),
    "warp_tile": (Published("A6000", _SIEBOHM, 0.937),),
}
"""What others reached by enumerating the parameters of a kernel, by the family of `legacy_cuda.space`."""

AUTOTUNED_BAR = 48.6
"""TFLOP/s that the best autotuned fp32 kernel must reach on an H200 at 8192^3: 0.95 of cuBLAS SGEMM."""


def ladder(name: str) -> tuple[Rung, ...]:
    """The rungs of a ladder of `LADDERS`, in order. Raises ValueError for another name."""
    if name not in LADDERS:
        raise ValueError(f"ladder: got {name!r}, accepted are {' and '.join(map(repr, LADDERS))}")
    return tuple(rung for rung in RUNGS.values() if rung.ladder == name)
