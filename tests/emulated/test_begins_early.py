"""Kernels without TMA that begin before the kernel in front has ended: what they read, and which launches do it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutegemm import backend as backends
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.errors import BeforeTheWait
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem, torch_dtype
from cutegemm.run.arguments import Operands, Scalars

pytest.importorskip("llvmlite")

H200, A100 = arch_table.get("H200"), arch_table.get("A100")
CUTE = backends.get("cute")
KERNELS = [
    ("sm80/32x32x32/w16x16/s3/g8", "bf16", "tn"),
    ("sm80/32x32x32/w16x16/s3/g8/k2", "bf16", "nt"),
    ("simt/64x32x16/w32x32/s2/g8/r7", "fp32", "tt"),  # a thin B, through L1
    ("simt/64x64x8/w32x32/s3/g8/r4", "fp32", "tn"),  # both through registers
    ("simt/32x32x32/w16x32/s3/g8/x2", "fp32", "nn"),
    ("simt/16x32x32/w16x32/s4/g8/x4/k3", "fp32", "tn"),
    ("vector/8x32x128/w8x4/s2/g1", "fp32", "tn"),
    ("vector/8x128x4/w8x128/s3/g1/x4/k2", "fp32", "tt"),
    ("dmma/32x32x16/w16x16/s3/g8/i8x4", "fp64", "tn"),
]


class Launch:
    """A launch of small integers, whose results are exact, behind a kernel that still writes its operands."""

    def __init__(self, config: str, dtype: str, majors: str, seed: int) -> None:
        m = 8 if config.startswith("vector") else 72
        self.problem = Problem.of(m, 24, 104, dtype, majors=majors)
        self.config, self.seed = CUTE.parse(config), seed
        self.kernel = CUTE.build(self.problem.signature, self.config, H200)
        generator = torch.Generator().manual_seed(seed)
        shapes = {"a": (m, 104) if majors[0] == "t" else (104, m), "b": (104, 24) if majors[1] == "t" else (24, 104)}
        self.now, self.later = (
            {
                name: torch.randint(-2, 3, shape, generator=generator).to(torch_dtype(dtype))
                for name, shape in shapes.items()
            }
            for _ in range(2)
        )
        self.majors = majors

    def run(self) -> torch.Tensor:
        tensors = {name: tensor.clone() for name, tensor in self.now.items()}
        d = torch.full((self.problem.m, self.problem.n), torch.nan, dtype=torch_dtype(self.problem.out_dtype))
        operands = Operands(tensors["a"].data_ptr(), tensors["b"].data_ptr(), 0, 0, d.data_ptr())
        launches = self.kernel.capture(self.problem, operands, Scalars())

        def end() -> None:
            for name, tensor in tensors.items():
                tensor.copy_(self.later[name])

        named = {**tensors, "d": d, **launches.scratch}
        emulate(self.kernel.ptx, launches, named, outputs={"d", *launches.scratch}, seed=self.seed, in_front=end)
        return d

    def want(self) -> torch.Tensor:
        a, b = (self.later[name].double() for name in ("a", "b"))
        product = (a if self.majors[0] == "t" else a.mT) @ (b if self.majors[1] == "t" else b.mT)
        return product.to(torch_dtype(self.problem.out_dtype))


@pytest.mark.parametrize(("config", "dtype", "majors"), KERNELS)
@pytest.mark.product(keep=1)
def test_nothing_is_read_before_the_kernel_in_front_has_ended(config, dtype, majors, seed):
    launch = Launch(config, dtype, majors, seed)
    assert launch.config.begins_early(launch.problem, H200)
    assert torch.equal(launch.run(), launch.want())


@pytest.mark.parametrize(("config", "dtype", "majors"), KERNELS[::3])
@pytest.mark.product(keep=1)
def test_a_kernel_that_does_not_wait_is_reported(config, dtype, majors, seed):
    launch = Launch(config, dtype, majors, seed)
    text = launch.kernel.ptx
    assert text.count("griddepcontrol.wait;") == text.count("griddepcontrol.launch_dependents;") == 1
    launch.kernel.__dict__["ptx"] = text.replace("griddepcontrol.wait;", "")
    with pytest.raises(BeforeTheWait, match=r"before griddepcontrol\.wait"):
        launch.run()


@pytest.mark.parametrize(("config", "dtype", "majors"), KERNELS[::2])
@pytest.mark.product(keep=1)
def test_ampere_has_no_such_launches(config, dtype, majors):
    problem = Problem.of(64, 24, 104, dtype, majors=majors)
    parsed = CUTE.parse(config)
    assert not parsed.begins_early(problem, A100)
    assert "griddepcontrol" not in CUTE.build(problem.signature, parsed, A100).ptx


def test_only_launches_that_fill_at_most_half_of_the_gpu_begin_early():
    config = CUTE.parse("simt/64x64x8/w32x32/s3/g8/r4")
    signature = Problem.of(64, 64, 64, "fp32").signature
    half = config.on_an_sm(signature, H200) * H200.sm_count // 2
    assert CUTE.footprint(config, signature, H200).ctas == config.on_an_sm(signature, H200) == 4
    for tiles, splits, early in (
        (half, 1, True),
        (half + 1, 1, False),
        (half // 2, 2, True),
        (half // 2 + 1, 2, False),
    ):
        split = replace(config, splits=splits)
        problem = Problem.of(64 * tiles, 64, 4096, "fp32")
        assert split.launch_arguments(problem, H200) == {"early": int(early)}
        assert split.begins_early(Problem.of(64, 64, 4096, "fp32", batch=tiles), H200) is early
