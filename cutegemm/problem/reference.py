"""The float64 reference and the error bound that every check in the project uses; there is no other tolerance.

`expected` computes D in float64 from the very same inputs, and `Expected.bound`, an elementwise bound on
|D_kernel - D_float64| that is derived as follows. u is the unit roundoff of one fp32 operation: 2^-24 on CUDA cores;
2^-23 on tensor cores, which align and truncate the addends of a sum instead of rounding to nearest (Fasi,
Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021). gamma_n = n u / (1 - n u)
(Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1).

1. Accumulation: products of fp16/bf16/tf32 values are exact in fp32, those of fp32 round once, and any order of
   adding K products, whatever the tiling or split, has error at most gamma_{K+2} (|A| |B|).
2. TF32: rounding to nearest with 10 explicit mantissa bits changes an operand by at most 2^-11 relative, a
   product by at most 2^-10 + 2^-22: that times (|A| |B|) is added.
   3xTF32 (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
   theoretical peak performance", 2022): x = big + small + rest, big the first 10 mantissa bits of x (truncated:
   |small + rest| <= 2^-10 |x|, and that difference is exact in fp32), small the difference rounded to TF32 (|rest| <=
   2^-11 2^-10 |x| = 2^-21 |x|). The kernel adds big big, big small and small big. Of xy = (big + small + rest)(...)
   it leaves out small small, at most 2^-20 (1 + 2^-10)^2 |xy|, and the terms with a rest, at most
   2 2^-21 (1 + 2^-10)^2 |xy| : together under 1.01 2^-19 (|A| |B|) is added. It sums 3 K products, whose magnitudes
   add up to at most (1 + 2^-10)^2 + ... < 1.01 (|A| |B|): step 1 becomes 1.01 gamma_{3K+2}.
   fp8: one step of tensor cores adds g products and the accumulator, g = 32 by Hopper's WGMMA and 16 by Ada's mma.sync.
   It aligns them to the largest exponent E among them, keeps 13 fraction bits of each, truncating, and truncates the
   sum to 13 fraction bits (arXiv 2512.07004, arXiv 2511.10909). With |x|' = max(|x|, the smallest normal number) for x
   other than 0, because subnormal operands keep the smallest normal exponent, 2^E <= max |a|'|b|' of the step or
   |accumulator|. A chain of s steps, whose magnitudes add up to S = |A|'|B|', is therefore off by at most
   2^-13 ((g + 1) (S + (s - 1) S) + s S) = (g + 2) s 2^-13 S, where S is its own. Sums promoted every 128 of K are
   chains of 4 steps on Hopper, 136 2^-13 (|A|'|B|') in all, and of 8 on Ada, 144. Fast sums are one chain: 34 K / 32
   and 36 K / 32. The bound is that of Ada, the larger one. mma.sync on Hopper, which multiplies fp8 as fp16, stays far
   below. The fp32 sums of chains, at most 2 K / 32 + 2 with those of splits, round to nearest: gamma with 2^-24.
   int8: sums that int32 holds are exact; an epilogue reads them in fp32: 2^-24 |acc|.
   Scales of blocks of K multiply the operands exactly here. The kernel rounds their product, and adds in one rounding.
   Operands split into parts (`problem.parts`), sums promoted every P of K: the tensor cores add t P products of parts
   at a time, the smallest first, and what they give is added in fp32 registers, which round to nearest. All but the
   P largest products of these are together at most s = 2^-7 1.02 of |A||B| (tf32x3: 2^-10 1.02), since the second part
   of x is at most 2^-8 |x| (2^-11 |x|), and the third smaller. So an interval errs by at most gamma_{(t-1) P}(2^-23) s
   for the small products and then gamma_{P+1}(2^-23) (1 + s) for the large ones, relative to its share of |A||B|;
   intervals add up to the same, relative to the whole. The ceil(K / P) promotions, however K is divided, err by at most
   gamma_{ceil(K / P) + 2}(2^-24) (1 + s). What is left out of a product is `Parts.omitted` of it, four times as much
   for numbers beyond the largest of bf16 or tf32, whose first part is truncated. An operand's parts miss at most
   `Parts.lost` of it, times the other operand. With P >= K without end this is the bound of step 1 for t K products.
   WGMMA and mma.sync alike: an Ampere tensor core takes g = 4 (tf32) or 8 (bf16) products a step, cuts each addend off
   2^-24 below the largest of them, and the sum at 24 bits (`emulator.tensor_cores`): ((g + 1) / 2 + 1) 2^-23 of their
   magnitudes, less than g additions that truncate.
   Tiles that promote twice as often and add at the end what promotions round off (`promoted.CompensatedProducts`) stay
   within it: with n = 2 ceil(K / P) promotions and v = 2^-24 what is kept misses at most v of each addend and is
   rounded itself, n^2 v^2 in all, and the last addition rounds once: 2 v + n^2 v^2 <= (ceil(K / P) + 2) v to n = 2^22.
3. Epilogue: at most five more fp32 operations: gamma_5 (|alpha| |A||B| + |beta C| + |bias|).
4. Activation: all four have |f'| <= 1.13 (silu 1.0999, gelu 1.1290), so the error so far grows by at most that;
   evaluating f itself costs at most 16 u |z| (every formula used is z times a value in [0, 1] known to a few
   u, absolutely).
5. Output: half a unit in the last place of the output dtype at |D| + (error so far), and half its smallest
   subnormal.

Sums whose terms fall under the fp32 normal range may lose them: K * 2^-126 * |alpha| is added. Tensor cores keep
subnormal numbers (Fasi et al., as above), and so does what adds promoted sums of parts: there t K 2^-149 is added.

fp64 operands: u is 2^-53 (IEEE operations, each rounded to nearest), the smallest normal number 2^-1022. The value is
rounded from twice as many digits (`double_double`), and what it may be off by itself is a part of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cutegemm.problem import double_double, scales
from cutegemm.problem.dtypes import (
    ACCEPTED,
    ALONE,
    CUDA_CORES,
    TABLE,
    TYPES,
    dtype_name,
    output_name,
    product_dtype_name,
    torch_dtype,
)
from cutegemm.problem.epilogue import formula_of
from cutegemm.problem.parts import TABLE as PARTS
from cutegemm.problem.parts import Parts

STEP, PROMOTED = 32, 128
"""Products of fp8 that a tensor core of Hopper adds at a time, and those between two promotions."""
_LIPSCHITZ = {None: 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
_FORMULAS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": lambda z: 0.5 * z * (1 + torch.erf(z * 0.5**0.5)),  # torch's own gives NaN for an fp32 infinity on CPUs
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True)
class Expected:
    """What a kernel must give: `value` in float64 and the elementwise `bound` on its error, same shape.

    vanishing: where the activation is of minus infinity, whose formula is NaN and whose limit is 0; None: nowhere.
    """

    value: torch.Tensor
    bound: torch.Tensor
    out_dtype: torch.dtype
    vanishing: torch.Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check. `ratio` is the largest error in units of the bound (inf for a non-finite value)."""

    ok: bool
    ratio: float
    message: str

    def __bool__(self) -> bool:
        return self.ok


def activate(z: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation by name, in the precision of z. Raises ValueError for a name that has no formula here."""
    return formula_of(activation, _FORMULAS)(z)


def expected(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee",
    tensor_cores: bool | None = None,
    promotion: int | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Expected:
    """The float64 result and its error bound for act(alpha * a @ b + beta * c + bias).

    Args:
        a: (M, K) or (L, M, K). b: (K, N) or (L, K, N). c: broadcastable to D; not read when beta == 0. bias: (N,).
        alpha, beta, activation, scale_a, scale_b: as in `cutegemm.gemm`. precision: also "fast", for accumulate="fast".
        out_dtype: dtype the result is rounded to; a's when None, of operands of one byte that of `gemm`.
        tensor_cores: whether fp32 accumulation truncates (see above); by default all but fp32/ieee.
        promotion: after how many elements of K sums leave the tensor cores, for "tf32x3" by the kernels of backend
            "cute"; None is for any kernel. "bf16x6" and "bf16x9" have these kernels alone, whose promotion is known.

    Returns:
        `Expected` on the device of `a`.
    """
    out_dtype = out_dtype or _default(a, scale_a, scale_b)
    tensor_cores = _truncates(a, precision) if tensor_cores is None else tensor_cores
    wide = a.dtype == torch.float64
    reads_c = c is not None and beta != 0  # as given: one that fp32 rounds to 0 still makes NaN of an infinity
    if not wide:
        alpha, beta = _fp32(alpha), _fp32(beta)
    u = 2.0**-53 if wide else 2.0**-23 if tensor_cores else 2.0**-24
    factors, blocks = _divided(a, b, scale_a, scale_b)
    z, magnitude, error = accumulators(a, b, precision, tensor_cores, promotion, *blocks)
    for factor in factors:
        z, magnitude, error = z * factor, magnitude * factor.abs(), error * factor.abs()
    z, magnitude, error = alpha * z, abs(alpha) * magnitude, abs(alpha) * error
    if c is not None and reads_c:
        term = beta * c.double()
        z, magnitude = z + term, magnitude + term.abs()
    if bias is not None:
        z, magnitude = z + bias.double(), magnitude + bias.double().abs()
    error += (
        _gamma(10 if wide else 5 + len(factors), u) * magnitude
    )  # of fp64 the value has as many roundings as the kernel
    value = activate(z, activation)
    error *= _LIPSCHITZ[activation]
    if activation is not None:
        error += 16 * u * z.abs()
    name = output_name(out_dtype) or product_dtype_name(out_dtype)
    if name is None or (name in ALONE and not wide):
        raise TypeError(f"out_dtype: got {out_dtype}, accepted are {ACCEPTED}")
    out = TYPES[name]
    if name == "int32":
        return Expected(z, torch.zeros_like(z), out_dtype)
    if out.largest is not None:  # it saturates, as `rounding.rounded` says
        value = value.clamp(-out.largest - (1 if out.is_integer else 0), out.largest)
        value = value.nan_to_num(0.0) if out.is_integer else value
    bound = error + out.roundoff * (value.abs() + error) + out.smallest
    return Expected(value, bound, out_dtype, None if activation in (None, "relu") else z == -math.inf)


def _default(a: torch.Tensor, *scales: torch.Tensor | None) -> torch.dtype:
    if a.element_size() > 1:
        return a.dtype
    name = TABLE[str(dtype_name(a.dtype))].output
    return torch_dtype("bf16" if name == "int32" and scales != (None, None) else name)


def _divided(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """(scales that multiply the accumulators, scales of blocks of K of A and B)."""
    if scale_a is None and scale_b is None:
        return [], [None, None]
    factors, blocks = list[torch.Tensor](), list[torch.Tensor | None]()
    for recipe, scale in zip(scales.recipes(a, b, scale_a, scale_b, None), (scale_a, scale_b), strict=True):
        of_blocks = recipe is not None and bool(recipe.input.scales)
        blocks.append(scale if of_blocks else None)
        if recipe is not None and scale is not None and not of_blocks:
            factors.append(scale.double())
    return factors, blocks


def accumulators(
    a: torch.Tensor,
    b: torch.Tensor,
    precision: str = "ieee",
    tensor_cores: bool | None = None,
    promotion: int | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a @ b, |a| @ |b|, how far a kernel's fp32 accumulators may be off) in float64: steps 1 and 2 of the bound.

    Arguments as those of `expected`; scales are those of blocks of K.
    """
    if a.element_size() == 1:
        return _of_one_byte(a, b, precision, scale_a, scale_b)
    if a.dtype == torch.float64:
        return _wide_accumulators(a, b)
    tensor_cores = _truncates(a, precision) if tensor_cores is None else tensor_cores
    k, u = a.shape[-1], 2.0**-23 if tensor_cores else 2.0**-24
    a64, b64 = a.double(), b.double()
    magnitude = torch.matmul(a64.abs(), b64.abs())
    split = PARTS.get((dtype_name(a.dtype) or "", precision))
    if split is not None and promotion is None and precision != "tf32x3":
        promotion = TABLE["fp32"].promoted[precision]
    if split is not None and promotion is not None:
        error = _split_error(a64, b64, magnitude, split, promotion)
    elif precision == "tf32x3":
        error = (1.01 * _gamma(3 * k + 2, u) + 1.01 * 2.0**-19) * magnitude + 3 * k * 2.0**-126
    else:
        error = _gamma(k + 2, u) * magnitude + k * 2.0**-126
    if precision == "tf32":
        error += (2.0**-10 + 2.0**-22) * magnitude
    return torch.matmul(a64, b64), magnitude, error


def _of_one_byte(
    a: torch.Tensor, b: torch.Tensor, precision: str, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accumulators` of fp8 and int8."""
    scaled = scale_a is not None or scale_b is not None
    exact, sizes, aligned = [], [], []
    for x, scale, rows in ((a, scale_a, True), (b, scale_b, False)):
        wide, row = x.double(), TABLE[str(dtype_name(x.dtype))]
        factor = torch.ones((), dtype=torch.float64, device=x.device)
        if scale is not None:
            factor = scales.expanded(scale, tuple(x.shape), rows).double()
        exact.append(wide * factor)
        sizes.append(exact[-1].abs())
        least = row.smallest / (2 * row.roundoff) if row.roundoff else 0.0
        aligned.append(torch.where(wide == 0, 0.0, wide.abs().clamp(min=least)) * factor.abs())
    k, z = a.shape[-1], torch.matmul(*exact)
    magnitude = torch.matmul(*sizes)
    steps = -(-k // STEP)
    sums = (_gamma(2 * steps + 2, 2.0**-24) + 3 * 2.0**-24 * scaled) * magnitude + 2 * k * 2.0**-126 * scaled
    if TABLE[str(dtype_name(a.dtype))].is_integer:
        return z, magnitude, sums if scaled else 2.0**-24 * z.abs()
    chain = min(steps, PROMOTED // STEP) if precision != "fast" or scaled else steps
    return z, magnitude, 36 * chain * 2.0**-13 * torch.matmul(*aligned) + sums + k * 2.0**-126


def _split_error(
    a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor, split: Parts, promotion: int
) -> torch.Tensor:
    """Of operands that are split into parts and promoted, see the module docstring; a, b in float64."""
    k, terms, bits = a.shape[-1], len(split.terms), 8 if split.element == "bf16" else 11
    interval = min(k, promotion)
    small = 1.02 * 2.0 ** (1 - bits)
    relative = _gamma((terms - 1) * interval, 2.0**-23) * small + _gamma(interval + 1, 2.0**-23) * (1 + small)
    relative += _gamma(-(-k // promotion) + 2, 2.0**-24) * (1 + small)
    largest = (2 - 2.0 ** (1 - bits)) * 2.0**127
    beyond = any(bool((x.abs() > largest).any()) for x in (a, b))
    relative += (4 if beyond else 1) * split.omitted
    rows, columns = a.abs().sum(-1, keepdim=True), b.abs().sum(-2, keepdim=True)
    return relative * magnitude + split.lost * (rows + columns) + terms * k * 2.0**-149


def _wide_accumulators(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accumulators` of fp64 operands; the error counts that of the value and of the magnitudes too."""
    k, u = a.shape[-1], 2.0**-53
    value, gamma = double_double.matmul(a, b), _gamma(k + 2, u)
    magnitude = torch.matmul(a.abs(), b.abs()) * (1 + 2 * gamma)
    return value, magnitude, (gamma + gamma**2) * magnitude + u * value.abs() + 2 * k * 2.0**-1022


def _truncates(a: torch.Tensor, precision: str) -> bool:
    """Whether the arithmetic unit adds up as tensor cores do."""
    operands = dtype_name(a.dtype)
    return operands is None or TABLE[operands].units.get(precision) != CUDA_CORES


def check(got: torch.Tensor, want: Expected) -> Verdict:
    """Compares elementwise: finiteness first (`abs(nan) > bound` is false), then |got - value| <= bound.

    A NaN in the reference must be a NaN, or 0 where it is `vanishing`, an infinity the same infinity. A value that may
    round beyond the largest finite number of the output dtype may be that infinity.
    """
    if got.shape != want.value.shape:
        return Verdict(False, math.inf, f"shape {tuple(got.shape)}, expected {tuple(want.value.shape)}")
    if got.dtype != want.out_dtype:
        return Verdict(False, math.inf, f"dtype {got.dtype}, expected {want.out_dtype}")
    if got.numel() == 0:
        return Verdict(True, 0.0, "empty")
    saturates = TYPES[str(output_name(want.out_dtype) or product_dtype_name(want.out_dtype))].largest is not None
    largest = math.inf if saturates else torch.finfo(want.out_dtype).max
    got64, value, bound = got.double(), want.value, want.bound
    finite = torch.isfinite(value)
    bad = torch.where(finite, ~torch.isfinite(got64), (got64 != value) & ~(got64.isnan() & value.isnan()))
    if want.vanishing is not None:
        bad &= ~(want.vanishing & (got64.abs() < 2.0**-100))
    # Where an infinity met on the way makes the bound infinite, only the exact value will do.
    bad |= finite & ~torch.isfinite(bound) & (got64 != value)
    may_overflow = finite & torch.isfinite(bound) & (value.abs() + bound >= largest)
    bad &= ~(may_overflow & got64.isinf() & (got64.sign() == value.sign()))
    error = (got64 - value).abs()
    off = finite & torch.isfinite(got64) & torch.isfinite(bound) & (error > 0)
    ratio = torch.where(off, error / bound, torch.zeros_like(error))
    ratio = torch.where(bad, torch.full_like(ratio, math.inf), ratio)
    worst = float(ratio.max())
    if worst <= 1.0:
        return Verdict(True, worst, f"largest error {worst:.3f} of the bound")
    index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    count = int((ratio > 1).sum())
    return Verdict(
        False,
        worst,
        f"{count} of {ratio.numel()} elements outside the bound; worst at {index}: got {float(got64[index])!r}, "
        f"expected {float(value[index])!r} +- {float(bound[index]):.3e} (error {worst:.3g} of the bound)",
    )


def _fp32(value: float) -> float:
    """The number as the kernels take it."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _gamma(n: int, u: float) -> float:
    nu = n * u
    if nu >= 1:
        raise ValueError(f"K: {n} fp32 additions have no meaningful error bound (n u = {nu:.2f} >= 1)")
    return nu / (1 - nu)
