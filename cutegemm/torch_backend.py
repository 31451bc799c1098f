"""Backend "torch": D by torch's own operators, for what no kernel serves and for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cutegemm.backend import OnTensors
from cutegemm.errors import UnsupportedError
from cutegemm.problem import reference, rounding, scales
from cutegemm.problem.dtypes import TERMS, dtype_name
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.work import DENSE
from cutegemm.problem.work import TABLE as WORKS

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem
    from cutegemm.problem.program_request import ProgramRequest
    from cutegemm.problem.request import Request


class TorchBackend(OnTensors):
    """See `cutegemm.backend`."""

    name = "torch"
    compiler = "torch"
    programs = True
    works = tuple(WORKS)

    def supports(self, problem: Problem, arch: Arch | None = None) -> str | None:
        if refused := self.why_work_refused(problem.signature):
            return refused
        if problem.precision in ("ieee", "fast"):  # sums in fp32 are at least as good as fp8's fast ones
            return None
        if problem.work != DENSE and problem.precision != "tf32":
            return f"precision={problem.precision!r} is for dense products; products in groups accept 'ieee' and 'tf32'"
        twice = problem.work == DENSE and problem.precision in ("tf32", "tf32x3")
        able = "'cute' or 'cutlass2x'" if twice else "'cute'"
        return f"backend 'torch' follows torch's own TF32 switch; precision={problem.precision!r} needs backend {able}"

    def runner(self, asked: Request) -> Callable[..., torch.Tensor]:
        """D by torch's own operators, in fp32 (fp64 of fp64 operands) unless torch.matmul alone is the whole answer."""
        problem = asked.problem
        epilogue = problem.epilogue
        on_cuda = asked.device.type == "cuda"
        wide = torch.float64 if problem.dtype == "fp64" else torch.float32
        plain = epilogue == type(epilogue)() and problem.dtype == problem.out_dtype and on_cuda
        plain = plain and problem.dtype in TERMS

        def run(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, out: Any) -> torch.Tensor:
            check_tf32(a)
            # torch.matmul picks its way, and with it the rounding, by what requires grad.
            a, b = a.detach(), b.detach()
            if plain and alpha == 1:
                d = multiplied(a, b)
            else:
                acc = product(a, b)
                if problem.out_dtype == "int32":
                    d = wrapped(acc)
                    return d if out is None else out.copy_(d)
                z = acc.to(wide) * alpha
                if epilogue.c_dtype is not None:
                    z = z + beta * c.to(wide)
                if bias is not None:
                    z = z + bias.to(wide)
                d = rounding.rounded(reference.activate(z, epilogue.activation), problem.out_dtype)
            return d if out is None else out.copy_(d)

        return run

    def program_core(self, asked: ProgramRequest) -> Callable[..., None]:
        """The product and the program's values in fp32, each result rounded once."""
        program = asked.program
        numbers = {f"scale_{given.scales[0]}": i for i, given in enumerate(program.inputs) if given.scales}

        def core(a: Any, b: Any, operands: Sequence[Any], outs: tuple[torch.Tensor, ...]) -> None:
            check_tf32(a)
            operands = [each.detach() if isinstance(each, torch.Tensor) else each for each in operands]
            of_blocks = {name: operands[number] for name, number in numbers.items()}
            acc = product(a.detach(), b.detach(), **of_blocks).float()
            for out, value in zip(outs, evaluate(program, acc, operands, dtype=torch.float32), strict=True):
                out.copy_(value if out.dtype.itemsize > 1 else rounding.rounded(value, str(dtype_name(out.dtype))))

        return core


def product(a: torch.Tensor, b: torch.Tensor, scale_a: Any = None, scale_b: Any = None) -> torch.Tensor:
    """a @ b in fp32; in float64 of float64, and of int8, whose sums it holds exactly. Scales: of blocks of K."""
    a, b = (scales.unscaled(x, scale, rows) for x, scale, rows in ((a, scale_a, True), (b, scale_b, False)))
    wide = torch.float64 if a.dtype == b.dtype and a.dtype in (torch.int8, torch.float64) else torch.float32
    return multiplied(a.to(wide), b.to(wide))


def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.matmul of these dtypes: what autocast casts is cast by now, and neither `out` nor scales let it.

    On the CPU fp32 is multiplied in float64 where torch was told to round it (`torch.set_float32_matmul_precision`).
    """
    with torch._C._DisableAutocast():
        if a.device.type == "cpu" and a.dtype == torch.float32 and cpu_rounds():
            return torch.matmul(a.double(), b.double()).float()
        return torch.matmul(a, b)


def wrapped(sums: torch.Tensor) -> torch.Tensor:
    """Whole numbers as int32; where they do not fit, what there is is not defined."""
    return sums.to(torch.int64).to(torch.int32)


def check_tf32(a: torch.Tensor) -> None:
    """Raises UnsupportedError where torch would multiply these operands in TF32."""
    if a.is_cuda and a.dtype == torch.float32 and _tf32_is_on():
        raise UnsupportedError(
            "backend 'torch': torch's TF32 switch for matmul is on, so it would not compute in IEEE fp32; "
            "switch it off or use backend 'cute'"
        )


def cpu_rounds() -> bool:
    """Whether oneDNN may round the fp32 operands of torch.matmul, to bf16 or TF32."""
    return torch.backends.mkldnn.matmul.fp32_precision not in ("none", "ieee")


def _tf32_is_on() -> bool:
    """Whether torch.matmul may use TF32. Once the newer switch was set, reading the older one raises."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer == "none":
        newer = getattr(torch.backends, "fp32_precision", "none")
    return newer == "tf32" if newer is not None else torch.backends.cuda.matmul.allow_tf32


BACKEND = TorchBackend()
