"""fp32 products on tensor cores from parts of the operands, in the emulator: layouts, and what they promise.

By WGMMA as on an H200, and by mma.sync (`sm80/...`) as on an A100: tests/emulated/test_precisions_mma.py has more.

The emulator adds as the tensor cores do, so that errors here are those to expect of a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cutegemm
from cutegemm.choice import plan
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import reference
from cutegemm.problem.dtypes import TABLE
from tests.problems import Case
from tuning import part_sums
from tuning.precision import INPUTS, by_sgemm, error, inputs

pytest.importorskip("llvmlite")

PRECISIONS = ("tf32x3", "bf16x6", "bf16x9")
SMALL = "sm90/64x64x32/coop1/c1x1/s3/g2"
PLAIN = "sm90/64x96x32/coop1/c1x1/s3/g2"
"""A tile of so many accumulators that its sums are not compensated."""
MMA = "sm80/64x32x32/w32x16/s2/g8"


@pytest.fixture(autouse=True)
def few_sms(request, monkeypatch):
    """An H200 of 4 SMs; for the `config` of a test that is of the family sm80 an A100."""
    call = getattr(request.node, "callspec", None)
    older = call is not None and str(call.params.get("config")).startswith("sm80/")
    arch = replace(arch_table.get("A100" if older else "sm_90a"), sm_count=4)
    monkeypatch.setattr(plan, "emulated_arch", lambda: arch)


def computed(a: torch.Tensor, b: torch.Tensor, precision: str, config: str = SMALL, **options) -> torch.Tensor:
    return cutegemm.gemm(a, b, precision=precision, backend="cute", config=config, **options)


@pytest.mark.parametrize(
    ("precision", "config", "options"),
    [
        ("bf16x6", "128x96x32/coop2/c2x1/s2/g2/pdl", {"majors": "tn", "pad": 1}),
        ("bf16x6", "64x64x32/coop1/c1x2/s3/g2", {"majors": "nt", "batch": 2, "offset": 1}),
        ("bf16x9", "64x32x32/coop1/c1x1/s3/g2/swap", {"majors": "tt", "c": True, "beta": -1.5, "bias": True}),
        ("tf32x3", "64x64x32/coop1/c1x1/s3/g2/k3", {"majors": "nn", "pad": 2, "activation": "silu"}),
        ("tf32x3", "64x96x32/pp/c1x1/s3/g2", {"majors": "nt", "alpha": -0.5}),
        ("bf16x6", "64x64x32/coop1/c1x1x2/s3/g2", {"majors": "nt", "batch": 2, "pad": 4}),
        ("bf16x6", "64x64x32/pp/c1x1/s3/g2", {"majors": "tn", "c": True, "beta": 0.5}),
        ("tf32x3", "128x64x32/coop2/c1x1/s3/g2/streamk", {"majors": "tt", "bias": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.product(keep=1)
def test_layouts_and_forms(precision, config, options, seed):
    """Every major and alignment, batches, clusters, swapped operands, divided K, epilogues; ragged on every side."""
    case = Case.random(137, 107, 91, "fp32", seed=seed, precision=precision, **options)
    case.run(backend="cute", config=f"sm90/{config}")


@pytest.mark.parametrize("k", [20, 1, 0])
def test_one_matrix_serves_a_batch_and_strides_that_nothing_reads(k, seed):
    """B is split once for all of the batch; an A without a unit stride is copied first; K = 0 and K = 1."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(3, 70, 40, generator=generator)[:, :, ::2]
    b = torch.randn(20, 33, generator=generator)
    want = reference.expected(a[..., :k], b[:k], precision="bf16x6")
    verdict = reference.check(computed(a[..., :k], b[:k], "bf16x6"), want)
    assert verdict, verdict.message


def test_a_program_with_gate_and_up(seed):
    """Columns of both halves of B in one tile, as K-major parts whatever B's major."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(70, 36, generator=generator), torch.randn(36, 66, generator=generator)

    def gated(acc):
        gate, up = cutegemm.ops.halves(acc)
        return cutegemm.ops.silu(gate) * up

    got = cutegemm.gemm(a, b, epilogue=gated, precision="bf16x6", backend="cute", config=SMALL)
    gate, up = (a.double() @ b.double()).chunk(2, -1)
    torch.testing.assert_close(got, (torch.nn.functional.silu(gate) * up).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.product(keep=1)
def test_error_is_below_that_of_sgemm(kind, seed):
    """Relative to |A||B|, beside a sum of fused multiply-adds in the order of K; and the bound holds with its interval.

    tf32x3 has at most 0.85 of SGEMM's error from K = 256 on, bf16x6 at most half of it.
    """
    a, b = inputs(kind, 64, 64, 264, seed)
    baseline = error(by_sgemm(a, b), a, b)
    for precision, share in (("tf32x3", 0.85), ("bf16x6", 0.5)):
        got = computed(a, b, precision)
        verdict = reference.check(
            got, reference.expected(a, b, precision=precision, promotion=TABLE["fp32"].promoted[precision])
        )
        assert verdict, verdict.message
        largest, mean = error(got, a, b)
        assert largest <= share * baseline[0]
        assert mean <= share * baseline[1]


@pytest.mark.parametrize(
    ("config", "way"), [(SMALL, "compensated"), (f"{SMALL}/k2", "compensated, 2 parts of K"), (PLAIN, "plain")]
)
@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6"])
@pytest.mark.product(keep=1)
def test_the_model_of_the_sums_has_the_bits(precision, config, way, seed):
    """`tuning.part_sums`, on which docs/precision.md relies for a long K, beside the kernel."""
    for kind in ("normal", "exponents"):
        a, b = inputs(kind, 40, 24, 200, seed)
        tiles = part_sums.Tiles(a.numpy(), b.numpy(), precision)
        expected = torch.from_numpy(part_sums.WAYS[way](tiles))
        assert torch.equal(computed(a, b, precision, config), expected)


@pytest.mark.slow
def test_compensated_sums_of_a_long_k_err_less(seed):
    """Promotions of a compensated tile round as a few additions do, those of a larger tile as many."""
    a, b = inputs("powers", 40, 24, 2048, seed)
    compensated, plain = (error(computed(a, b, "bf16x6", config), a, b)[1] for config in (SMALL, PLAIN))
    assert compensated <= 0.5 * plain


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6"])
@pytest.mark.parametrize("config", [SMALL, PLAIN, MMA])
@pytest.mark.product(keep=1)
def test_an_infinity_stays_one(config, precision):
    """Whatever k tiles follow the one with the infinity; and a NaN stays one."""
    a, b = torch.ones(3, 160), torch.ones(24, 160).mT
    a[0, 5], a[1, 70], a[2, 5] = torch.inf, -torch.inf, torch.nan
    got = computed(a, b, precision, config)
    assert torch.equal(got[:2], a[:2] @ b)
    assert got[2].isnan().all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", [SMALL, MMA])
@pytest.mark.product(keep=1)
def test_integers_are_exact(precision, config, seed):
    """Below 2^24: long integers times powers of two, products of parts that only all terms give, and sums.

    All operands are K-major, so that all products are of one kernel, which other tests use too.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    one = torch.zeros(24, 40).T
    one[torch.randint(0, 40, (24,), generator=generator), torch.arange(24)] = 2.0 ** torch.arange(24)
    long = integers(2**24 - 1, 64, 40) if precision != "tf32x3" else integers(2**22 - 1, 64, 40)
    thin = torch.zeros(64, 8)
    thin[:, :1] = integers(2**11 - 1, 64, 1)
    pairs = [(long, one), (one.T, long.T), (thin, integers(2**12 - 1, 24, 8).T)]
    pairs.append((integers(500, 64, 104), integers(300, 24, 104).T))
    for a, b in pairs:
        assert torch.equal(computed(a, b, precision, config).double(), a.double() @ b.double())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", [SMALL, MMA])
@pytest.mark.product(keep=1)
def test_ends_of_the_range(precision, config):
    """The largest numbers are split without an overflow; the smallest keep what their parts can hold; Inf and NaN."""
    largest, tiny = torch.finfo(torch.float32).max, 2.0**-149
    values = torch.tensor([largest, -largest, 3.4e38, 2.0**-126, 5 * 2.0**-140, 3 * tiny, torch.inf, torch.nan, 1.0])
    a, b = values[:, None], torch.tensor([[1.0, 0.5, 2.0]])
    got = computed(a, b, precision, config)
    assert got[7].isnan().all()
    if precision != "bf16x9":  # there infinities meet zeros
        signs = torch.tensor([[torch.inf, 3.0, 1e3]])
        assert torch.equal(got[6], torch.full((3,), torch.inf))
        row, far = torch.tensor([[2.0, -1e30 - 1e22]]), torch.tensor([[torch.inf, 1.0], [1e5, -torch.inf]])
        assert computed(row, far, precision, config).tolist() == [[torch.inf, torch.inf]]
        assert computed(signs.T, -signs, precision, config).isinf().tolist() == (signs.T @ -signs).isinf().tolist()
        zeros = signs * 0
        assert computed(signs.T, zeros, precision, config).isnan().tolist() == (signs.T @ zeros).isnan().tolist()
    finite = [0, 1, 2, 3, 4, 5, 8]
    bound = reference.expected(a[finite], b, precision=precision, promotion=TABLE["fp32"].promoted[precision])
    verdict = reference.check(got[finite], bound)
    assert verdict, verdict.message
    assert bound.bound[5].max() <= 2.0**-130  # a few of the smallest numbers of the parts
    assert torch.equal(got[0, 2:].sign(), torch.tensor([1.0]))
    assert got[:2, 2].isinf().all()
