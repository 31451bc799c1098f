"""Configurations of the ladder's kernels, their text form, and the one rule that says which are valid.

A text is the rung's name and the parameters that differ from its defaults or all of them, in any order:

    warp_tile        warp_tile/bm128/bn64        async_copy/bm64/bn256/bk16/tm8/tn8

`why_invalid` is the only place that knows what a kernel can be instantiated with: the constructor, the search space,
the backend and the tests call it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Signature
from cutegemm.problem.work import DENSE, why_not_taken
from legacy_cuda.rungs import RUNGS, Rung

WORKS = (DENSE,)
"""Names of `problem.work` that the ladder takes."""
MAX_ACCUMULATORS = 128  # a thread has 255 registers; more accumulators leave no room for fragments and addresses
_WMMA = 16


@dataclass(frozen=True)
class LegacyConfig:
    """A rung and the values of its template parameters, in template order. Raises ValueError for invalid ones."""

    rung: str
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.rung not in RUNGS:
            raise ValueError(f"config: no rung is called {self.rung!r}; accepted are {', '.join(RUNGS)}")
        names = tuple(self.spec.defaults)
        if len(self.values) != len(names):
            raise ValueError(
                f"config: {self.rung} takes {len(names)} parameters ({', '.join(names)}), got {self.values}"
            )
        reason = why_invalid(self)
        if reason is not None:
            raise ValueError(f"config: {self} is not valid: {reason}")

    @classmethod
    def of(cls, rung: str, **changes: int) -> LegacyConfig:
        """The rung's defaults with some parameters changed. Raises ValueError for a rung or parameter it has not."""
        if rung not in RUNGS:
            raise ValueError(f"config: no rung is called {rung!r}; accepted are {', '.join(RUNGS)}")
        parameters = dict(RUNGS[rung].defaults)
        for name, value in changes.items():
            if name not in parameters:
                raise ValueError(f"config: {rung} has no parameter {name!r}; it has {', '.join(parameters)}")
            parameters[name] = value
        return cls(rung, tuple(parameters.values()))

    @property
    def spec(self) -> Rung:
        return RUNGS[self.rung]

    @cached_property
    def parameters(self) -> dict[str, int]:
        return dict(zip(self.spec.defaults, self.values, strict=True))

    def tile(self) -> tuple[int, int, int]:
        """(M, N, K) of the CTA tile, in elements; K is 1 where nothing is staged."""
        p, kind = self.parameters, self.spec.kind
        if kind == "shuffle":
            return 32, 32 * p["warps"], 8
        if kind == "wmma_naive":
            return _WMMA, _WMMA * p["warps"], _WMMA
        return p["bm"], p["bn"], p.get("bk", 1)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        p, kind = self.parameters, self.spec.kind
        if kind in ("shuffle", "wmma_naive"):
            return 32 * p["warps"]
        if kind in ("wmma", "wmma_double_buffer"):
            return 32 * p["warps_m"] * p["warps_n"]
        if kind in ("warp", "warp_async"):
            return 32 * (p["bm"] // p["wm"]) * (p["bn"] // p["wn"])
        return p["bm"] * p["bn"] // (p.get("tm", 1) * p.get("tn", 1))

    @property
    def accumulators(self) -> int:
        """fp32 accumulators of a thread."""
        bm, bn, _ = self.tile()
        return max(bm * bn // self.threads, 1)

    def dynamic_smem(self, signature: Signature) -> int:
        """Bytes of dynamic shared memory of a CTA; the rungs without stages have static arrays (`static_smem`)."""
        kind = self.spec.kind
        bm, bn, bk = self.tile()
        p = self.parameters
        if kind in ("double_buffer", "async", "warp", "warp_async"):
            return p.get("stages", 2) * bk * (bm + 4 + bn + 4) * 4
        if kind in ("wmma", "wmma_double_buffer"):
            a = bm * (bk + 8) if signature.a_major == "k" else bk * (bm + 8)
            b = bn * (bk + 8) if signature.b_major == "k" else bk * (bn + 8)
            stages = 2 if kind == "wmma_double_buffer" else 1
            patches = p["warps_m"] * p["warps_n"] * _WMMA * (_WMMA + 4) * 4
            return max(stages * (a + b) * 2, patches)
        return 0

    def static_smem(self) -> int:
        """Bytes of static shared memory of a CTA."""
        kind = self.spec.kind
        bm, bn, bk = self.tile()
        if kind in ("block", "tile_1d", "tile_2d", "plain", "swizzled"):
            return (bm + bn) * bk * 4
        if kind == "patch":
            return (bm + 4 + bn + 4) * bk * 4
        if kind == "wmma_naive":
            return self.parameters["warps"] * max(2 * _WMMA * (_WMMA + 8) * 2, _WMMA * (_WMMA + 4) * 4)
        return 0

    def vectors(self, signature: Signature) -> tuple[int, int, int, int]:
        """Elements of A, B, C and D that are accessed at once: the rung's widest that the alignment class allows."""
        spec, size = self.spec, ITEMSIZE[signature.dtype]
        a = min(spec.vector, max(signature.align_a // size, 1))
        b = min(spec.vector, max(signature.align_b // size, 1))
        d = 4 if signature.align_d >= 4 * ITEMSIZE[signature.out_dtype] else 1
        c = 1
        if signature.epilogue.c_dtype and signature.align_c >= 4 * ITEMSIZE[signature.epilogue.c_dtype]:
            c = 4
        return a, b, c, d

    def __str__(self) -> str:
        return "/".join((self.rung, *(f"{name}{value}" for name, value in self.parameters.items())))


def parse(text: str) -> LegacyConfig:
    """A configuration from its text form (see the module docstring). Errors name what is accepted."""
    if isinstance(text, LegacyConfig):
        return text
    if not isinstance(text, str):
        raise TypeError(f"config: got {type(text).__name__}, expected a text such as 'warp_tile' or a LegacyConfig")
    rung, *parts = text.split("/")
    changes: dict[str, int] = {}
    for part in parts:
        match = re.fullmatch(r"([a-z_]+?)(\d+)", part)
        if match is None:
            raise ValueError(f"config: {part!r} of {text!r} is no parameter with its value, such as 'bm128'")
        if match[1] in changes:
            raise ValueError(f"config: {match[1]!r} is given twice in {text!r}")
        changes[match[1]] = int(match[2])
    return LegacyConfig.of(rung, **changes)


def why_invalid(config: LegacyConfig, signature: Signature | None = None, arch: Arch | None = None) -> str | None:
    """None when the kernel can be instantiated, else the rule that is broken.

    Without a signature: for contiguous, 16-byte aligned K-major A and N-major B. Without an architecture: on any of
    ours.
    """
    if signature is not None and (refused := why_not_taken("the ladder computes", WORKS, signature.work)):
        return refused
    if any(value < 1 for value in config.values):
        return "every parameter must be at least 1"
    reason = _RULES[config.spec.kind](config.parameters)
    if reason is not None:
        return reason
    if config.threads % 32 or not 32 <= config.threads <= 1024:
        return f"{config.threads} threads; a CTA has 32 to 1024, in whole warps"
    if config.accumulators > MAX_ACCUMULATORS:
        return f"{config.accumulators} accumulators a thread; at most {MAX_ACCUMULATORS} stay in registers"
    if config.static_smem() > 48 * 1024:
        return f"{config.static_smem()} bytes of static shared memory; at most {48 * 1024}"
    if config.accumulators * config.threads > 64 * 1024:
        return "the accumulators of a CTA do not fit the register file"
    vector_a = vector_b = config.spec.vector
    a_k, b_k = True, False
    if signature is not None:
        if signature.dtype not in config.spec.dtypes:
            return f"{config.rung} multiplies {' and '.join(config.spec.dtypes)}, the operands are {signature.dtype}"
        vector_a, vector_b, _, _ = config.vectors(signature)
        a_k, b_k = signature.a_major == "k", signature.b_major == "k"
    if config.spec.kind in _READERS:
        size = ITEMSIZE[config.spec.dtypes[0]]
        if "async" in config.spec.kind:  # cp.async cannot transpose a run
            vector_a, vector_b = 1 if a_k else vector_a, 1 if b_k else vector_b
        bm, bn, bk = config.tile()
        for operand, extent, k_contiguous, vector in (("A", bm, a_k, vector_a), ("B", bn, b_k, vector_b)):
            reason = _reader(extent, bk, config.threads, k_contiguous, vector, size)
            if reason is not None:
                return f"{operand}: {reason}"
    if signature is not None and arch is not None:
        need = config.dynamic_smem(signature)
        if need > arch.smem_per_cta:
            return f"{need} bytes of shared memory; a CTA has at most {arch.smem_per_cta} on {arch.name}"
    return None


_READERS = ("plain", "patch", "swizzled", "double_buffer", "async", "warp", "warp_async", "wmma", "wmma_double_buffer")


def _reader(extent: int, bk: int, threads: int, k_contiguous: bool, vector: int, itemsize: int) -> str | None:
    """Why `threads` threads do not tile an operand of `extent` by `bk`: as `TileReader` in kernels/operand.cuh."""
    sector = min(32 // itemsize, bk)
    runs = sector // vector if k_contiguous else extent // vector
    if vector > sector or sector % vector or extent % vector:
        return f"runs of {vector} elements do not fit"
    lanes = min(runs, threads)
    lines = threads // lanes
    x_lines = min(lines, extent)
    k_per_pass = sector * (lines // x_lines) if k_contiguous else lines
    x_step = x_lines if k_contiguous else lanes * vector
    if threads % lanes or runs % lanes or lines % x_lines or extent % x_step:
        return f"{threads} threads do not tile {extent} elements"
    if k_per_pass <= bk and bk % k_per_pass:
        return f"{threads} threads do not tile K = {bk}"
    return None


def _dot(p: dict[str, int]) -> str | None:
    return None


def _block(p: dict[str, int]) -> str | None:
    return (
        None
        if p["bm"] == p["bn"] == p["bk"]
        else "BM, BN and BK must be equal: one thread loads one element of each tile"
    )


def _register(p: dict[str, int]) -> str | None:
    return None if p["bm"] % p["tm"] == 0 and p["bn"] % p["tn"] == 0 else "TM must divide BM, TN must divide BN"


def _tile_1d(p: dict[str, int]) -> str | None:
    return _scalar_tile(p["bm"], p["bn"], p["bk"], p["tm"], 1)


def _tile_2d(p: dict[str, int]) -> str | None:
    return _scalar_tile(p["bm"], p["bn"], p["bk"], p["tm"], p["tn"])


def _scalar_tile(bm: int, bn: int, bk: int, tm: int, tn: int) -> str | None:
    if bm % tm or bn % tn:
        return "TM must divide BM, TN must divide BN"
    threads = bm * bn // (tm * tn)
    if bm * bk % threads or bn * bk % threads:
        return f"{threads} threads do not tile the operands"
    return None


def _plain(p: dict[str, int]) -> str | None:
    if p["tm"] % 4 or p["tn"] % 4:
        return "TM and TN must be multiples of 4: fragments are read 16 bytes at a time"
    if p["bm"] % p["tm"] or p["bn"] % p["tn"]:
        return "TM must divide BM, TN must divide BN"
    if p["bk"] % 8:
        return "BK must be a multiple of 8, a 32-byte sector"
    return None


def _patch(p: dict[str, int]) -> str | None:
    reason = _plain(p)
    if reason is not None:
        return reason
    if p["bm"] % 32 or p["bn"] % 32:
        return "BM and BN must be multiples of 32, the banks of shared memory"
    rows, cols = p["bm"] // p["tm"], p["bn"] // p["tn"]
    lanes_n = (
        8 if cols % 8 == 0 and rows % 4 == 0 else 4 if cols % 4 == 0 and rows % 8 == 0 else 16 if cols % 16 == 0 else 2
    )
    if cols % lanes_n or rows % (32 // lanes_n):
        return f"no patch of 32 lanes tiles {rows} x {cols} threads"
    return None


def _swizzled(p: dict[str, int]) -> str | None:
    reason = _patch(p)
    if reason is not None:
        return reason
    if (p["tm"] > 4 and p["bm"] // p["tm"] % 8) or (p["tn"] > 4 and p["bn"] // p["tn"] % 8):
        return "a thread's groups must be multiples of 32 words apart: BM / TM and BN / TN must be multiples of 8"
    return None


def _warp(p: dict[str, int]) -> str | None:
    if p["bm"] % p["wm"] or p["bn"] % p["wn"]:
        return "the warp tile must divide the CTA tile"
    if p["wn"] % p["wniter"]:
        return "WNITER must divide WN"
    if p["tm"] % 4 or p["tn"] % 4:
        return "TM and TN must be multiples of 4: fragments are read 16 bytes at a time"
    sub_n = p["wn"] // p["wniter"]
    if sub_n % p["tn"] or 32 % (sub_n // p["tn"]):
        return "the lanes of a warp do not tile the columns of a warp subtile"
    if p["wm"] % (32 // (sub_n // p["tn"]) * p["tm"]):
        return "whole warp subtiles must make up WM"
    if p["bk"] % 8:
        return "BK must be a multiple of 8, a 32-byte sector"
    if p["bm"] % 32 or p["bn"] % 32:
        return "BM and BN must be multiples of 32, the banks of shared memory"
    return None


def _warp_async(p: dict[str, int]) -> str | None:
    if not 2 <= p["stages"] <= 8:
        return "STAGES must be 2 to 8"
    if p["group"] > 16:
        return "GROUP must be 1 to 16"
    return _warp(p)


def _wmma(p: dict[str, int]) -> str | None:
    if p["bk"] % _WMMA or p["bm"] % (_WMMA * p["warps_m"]) or p["bn"] % (_WMMA * p["warps_n"]):
        return "BM, BN and BK must be whole 16x16x16 fragments for every warp"
    return None


_RULES = {
    "dot": _dot,
    "block": _block,
    "shuffle": _dot,
    "register": _register,
    "tile_1d": _tile_1d,
    "tile_2d": _tile_2d,
    "plain": _plain,
    "patch": _patch,
    "swizzled": _swizzled,
    "double_buffer": _patch,
    "async": _patch,
    "warp": _warp,
    "warp_async": _warp_async,
    "wmma_naive": _dot,
    "wmma": _wmma,
    "wmma_double_buffer": _wmma,
}
