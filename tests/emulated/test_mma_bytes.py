"""int8 and fp8 by mma.sync, in the emulator, as on an A100, on Ada and on Hopper."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm import backend
from cutegemm.cute.ampere import config as ampere
from cutegemm.emulator import tensor_cores
from cutegemm.errors import UnsupportedError
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from tests import fuzz_scaled
from tests.examples import examples
from tests.scaled import check

M, N, K = 72, 90, 328
WHOLE, ROWS = (None, None), ("rows", "rows")
FAST = {"accumulate": "fast", "out_dtype": torch.float32}
FULL = {"bias": True, "activation": "silu", "alpha": -0.5}


@pytest.mark.parametrize(
    ("target", "config", "given"),
    [
        ("sm_80", "64x64x64/w32x32/s3/g8", {"a": "int8", "recipes": ROWS}),
        ("A6000", "64x32x128/w32x16/s2/g1/k3", {"a": "int8", "recipes": ("tensor", "rows"), "options": FULL}),
        ("sm_80", "64x64x128/w32x32/s2/g8/k2", {"a": "int8", "recipes": ("blocks", "blocks128"), "batch": 2}),
        ("sm_89", "64x64x128/w32x32/s3/g8", {"recipes": WHOLE, "whole": True, "out_dtype": torch.float32}),
        ("sm_89", "32x64x128/w16x32/s2/g8", {"recipes": ROWS, "b": "e5m2", "options": FULL}),
        ("sm_89", "64x64x128/w32x64/s2/g8/k3", {"recipes": ("rows", "tensor"), "a": "e5m2", "b": "e4m3", "batch": 2}),
        ("sm_89", "64x64x64/w32x32/s3/g8/k2", {"recipes": WHOLE, "a": "e5m2", "b": "e5m2", **FAST}),
        ("sm_89", "64x128x128/w16x64/s2/g8", {"recipes": ("blocks", "blocks128"), "out_dtype": torch.float32}),
        ("sm_89", "128x64x128/w64x16/s2/g8/k2", {"recipes": ("blocks128", "blocks"), "out_dtype": torch.float16}),
        ("sm_89", "32x32x128/w16x16/s3/g8", {"recipes": (None, "blocks"), "options": FULL, "batch": 2}),
        ("H200", "64x64x128/w32x32/s3/g8", {"recipes": ROWS, "b": "e5m2", "majors": "nt", "gaps": (5, 3)}),
    ],
)  # fmt: skip
@pytest.mark.product(keep=1)
def test_scaled_products(target, config, given, seed, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", target)
    check(M, N, K, seed=seed, backend="cute", config=f"sm80/{config}", **given)


@pytest.mark.parametrize("config", ["64x64x64/w32x32/s3/g8", "64x64x128/w64x32/s2/g8/k3", "32x128x128/w16x64/s2/g1"])
@pytest.mark.parametrize("k", [1, 35, 128, 131, 1000])
@pytest.mark.product(keep=1)
def test_sums_of_int8_are_exact(config, k, seed, monkeypatch):
    """Any K, rows with other bits behind them: nothing behind K is read."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    for majors, gaps in (("tn", (-k % 16, 16 - k % 16)), ("nt", (5, 0))):
        given = {"majors": majors, "gaps": gaps, "backend": "cute", "config": f"sm80/{config}"}
        check(33, 40, k, a="int8", recipes=WHOLE, seed=seed, **given)


def test_a_sum_that_uses_all_of_int32(monkeypatch):
    """127 * 127 * 133000 is just below 2^31; the parts of a divided K are added as integers."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_80")
    k = 133_000
    a, b = torch.full((16, k), 127, dtype=torch.int8), torch.full((16, k), 127, dtype=torch.int8).t()
    got = cutegemm.gemm(a, b, backend="cute", config="sm80/32x32x128/w16x16/s4/g8/k8")
    assert (got == 127 * 127 * k).all()


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "H200"])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.product(keep=1)
def test_what_the_rule_allows_compiles_and_is_right(half, target, monkeypatch):
    """Random products by random configurations: right where the rule of validity says so, else refused by it."""
    monkeypatch.setenv("CUTEGEMM_ARCH", target)
    found = [fuzz_scaled.run(number, "cpu", "sm80") for number in range(5000 + half, 5000 + examples(60), 2)]
    assert not [said for kind, said in found if kind in ("wrong", "failed")]
    assert {kind for kind, _ in found} == {"right", "refused"}
    assert all(said.startswith(("config sm80/", "backend 'cute' cannot serve")) for kind, said in found if said)


def test_fp8_needs_ada(monkeypatch):
    a, b = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(32, 16).to(torch.float8_e5m2)
    for target, capability in (("A100", "8.0"), ("A6000", "8.6")):
        monkeypatch.setenv("CUTEGEMM_ARCH", target)
        wanted = (
            f"mma.sync multiplies fp8 from compute capability 8.9 on; {target} has {capability}, "
            "and takes fp16, bf16, fp32 as tf32, int8"
        )
        for config in (None, "sm80/64x64x128/w32x32/s3/g8"):
            with pytest.raises(UnsupportedError, match=wanted):
                cutegemm.gemm(a, b, backend="cute", config=config)
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_89")
    assert (cutegemm.gemm(a, b, backend="cute") == 32).all()


@pytest.mark.parametrize(
    ("config", "given", "reason"),
    [
        ("64x64x64/w32x32/s3/g8", {"dtype": "e4m3"}, "bk is 64; sums promoted every 128 of K need a k tile of 128"),
        ("128x64x128/w64x64/s3/g8", {"dtype": "e5m2"}, "over 64 sums, promoted in as many more registers, a"),
        ("64x32x128/w64x32/s3/g8", {"dtype": "e5m2"}, "over 32 sums, promoted in as many more registers, a"),
        ("128x128x128/w32x32/s3/g8", {"dtype": "e5m2"}, "512 threads with warp tiles 32x32; over 16 sums"),
        ("128x128x128/w64x64/s3/g8", {"dtype": "int8"}, "warp tiles 64x64; over 64 sums a thread spill"),
        ("64x64x128/w32x32/s3/g8", {"dtype": "int8", "majors": "tt"}, "takes int8 K-major only; B is N-major: copy it"),
        ("64x64x128/w32x32/s3/g8", {"dtype": "int8", "k": 40}, "rows of int8 must begin at multiples of 16 bytes; A"),
        ("64x64x128/w32x32/s3/g8", {"dtype": "e4m3", "out_dtype": "e4m3"}, "round no value to a type of one byte"),
        ("64x64x32/w32x32/s3/g8", {"dtype": "int8"}, "bk is 32; at least 64"),
    ],
)  # fmt: skip
def test_what_the_rule_refuses(config, given, reason):
    problem = Problem.of(4096, 4096, **{"k": 4096, **given})
    cute = backend.get("cute")
    assert reason in str(cute.check(cute.parse(f"sm80/{config}"), problem, arch.get("sm_89")))


def test_hopper_still_takes_wgmma():
    """Where WGMMA serves the products, mma.sync is not among the candidates."""
    for dtype in ("int8", "e4m3"):
        signature = Problem.of(4096, 4096, 4096, dtype).signature
        found = backend.get("cute").candidates(signature, arch.get("H200"))
        assert {config.family for config, _ in found} == {"sm90"}
        assert (dtype, "ieee") in ampere.TAKES


def test_fp8_is_multiplied_as_fp16_on_hopper():
    """In two steps of 16, which keep 25 fraction bits: a small addend is kept that 13 bits lose."""
    for target, halves in (("sm_89", False), ("sm_90a", True), ("sm_100a", False)):
        assert tensor_cores.multiplied_as_halves("e4m3", target) == halves
    assert sorted(tensor_cores.AS_HALVES) == list(range(32))
    assert {k % 4 for k in tensor_cores.AS_HALVES[:16]} == {0, 1}
    a, b = torch.zeros(16, 32), torch.zeros(32, 16)
    a[:, 0], a[:, 1], b[:2] = 256.0, 2.0**-9, 1.0
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    for target, sums in (("H200", 256.0 + 2.0**-9), ("sm_89", 256.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUTEGEMM_ARCH", target)
            given = {"backend": "cute", "config": "sm80/32x32x128/w16x16/s2/g8", "out_dtype": torch.float32}
            assert (cutegemm.gemm(a, b, **given) == sums).all()
