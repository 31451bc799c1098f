"""A compiled kernel, a problem and its tensors: run in the emulator and compared with the float64 reference.

The command line, the mutation tests and the emulated tests all go through here; nothing below depends on a backend
beyond the `cutegemm.backend.Kernel` protocol.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cutegemm.backend import Kernel
from cutegemm.emulator.bridge import emulate
from cutegemm.problem import Matrix, Problem, torch_dtype
from cutegemm.problem.reference import Expected, Verdict, check, expected
from cutegemm.run.arguments import Operands, Scalars

if TYPE_CHECKING:
    from cutegemm.emulator import Checks, Report
    from cutegemm.emulator.launch import Captured


@dataclass
class Workload:
    """A problem with operands drawn from a seed, bound to a kernel.

    ``tensors`` are the operands as the kernel sees them, (batch, rows, columns): a, b, d, and c, bias, scale_a and
    scale_b where the kernel reads them. ``operations`` are the launches that the kernel's own host code asks for on
    them, with their workspaces and what the backend wants checked.
    """

    problem: Problem
    kernel: Kernel
    tensors: dict[str, torch.Tensor]
    alpha: float
    beta: float
    want: Expected
    operations: Captured

    @classmethod
    def of(
        cls, problem: Problem, kernel: Kernel, *, seed: int = 0, alpha: float = 1.0, beta: float | None = None
    ) -> Workload:
        """Draws normal operands with ``seed`` (int8: times 40), computes what must come out, and captures the launches.

        beta: 0.5 when the epilogue reads C, else 0. Raises CaptureError when the host code refuses the problem.
        """
        generator = torch.Generator().manual_seed(seed)
        epilogue = problem.epilogue
        beta = (0.5 if epilogue.c_dtype else 0.0) if beta is None else beta
        tensors = {
            "a": _tensor(problem.a, problem.batch, problem.dtype, generator),
            "b": _tensor(problem.b, problem.batch, problem.dtype, generator),
            "d": _tensor(problem.d, problem.batch, problem.out_dtype, None),
        }
        if problem.c is not None and epilogue.c_dtype:
            tensors["c"] = _tensor(problem.c, problem.batch, epilogue.c_dtype, generator)
        bias = None
        if epilogue.bias_dtype:
            length = problem.n if epilogue.bias_axis == "n" else problem.m
            tensors["bias"] = torch.randn(length, generator=generator).to(torch_dtype(epilogue.bias_dtype))
            bias = tensors["bias"] if epilogue.bias_axis == "n" else tensors["bias"][:, None]
        scales = {  # of blocks of K, all the operands of a program here
            f"scale_{name}": _tensor(lies, problem.batch if given.batched else 1, given.dtype, generator).exp()
            for (name, given), lies in zip(epilogue.program.block_scales.items(), problem.operands, strict=False)
        }
        want = expected(
            tensors["a"],
            tensors["b"],
            tensors.get("c"),
            alpha=alpha,
            beta=beta,
            bias=bias,
            activation=epilogue.activation,
            out_dtype=torch_dtype(problem.out_dtype),
            precision=problem.precision,
            **scales,
        )
        addresses = [tensors[name].data_ptr() if name in tensors else 0 for name in Operands._fields]
        addresses += [scale.data_ptr() for scale in scales.values()]
        tensors |= scales
        operations = kernel.capture(problem, tuple(addresses), Scalars(alpha, beta))
        return cls(problem, kernel, tensors, alpha, beta, want, operations)

    def run(
        self,
        *,
        seed: int = 0,
        ptx: str | None = None,
        checks: Checks | None = None,
        profile: bool = False,
        progress: bool | None = None,
    ) -> tuple[Verdict, list[Report]]:
        """Emulates the launches on an output full of NaN, or of an integer's least number, and compares.

        A kernel finds its workspaces as its own launch before left them, never as that of another text did.

        ptx: run this text in the kernel's place. checks: by default those that the backend asks for.

        Raises EmulationError when the kernel does something wrong.
        """
        d = self.tensors["d"]
        d.fill_(float("nan") if d.is_floating_point() else torch.iinfo(d.dtype).min)
        text = self.kernel.ptx if ptx is None else ptx
        self.operations.starts(text)
        reports = emulate(
            text,
            self.operations,
            {**self.tensors, **self.operations.scratch},
            outputs={"d", *self.operations.scratch},
            seed=seed,
            checks=self.operations.checks if checks is None else checks,
            profile=profile,
            progress=progress,
            flops=self.problem.flops,
        )
        return check(self.tensors["d"], self.want), reports


def _tensor(matrix: Matrix, batch: int, dtype: str, generator: torch.Generator | None) -> torch.Tensor:
    shape = (batch, matrix.rows, matrix.cols)
    strides = (matrix.stride_batch, matrix.stride_row, matrix.stride_col)
    out = torch.empty_strided(shape, strides, dtype=torch_dtype(dtype))
    if generator is not None and out.numel():
        # Through a view with every dimension once, so that a broadcast batch is drawn once too.
        base = out[:1] if matrix.stride_batch == 0 else out
        drawn = torch.randn(base.shape, generator=generator)
        base.copy_(drawn if out.is_floating_point() else (40 * drawn).round().clamp(-127, 127))
    return out


def build(backend: str, problem: Problem, arch: Any, config: str | None = None) -> Kernel:
    """The kernel of a backend for a problem: the configuration asked for, or the backend's default.

    Raises ValueError for an unknown backend or configuration, UnsupportedError when it cannot serve the problem.
    """
    from cutegemm import backend as backends
    from cutegemm.choice import plan

    choice = plan.choose(problem, arch, backend, config)
    return backends.get(choice.backend).build(problem.signature, choice.config, arch)


def parse_shape(text: str) -> tuple[int, int, int]:
    """``MxNxK`` as three integers; one number means a cube. Raises ValueError for anything else."""
    parts = text.lower().split("x")
    if len(parts) not in (1, 3) or not all(part.isdigit() for part in parts):
        raise ValueError(f"shape: got {text!r}; accepted is MxNxK, or one number for all three")
    numbers = [int(part) for part in itertools.islice(itertools.cycle(parts), 3)]
    return numbers[0], numbers[1], numbers[2]
