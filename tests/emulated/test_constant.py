"""Constant operands in the emulator: a kernel in front that still runs, promises that hold, break, and are not made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutegemm import backend as backends
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.errors import BeforeTheWait
from cutegemm.emulator.workload import Workload
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem, scaling
from cutegemm.problem.epilogue import Epilogue
from cutegemm.run.arguments import Operands, Scalars
from tests import exact

pytest.importorskip("llvmlite")

ARCH = replace(arch_table.get("sm_90a"), sm_count=4)
PLAIN = "64x32x64/coop1/c1x1/s3/row/pdl"
CONFIGS = (
    PLAIN,  # several tiles a CTA
    "64x32x64/coop1/c1x1/s12/row/swap/once/pdl",  # a ring deeper than K
    "64x32x64/pp/c1x1/s3/serp2/zig/pdl",
    "64x32x64/coop1/c2x2/s2/row/pdl",  # both operands by multicast
    "64x32x64/coop1/c2x1/s3/row/k3/pdl",
    "64x32x64/coop1/c1x2x2/s2/row/swap/pdl",
    "64x32x64/coop1/c1x1/s2/row/streamk/pdl",
    "64x32x64/coop1/c1x1/s3/row/skew/pdl",
)


class Launch:
    """A launch of integers, whose results are exact, behind a kernel that still writes some of its operands."""

    def __init__(self, config: str, constant: str, seed: int, shape=(136, 72, 328), batch: int = 1) -> None:
        m, n, k = shape
        self.problem = Problem.of(m, n, k, "bf16", batch=batch, out_dtype="fp32", epilogue=Epilogue("fp32", "fp32"))
        signature = replace(self.problem.signature, constant=constant)
        backend = backends.get("cute")
        self.kernel = backend.build(signature, backend.parse(f"sm90/{config}"), ARCH)
        generator = torch.Generator().manual_seed(seed)
        self.now, self.later = (
            {
                "a": self._draw(generator, (batch, m, k), torch.bfloat16, k),
                "b": self._draw(generator, (batch, n, k), torch.bfloat16, k),
                "c": self._draw(generator, (batch, m, n), torch.float32, k),
                "bias": self._draw(generator, (n,), torch.float32, k),
            }
            for _ in range(2)
        )
        self.seed = seed

    @staticmethod
    def _draw(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, k: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        exact.fill(tensor, exact.largest_operand(k, "bf16"), generator)
        return tensor

    def run(self, written: str = "", promised: bool = True) -> torch.Tensor:
        """D, where the kernel in front still writes the operands named. promised: the emulator knows the promise."""
        tensors = {name: tensor.clone() for name, tensor in self.now.items()}
        d = torch.full((self.problem.batch, self.problem.m, self.problem.n), torch.nan)
        operands = Operands(*(tensors[name].data_ptr() for name in Operands._fields[:4]), d.data_ptr())
        launches = self.kernel.capture(self.problem, operands, Scalars(beta=1.0))
        if not promised:
            launches.constant = ()

        def end() -> None:
            for name in written.split():
                tensors[name].copy_(self.later[name])

        named = {**tensors, "d": d, **launches.scratch}
        emulate(self.kernel.ptx, launches, named, outputs={"d", *launches.scratch}, seed=self.seed, in_front=end)
        return d

    def want(self, later: str = "") -> torch.Tensor:
        """D of the operands as they are, those named as the kernel in front leaves them."""
        a, b, c, bias = ((self.later if name in later.split() else self.now)[name] for name in ("a", "b", "c", "bias"))
        return (a.double() @ b.double().mT + c.double() + bias.double()).float()


@pytest.mark.parametrize("constant", ["b", "a"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.product(keep=1)
def test_a_kept_promise(config, constant, seed):
    """Whatever else the kernel in front writes, and whenever loads land: the result is that of what it leaves."""
    launch, others = Launch(config, constant, seed), {"a": "b c bias", "b": "a c bias"}[constant]
    assert torch.equal(launch.run(written=others), launch.want(later=others))


def test_batches_and_no_k_at_all(seed):
    launch = Launch(PLAIN, "b", seed, shape=(72, 40, 136), batch=3)
    assert torch.equal(launch.run(written="a c"), launch.want(later="a c"))
    launch = Launch(PLAIN, "b", seed, shape=(72, 40, 0))
    launch.now["a"] = launch.now["b"] = torch.zeros(16)  # an address, of which nothing is read
    assert torch.equal(launch.run(written="c bias"), (launch.later["c"] + launch.later["bias"]))


def test_a_broken_promise_multiplies_old_values(seed):
    """The first tiles of B, here all of them, are those of the time before the kernel in front ended."""
    launch = Launch("64x32x64/coop1/c1x1/s12/row/once/pdl", "b", seed)
    assert torch.equal(launch.run(written="a b"), launch.want(later="a"))


@pytest.mark.parametrize("config", [PLAIN, "64x32x64/coop1/c2x1/s3/row/k3/pdl"])
@pytest.mark.product(keep=1)
def test_without_a_promise_nothing_is_read_early(config, seed):
    launch = Launch(config, "", seed)
    assert torch.equal(launch.run(written="a b c bias"), launch.want(later="a b c bias"))


def test_what_was_not_promised_is_reported(seed):
    launch = Launch(PLAIN, "b", seed)
    with pytest.raises(BeforeTheWait, match=r"a read of 'b' before griddepcontrol\.wait.*\n.*\n.*cp.async.bulk.tensor"):
        launch.run(promised=False)


def test_a_kernel_that_does_not_wait_is_reported(seed):
    """As when somebody forgets the wait, or moves it behind a load."""
    launch = Launch(PLAIN, "", seed)
    text = launch.kernel.ptx
    assert text.count("griddepcontrol.wait;") == 1
    launch.kernel.__dict__["ptx"] = text.replace("griddepcontrol.wait;", "")
    with pytest.raises(BeforeTheWait, match=r"before griddepcontrol\.wait"):
        launch.run()


def test_a_sweep_emulates_with_the_promise(seed):
    """`--constant b --emulate` took each early load for an error."""
    of_blocks = Epilogue(custom=scaling.of_blocks("e4m3", "bf16"))
    backend = backends.get("cute")
    for problem, config in (
        (Problem.of(64, 32, 200, constant="b"), PLAIN),
        (Problem.of(64, 32, 208, "e4m3", epilogue=of_blocks, constant="b"), PLAIN.replace("x64/", "x128/")),
    ):
        kernel = backend.build(problem.signature, backend.parse(f"sm90/{config}"), ARCH)
        verdict, _ = Workload.of(problem, kernel, seed=seed).run(seed=seed)
        assert verdict, verdict.message
