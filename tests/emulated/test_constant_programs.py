"""Constant operands beside an epilogue and beside scales, in the emulator, behind a kernel that still runs.

The tiles of the promised operand alone are fetched before the wait. Whatever else the kernel in front still writes, the
scales and the operands of the epilogue too, the result is that of what it leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cutegemm
from cutegemm import backend as backends
from cutegemm import ops
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.errors import BeforeTheWait
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import program_request, torch_dtype
from cutegemm.pytorch import scaled
from cutegemm.run import fused
from cutegemm.run.how import How
from cutegemm.run.reductions import Reductions

pytest.importorskip("llvmlite")

ARCH = replace(arch_table.get("sm_90a"), sm_count=4)
BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
FEW = "128x16x64/coop1/c1x1/s3/row/swap/pdl"
DEEP = "128x16x64/coop1/c1x1/s12/row/swap/once/pdl"


def with_residual(acc, residual):
    return ops.relu(acc) + residual


def with_bias(acc, bias):
    return ops.relu(acc) + bias


def quantized(acc, bias):
    return acc + bias, ops.row_max_abs(acc)


class Launch:
    """A launch of small integers and of scales that are powers of two, whose sums are exact.

    now, later: the tensors before the kernel in front ends, and as it leaves them, by the names of `gemm`'s arguments.
    """

    def __init__(
        self, config: str, constant: str, seed: int, epilogue: Any = None, *, shape: tuple[int, ...] = (9, 96, 336),
        dtype: torch.dtype = BF16, operand: tuple[int, ...] = (), scales: str = "", out_dtype: torch.dtype = BF16,
    ) -> None:  # fmt: skip
        self.constant, self.epilogue, self.out_dtype, self.seed = constant, epilogue, out_dtype, seed
        m, n, k = shape
        blocks = -(-k // 128)
        of_scales = {
            "rows": ((m, 1), (1, n)),
            "blocks": ((m, blocks), (blocks, -(-n // 128))),
            "columns": ((m, blocks), (blocks, n)),
        }
        self.generator = torch.Generator().manual_seed(seed)
        self.now: dict[str, torch.Tensor] = {}
        self.later: dict[str, torch.Tensor] = {}
        for made in (self.now, self.later):
            made["a"], made["b"] = self._integers(m, k).to(dtype), self._integers(n, k).to(dtype).t()
            if operand:
                made["operand"] = self._integers(*operand).to(BF16)
            for name, extents in zip(("scale_a", "scale_b"), of_scales.get(scales, ()), strict=False):
                made[name] = 2.0 ** self._integers(*extents)
        backend = backends.get("cute")
        self.kernel = backend.build(self._asked(self.now)[0].problem.signature, backend.parse(f"sm90/{config}"), ARCH)

    def _integers(self, *shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=self.generator).float()

    def _asked(self, tensors: dict[str, torch.Tensor]) -> tuple[Any, tuple[Any, ...]]:
        """The call as `gemm` poses it, and the operands of its program."""
        a, b, own = tensors["a"], tensors["b"], tuple(tensors[name] for name in ("operand",) if name in tensors)
        program, given = self.epilogue, own
        if "scale_a" in tensors:
            program, given, _ = scaled.arguments(
                a, b, None, 1.0, 0.0, None, None, None, self.out_dtype, self.epilogue, own, tensors["scale_a"],
                tensors["scale_b"], None,
            )  # fmt: skip
        asked = program_request.describe(a, b, program, given, None, self.out_dtype, None)
        return How(constant=self.constant or None).posed(asked), given

    def run(self, written: str = "", promised: bool = True, later: str = "") -> list[torch.Tensor]:
        """The results, where the kernel in front still writes what `written` names.

        promised: the emulator knows the promise. later: what that kernel has written long before.
        """
        tensors = {
            name: (self.later if name in later.split() else self.now)[name].clone() for name in self.now
        }  # fmt: skip
        asked, given = self._asked(tensors)
        outs = [
            torch.full(shape, torch.nan, dtype=torch_dtype(output.dtype))
            for shape, output in zip(asked.shapes, asked.program.outputs, strict=True)
        ]
        reductions = Reductions(asked.problem, self.kernel.config)
        results = reductions.partials(outs)
        problem = asked.problem.without_constant()
        launches = self.kernel.capture(
            problem, *fused.arguments_of(asked, tensors["a"], tensors["b"], given, results)
        )  # fmt: skip
        if not promised:
            launches.constant = ()

        def end() -> None:
            for name in written.split():
                tensors[name].copy_(self.later[name])

        outputs = {f"out[{i}]": each for i, each in enumerate(results)} | launches.scratch
        named = {"a": tensors["a"], "b": tensors["b"]} | {f"operands[{i}]": each for i, each in enumerate(given)}
        emulate(self.kernel.ptx, launches, {**named, **outputs}, outputs=set(outputs), seed=self.seed, in_front=end)
        reductions.finish(results, outs)
        return outs

    def others(self) -> str:
        """All that the promise does not name."""
        return " ".join(name for name in self.now if name != self.constant)

    def everything(self) -> str:
        return " ".join(self.now)


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    assert not any(each.isnan().any() for each in want)
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


GATED = {"epilogue": ops.swiglu}
RESIDUAL = {"epilogue": with_residual, "operand": (9, 96)}
LARGE = {"epilogue": with_residual, "operand": (200, 96), "shape": (200, 96, 200)}
BIAS = {"epilogue": with_bias, "operand": (96,)}
CASES = (
    (FEW, GATED),
    (DEEP, GATED),  # a ring deeper than K
    ("128x16x64/coop1/c2x1/s3/row/swap/pdl", {**GATED, "shape": (9, 512, 336)}),
    ("64x32x64/coop1/c1x1/s3/row/pdl", {**GATED, "shape": (136, 96, 336)}),
    ("64x32x64/pp/c1x1/s3/serp2/zig/pdl", {**GATED, "shape": (136, 96, 336)}),
    ("64x32x64/coop1/c1x1/s3/row/pdl", RESIDUAL),  # through the ring
    ("128x64x64/coop2/c2x1/s3/row/pdl", LARGE),
    ("64x16x64/coop1/c1x1/s3/row/swap/pdl", BIAS),
    ("64x32x64/coop1/c1x1/s3/row/k3/pdl", BIAS),
    ("64x32x64/coop1/c1x1x2/s3/row/pdl", RESIDUAL),
    ("64x32x64/coop1/c1x1/s2/row/streamk/pdl", {**BIAS, "shape": (136, 96, 336)}),
    ("64x32x64/coop1/c1x1/s3/row/pdl", {"epilogue": quantized, "operand": (96,)}),  # a matrix and a reduction
    ("64x16x128/coop1/c1x1/s3/row/swap/pdl", {"dtype": E4M3, "scales": "rows"}),
    ("64x16x128/coop1/c1x1/s3/row/k2/swap/pdl", {"dtype": E4M3, "scales": "rows"}),
    (FEW.replace("x64/", "x128/"), {"dtype": E4M3, "scales": "rows", **GATED}),
    ("64x16x128/coop1/c1x1/s3/row/swap/pdl", {"dtype": INT8, "scales": "rows"}),
    ("64x16x128/coop1/c1x1/s2/row/swap/pdl", {"dtype": E4M3, "scales": "blocks"}),
    ("64x16x128/coop1/c1x1/s5/row/swap/once/pdl", {"dtype": E4M3, "scales": "blocks"}),
    ("64x16x128/coop1/c1x1/s2/row/k2/swap/pdl", {"dtype": E4M3, "scales": "blocks"}),
    ("64x32x128/coop1/c2x1/s2/row/pdl", {"dtype": E4M3, "scales": "columns", "shape": (136, 96, 336)}),
    ("64x32x128/pp/c1x1/s3/row/pdl", {"dtype": E4M3, "scales": "blocks", "shape": (136, 96, 336)}),
    ("64x32x128/coop1/c1x1/s3/row/pdl/twin", {"dtype": E4M3, "scales": "blocks"}),
    ("64x32x128/coop1/c1x1/s2/row/pdl", {"dtype": E4M3, "scales": "blocks", **GATED}),
    ("128x64x128/coop2/c1x1/s2/row/pdl/half", {"dtype": E4M3, "scales": "blocks", "shape": (136, 96, 336)}),
    ("64x32x128/coop1/c1x1/s2/row/pdl", {"dtype": E4M3, "scales": "blocks", **RESIDUAL}),
)
THREE = (
    pytest.param(DEEP, GATED, id="swiglu of few rows, swapped"),
    pytest.param("64x16x128/coop1/c1x1/s5/row/swap/once/pdl", {"dtype": E4M3, "scales": "rows"}, id="scales of rows"),
    pytest.param("64x16x128/coop1/c1x1/s5/row/swap/once/pdl", {"dtype": E4M3, "scales": "blocks"}, id="of blocks"),
)
"""In which the ring takes all tiles of K."""


@pytest.mark.parametrize("constant", ["b", "a"])
@pytest.mark.parametrize(("config", "given"), CASES)
@pytest.mark.product(keep=1)
def test_a_kept_promise(config, given, constant, seed):
    launch = Launch(config, constant, seed, **given)
    assert launch.kernel.signature.constant == constant
    assert same(launch.run(written=launch.others()), launch.run(later=launch.others()))


def test_which_of_these_go_through_the_ring(seed):
    for config, given in CASES:
        if given in (RESIDUAL, LARGE):
            kernel = Launch(config, "b", seed, **given).kernel
            assert (kernel.config.through_ring(kernel.signature) is not None) == (kernel.config.parts == 1)


@pytest.mark.parametrize(("config", "given"), THREE)
@pytest.mark.product(keep=1)
def test_a_broken_promise_multiplies_old_values(config, given, seed):
    launch = Launch(config, "b", seed, **given)
    got = launch.run(written=launch.everything())
    assert same(got, launch.run(later=launch.others()))
    assert not same(got, launch.run(later=launch.everything()))


@pytest.mark.parametrize(("config", "given"), THREE)
@pytest.mark.product(keep=1)
def test_without_a_promise_nothing_is_read_early(config, given, seed):
    launch = Launch(config, "", seed, **given)
    assert same(launch.run(written=launch.everything()), launch.run(later=launch.everything()))


@pytest.mark.parametrize("constant", ["b", "a"])
@pytest.mark.parametrize(("config", "given"), THREE)
@pytest.mark.product(keep=1)
def test_what_was_not_promised_is_reported(config, given, constant, seed):
    launch = Launch(config, constant, seed, **given)
    with pytest.raises(
        BeforeTheWait, match=rf"a read of '{constant}' before griddepcontrol\.wait.*\n.*\n.*bulk.tensor"
    ):
        launch.run(promised=False)


@pytest.mark.parametrize("recipe", ["rows", "blocks"])
@pytest.mark.product(keep=1)
@pytest.mark.slow
def test_calls_run_by_the_emulator_know_the_promise(recipe, monkeypatch, capsys, seed):
    """A transposing copy of an operand of 8 bits, which the kernel in front makes, is not constant."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    launch = Launch("64x16x128/coop1/c1x1/s3/row/swap/pdl", "b", seed, dtype=E4M3, scales=recipe)
    tensors = launch.now
    options: dict[str, Any] = {"scale_a": tensors["scale_a"], "scale_b": tensors["scale_b"], "backend": "cute"}
    want = launch.run()[0]
    transposed = tensors["b"].contiguous()
    for b, said in ((tensors["b"], "B: its first tiles are loaded while"), (transposed, None)):
        assert torch.equal(cutegemm.gemm(tensors["a"], b, constant="b", **options), want)
        cutegemm.explain(tensors["a"], b, constant="b", **options)
        shown = capsys.readouterr().out
        assert ("constant " in shown) == (said is not None), shown
        assert said is None or said in shown
    layer = cutegemm.nn.SwiGLU(200, 48, backend="cute", dtype=BF16, constant_weights=True)
    x = torch.randn(4, 200).to(BF16)
    with torch.no_grad():
        got = layer(x)
        layer.settings = layer.settings._replace(constant_weights=False)
        assert torch.equal(got, layer(x))
