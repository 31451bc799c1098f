"""Draws random problems for one compiled kernel: sizes, strides, offsets and numbers vary, its signature does not.

A compile takes seconds, so ten thousand problems share some hundred kernels. A `Template` says what a kernel was
compiled for; `draw` gives a problem that it serves, of any sizes that its alignment classes allow.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from cutegemm.choice import prepared
from cutegemm.errors import UnsupportedError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Signature, alignment, request
from tests.fuzz_spec import EXACT, VALUES, Layout, Spec

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 61, 67, 97, 101, 127, 131, 191, 251, 257, 383, 509, 521)


@dataclass(frozen=True)
class Template:
    """What of a call decides its kernel, as the caller sees it.

    Attributes:
        backend, config, precision, activation: as passed to `gemm`.
        dtype: of a and b. out_dtype: of D.
        majors: BLAS letters as in `Problem.of`. order: "row" or "col", of D.
        aligns: alignment classes of a, b and D in bytes.
        c: "no", "aligned" (in D's order) or "any" (arbitrary strides, another order, broadcast). c_dtype, align_c: its.
        bias: its dtype, or None.
    """

    backend: str
    config: str | None
    dtype: str
    precision: str | None
    out_dtype: str
    majors: str = "tn"
    order: str = "row"
    aligns: tuple[int, int, int] = (16, 16, 16)
    c: str = "no"
    c_dtype: str = "fp32"
    align_c: int = 16
    bias: str | None = None
    activation: str | None = None


@dataclass(frozen=True)
class Pair:
    """A kernel: what is compiled. backend "torch" compiles nothing."""

    backend: str
    signature: Signature
    config: str

    def __str__(self) -> str:
        return f"{self.backend} {self.config} {self.signature}"


@dataclass(frozen=True)
class Limits:
    """device, and the largest M N K and M N + M K + K N of one problem (all matrices of its batch together)."""

    device: str
    products: int
    elements: int


CUDA = Limits("cuda", 2**28, 2**22)
CPU = Limits("cpu", 2**17, 2**14)


def resolve(spec: Spec, arch: Arch) -> Pair:
    """The kernel that `gemm` takes for this problem on `arch`. Raises UnsupportedError when there is none."""
    tensors = spec.unfilled()
    asked = request.describe(tensors["a"], tensors["b"], tensors.get("c"), **spec.arguments(tensors))
    on_cpu_alone = spec.device == "cpu" and spec.backend in ("auto", "torch")
    problem, choice, _ = prepared.choose(asked.problem, None if on_cpu_alone else arch, spec.backend, spec.config)
    return Pair(choice.backend, problem.signature, str(choice.config))


def draw(
    template: Template, rng: random.Random, limits: Limits, arch: Arch, accepted: frozenset[Pair] | None = None
) -> tuple[Spec, Pair] | None:
    """A problem of the template that one of the `accepted` kernels (any, when None) serves; None when 60 tries gave
    none: sizes of 1, say, change what a stride means."""
    for _ in range(60):
        spec = _attempt(template, rng, limits)
        if spec is None:
            continue
        try:
            pair = resolve(spec, arch)
        except UnsupportedError:
            continue
        if accepted is None or pair in accepted:
            return spec, pair
    return None


def _attempt(t: Template, rng: random.Random, limits: Limits) -> Spec | None:
    item, out_item = ITEMSIZE[t.dtype], ITEMSIZE[t.out_dtype]
    grains = {"m": 1, "n": 1, "k": 1}
    a_inner, b_inner = "k" if t.majors[0] == "t" else "m", "n" if t.majors[1] == "t" else "k"
    d_inner = "n" if t.order == "row" else "m"
    wanted = [(a_inner, t.aligns[0] // item), (b_inner, t.aligns[1] // item), (d_inner, t.aligns[2] // out_item)]
    if t.c == "aligned":
        wanted.append((d_inner, t.align_c // ITEMSIZE[t.c_dtype]))
    for axis, grain in wanted:
        grains[axis] = max(grains[axis], grain)
    batch = rng.choice((None, None, None, 1, 2, 3, 5))
    if rng.random() < 0.01:
        batch = 0
    m, n, k = _sizes(t, rng, grains, limits, batch or 1)
    kinds = ["each", "each", "expanded", "one", "flat"] if batch is not None else ["flat"]
    kind_a, kind_b = rng.choice(kinds), rng.choice(kinds)
    if batch not in (None, 1) and {kind_a, kind_b} <= {"one", "flat"}:
        kind_a = "each"
    if {kind_a, kind_b} == {"flat"}:
        batch = None
    a = _operand(t.dtype, m, k, a_inner == "k", t.aligns[0], batch, kind_a, rng)
    b = _operand(t.dtype, k, n, b_inner == "n", t.aligns[1], batch, kind_b, rng)
    shape = (m, n) if batch is None else (batch, m, n)
    out = _result(t, shape, rng)
    if out is None and not (t.order == "row" and alignment(0, out_item, n) == t.aligns[2]):
        return None
    c, c_is_out = _c(t, shape, out, rng)
    # cutlass2x refuses a bias that its vector loads cannot take.
    bias = _vector(t.bias, n, rng, step=8 if t.backend == "cutlass2x" else 1) if t.bias else None
    alpha, beta = _number(rng, zero=True), _number(rng, zero=False) if t.c != "no" else 0.0
    values = rng.choice(VALUES) if rng.random() < 0.3 else "normal"
    if t.out_dtype == "fp32" and t.activation in (None, "relu") and rng.random() < 0.5:
        values, alpha = EXACT, rng.choice((1.0, -1.0))
        beta = rng.choice((1.0, -1.0)) if t.c != "no" else 0.0
    layouts = {"a": a, "b": b, "c": c if beta != 0 else None, "bias": bias}
    backend = "torch" if t.backend == "auto" and limits.device == "cpu" and rng.random() < 0.5 else t.backend
    return Spec(
        seed=rng.getrandbits(31),
        device=limits.device,
        a=a,
        b=b,
        c=c,
        bias=bias,
        out=out,
        c_is_out=c_is_out,
        alpha=alpha,
        beta=beta,
        activation=t.activation,
        out_dtype=t.out_dtype if out is None or rng.random() < 0.3 else None,
        precision=t.precision,
        backend=backend,
        config=t.config,
        values=values,
        specials=_specials(layouts, rng)
        if rng.random() < 0.1 and t.precision not in ("tf32x3", "bf16x9") and values != EXACT
        else (),
        poison=rng.choice((0xFF, 0x5A)),
    )


def _sizes(t: Template, rng: random.Random, grains: dict[str, int], limits: Limits, batch: int) -> tuple[int, int, int]:
    tile = _tile(t)
    sizes = {}
    for axis, extent in zip("mnk", tile, strict=True):
        sizes[axis] = _round(_size(extent, rng, limits), grains[axis])
    if rng.random() < 0.08:  # one long extent beside two short ones
        axis = rng.choice("mnk")
        others = [a for a in "mnk" if a != axis]
        for other in others:
            sizes[other] = _round(min(sizes[other], rng.choice((1, 5, 16, 33))), grains[other])
        sizes[axis] = _round(rng.randint(1, min(limits.elements // 64, 40000)), grains[axis])
    while True:
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        large = m * n + m * k + k * n > limits.elements // batch or m * n * k > limits.products // batch
        axis = max("mnk", key=sizes.__getitem__)
        if not large or sizes[axis] <= grains[axis]:
            return m, n, k
        sizes[axis] = _round(sizes[axis] // 2, grains[axis])


def _tile(t: Template) -> tuple[int, int, int]:
    if t.config is None:
        return 64, 64, 32
    from cutegemm import backend as backends

    bm, bn, bk = backends.get(backends.named_by(t.config)).parse(t.config).tile()
    return (bm, bn, max(bk, 8)) if t.order == "row" else (bn, bm, max(bk, 8))


def _size(tile: int, rng: random.Random, limits: Limits) -> int:
    """0, 1, a prime, within one of a multiple of the tile, or anything up to some tiles."""
    tiles = 2 if limits.device == "cpu" else 4
    kind = rng.random()
    if kind < 0.03:
        return 0
    if kind < 0.11:
        return 1
    if kind < 0.35:
        return rng.choice(PRIMES)
    if kind < 0.7:
        return max(rng.randint(1, tiles) * tile + rng.choice((-1, 0, 1)), 0)
    return rng.randint(1, tiles * tile + 8)


def _round(size: int, grain: int) -> int:
    return 0 if size == 0 else max(-(-size // grain) * grain, grain)


def _number(rng: random.Random, zero: bool) -> float:
    kind = rng.random()
    if kind < 0.4:
        return 1.0
    if zero and kind < 0.44:
        return 0.0
    if kind < 0.6:
        return rng.choice((-1.0, 0.5, 2, 1e-3, -64.0, 1 / 3))
    value = rng.uniform(-2, 2)
    return value if abs(value) > 1e-6 else 1.0  # what fp32 rounds to 0 is 0 to some kernels, and a factor to others


def _placed(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], inner: int, lead: int, align: int, rng: random.Random
) -> Layout:
    """The layout on an address that makes its alignment class exactly `align` where its strides give more."""
    item = ITEMSIZE[dtype]
    batch = strides[0] if len(strides) == 3 and shape[0] > 1 else 0
    offset = rng.choice((0, 0, 1, 3, 8)) * (16 // item)
    if alignment(0, item, inner, lead, batch) > align:
        offset += align // item * rng.choice(range(1, 16 // align, 2) or (1,))
    return Layout(dtype, shape, strides, offset)


def _operand(
    dtype: str, rows: int, cols: int, row_major: bool, align: int, batch: int | None, kind: str, rng: random.Random
) -> Layout:
    """A matrix of an input, or a batch of them: compact, padded, expanded (stride 0), overlapping, without a unit
    stride."""
    grain = align // ITEMSIZE[dtype]
    inner, outer = (cols, rows) if row_major else (rows, cols)
    count = {"flat": None, "one": 1}.get(kind, batch)
    if rng.random() < 0.06:  # no unit stride: gemm copies it
        step = rng.choice((0, 2, 3))
        row, col = (max(cols, 1) * max(step, 1) + rng.randint(0, 3), step)
        if rng.random() < 0.5:
            row, col = step or 2, max(rows, 1) * max(step, 2) + rng.randint(0, 3)
        strides = (row, col) if count is None else (rng.choice((0, rows * cols * 3 + 7)), row, col)
        return Layout(dtype, (rows, cols) if count is None else (count, rows, cols), strides, rng.randint(0, 9))
    style = rng.random()
    lead = max(inner, 1)
    if style < 0.35:
        lead = inner + grain * rng.randint(1, 9)
    elif style < 0.4:
        lead = 0
    elif style < 0.45:
        lead = grain * rng.randint(0, max(inner // grain, 1))
    lead = _round(lead, grain)
    if inner == 1 and not row_major:
        lead = max(lead, 2 * grain)
    stride_batch = outer * lead
    if kind == "expanded":
        stride_batch = 0
    elif count is not None and rng.random() < 0.3:
        if rng.random() < 0.5 and lead >= inner:
            stride_batch, lead = lead, lead * max(count, 1)  # the matrices' rows are interleaved
        else:
            stride_batch += grain * rng.randint(1, 9)
    matrix = (lead, 1) if row_major else (1, lead)
    shape = (rows, cols) if count is None else (count, rows, cols)
    strides = matrix if count is None else (stride_batch, *matrix)
    return _placed(dtype, shape, strides, inner, lead if outer > 1 else inner, align, rng)


def _result(t: Template, shape: tuple[int, ...], rng: random.Random) -> Layout | None:
    """Where D goes: nowhere in particular (None), a compact, padded or interleaved tensor, one without unit stride."""
    if rng.random() < 0.15 and t.order == "row":
        return None
    rows, cols = shape[-2:]
    item, align = ITEMSIZE[t.out_dtype], t.aligns[2]
    if t.order == "row" and alignment(0, item, cols) == align and rng.random() < 0.06:
        row, col = 3 * cols + 2, 3
        strides = (row, col) if len(shape) == 2 else (row * rows + 5, row, col)
        return Layout(t.out_dtype, shape, strides, rng.randint(0, 9))
    return _aligned(t.out_dtype, shape, t.order == "row", align, rng)


def _aligned(dtype: str, shape: tuple[int, ...], row_major: bool, align: int, rng: random.Random) -> Layout:
    """No two elements share an address."""
    rows, cols = shape[-2:]
    grain = align // ITEMSIZE[dtype]
    inner, outer = (cols, rows) if row_major else (rows, cols)
    lead = _round(max(inner, 1) + (grain * rng.randint(1, 40) if rng.random() < 0.6 else 0), grain)
    if inner == 1 and not row_major:
        lead = max(lead, 2 * grain)
    stride_batch = max(outer, 1) * lead
    if len(shape) == 3 and rng.random() < 0.4:
        if rng.random() < 0.5:
            stride_batch, lead = lead, lead * max(shape[0], 1)
        else:
            stride_batch += grain * rng.randint(1, 9)
    matrix = (lead, 1) if row_major else (1, lead)
    strides = matrix if len(shape) == 2 else (stride_batch, *matrix)
    return _placed(dtype, shape, strides, inner, lead if outer > 1 else inner, align, rng)


def _c(t: Template, shape: tuple[int, ...], out: Layout | None, rng: random.Random) -> tuple[Layout | None, bool]:
    """C's layout, and whether it is `out` itself (then without a layout of its own)."""
    rows, cols = shape[-2:]
    dtype, item = t.c_dtype, ITEMSIZE[t.c_dtype]
    if t.c == "no":  # with beta == 0, a C full of NaN is not read
        return (Layout(dtype, (rows, cols), (cols, 1)) if rng.random() < 0.1 else None), False
    if out is not None and out.dtype == dtype and rng.random() < 0.4:
        return None, True
    flat = shape if rng.random() < 0.6 else (rows, cols)
    if t.c == "aligned":
        if t.order == "row" and rng.random() < 0.15:  # one row for all
            return _placed(dtype, (cols,), (1,), cols, 0, t.align_c, rng), False
        return _aligned(dtype, flat, t.order == "row", t.align_c, rng), False
    kind = rng.choice(("other order", "other order", "no unit", "column", "number"))
    if kind == "column":
        return Layout(dtype, (rows, 1), (rng.randint(1, 3), 1), rng.randint(0, 3)), False
    if kind == "number":
        return Layout(dtype, (), (), rng.randint(0, 3)), False
    if kind == "no unit":
        row, col = (2 * cols + 1, 2) if rng.random() < 0.5 else (2, 2 * rows + 1)
        strides = (row, col) if len(flat) == 2 else (max(row * rows, col * cols) + 1, row, col)
        return Layout(dtype, flat, strides, rng.randint(0, 3)), False
    return _aligned(dtype, flat, t.order != "row", item, rng), False


def _vector(dtype: str, n: int, rng: random.Random, step: int = 1) -> Layout:
    return Layout(dtype, (n,), (rng.choice((1, 1, 1, 1, 0, 2)),), rng.randint(0, 9) * step)


def _specials(layouts: dict[str, Layout | None], rng: random.Random) -> tuple[tuple[str, tuple[int, ...], float], ...]:
    """Some infinities and NaN."""
    found = []
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([name for name, layout in layouts.items() if layout is not None])
        layout = layouts[name]
        assert layout is not None
        if math.prod(layout.shape):
            index = tuple(rng.randrange(extent) for extent in layout.shape)
            found.append((name, index, rng.choice((math.inf, -math.inf, math.nan))))
    return tuple(found)
