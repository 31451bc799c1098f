"""Kernels that quantize begin before the kernel in front has ended: what they read, and which launches do it."""

from __future__ import annotations

import pytest
import torch

import cutegemm
from cutegemm.cute.quantize.config import Tile
from cutegemm.cute.standalone import begins_early
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.errors import BeforeTheWait
from cutegemm.hardware import arch as arch_table
from cutegemm.problem.quantization import NAMED, Group
from cutegemm.run import quantize_kernels

pytest.importorskip("llvmlite")

FP8 = torch.float8_e4m3fn
RECIPES = ("tensor", "rows", "blocks")


class Call:
    """A call whose x the kernel in front still writes, and what it should give."""

    def __init__(self, scaling: str, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x, self.later = (torch.randn(40, 640, generator=draw).bfloat16() for _ in range(2))
        self.values, self.scales = cutegemm.quantize(self.later, FP8, scaling=scaling, backend="torch")
        self.want = self.values.view(torch.uint8).clone(), self.scales.clone()
        group = {"tensor": Group(0, 0), "rows": Group(1, 0), "blocks": Group(1, 128)}[scaling]
        self.plan = quantize_kernels.quantized(self.x, self.values, self.scales, NAMED["e4m3"], group)

    def run(self, seed: int, ptx=lambda text: text) -> None:
        found = torch.zeros(max(self.plan.maxima, 1))
        self.values.view(torch.uint8).fill_(255)
        tensors = {"x": self.x, "v": self.values, "s": self.scales.fill_(torch.nan), "p": found}
        front = lambda: self.x.copy_(self.later)  # noqa: E731
        for kernel, numbers in self.plan.steps:
            launches = kernel.captured(*(each.data_ptr() for each in tensors.values()), 0, *numbers)
            emulate(ptx(kernel.ptx), launches, tensors, outputs={"v", "s", "p"}, seed=seed, in_front=front)


@pytest.mark.parametrize("scaling", RECIPES)
@pytest.mark.product(keep=2)
def test_nothing_is_read_before_the_kernel_in_front_has_ended(scaling, seed):
    call = Call(scaling, seed)
    assert len(call.plan.steps) == (2 if scaling == "tensor" else 1)
    assert all(step.numbers[-1] == 1 for step in call.plan.steps)
    call.run(seed)
    assert torch.equal(call.values.view(torch.uint8), call.want[0])
    assert torch.equal(call.scales, call.want[1])


@pytest.mark.parametrize("scaling", RECIPES)
def test_a_kernel_that_does_not_wait_is_reported(scaling, seed):
    with pytest.raises(BeforeTheWait, match=r"before griddepcontrol\.wait"):
        Call(scaling, seed).run(seed, lambda text: text.replace("griddepcontrol.wait;", ""))


def test_ampere_has_no_such_launches(monkeypatch):
    monkeypatch.setenv("CUTEGEMM_ARCH", "sm_89")
    for step in Call("rows", 1).plan.steps:
        assert step.numbers[-1] == 0
        assert "griddepcontrol" not in step.kernel.ptx


def test_only_launches_that_fill_at_most_half_of_the_gpu_begin_early():
    h200, tile = arch_table.get("H200"), Tile(1, 256, 1, 1, 8)
    assert begins_early(4 * h200.sm_count, tile.threads, h200)
    assert not begins_early(4 * h200.sm_count + 1, tile.threads, h200)
    assert not begins_early(1, tile.threads, arch_table.get("A100"))
