"""Backend "torch": D by torch's own operators, for what no kernel serves and for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cutegemm.backend import OnTensors
from cutegemm.errors import UnsupportedError
from cutegemm.problem import reference, torch_dtype
from cutegemm.problem.program.evaluate import evaluate
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
        if problem.precision == "ieee":
            return None
        able = "'cute' or 'cutlass2x'" if problem.precision in ("tf32", "tf32x3") else "'cute'"
        return f"backend 'torch' follows torch's own TF32 switch; precision={problem.precision!r} needs backend {able}"

    def runner(self, asked: Request) -> Callable[..., torch.Tensor]:
        """D by torch's own operators, in fp32 unless torch.matmul alone is the whole answer."""
        problem = asked.problem
        dtype, epilogue = torch_dtype(problem.out_dtype), problem.epilogue
        on_cuda = asked.device.type == "cuda"
        plain = epilogue == type(epilogue)() and problem.dtype == problem.out_dtype and on_cuda

        def run(a: Any, b: Any, c: Any, alpha: float, beta: float, bias: Any, out: Any) -> torch.Tensor:
            _check_tf32(a)
            # torch.matmul picks its way, and with it the rounding, by what requires grad.
            a, b = a.detach(), b.detach()
            if plain and alpha == 1:
                d = torch.matmul(a, b)
            else:
                z = torch.matmul(a.float(), b.float()) * alpha
                if epilogue.c_dtype is not None:
                    z = z + beta * c.float()
                if bias is not None:
                    z = z + bias.float()
                d = reference.activate(z, epilogue.activation).to(dtype)
            return d if out is None else out.copy_(d)

        return run

    def program_core(self, asked: ProgramRequest) -> Callable[..., None]:
        """The product and the program's values in fp32, each result rounded once."""
        program = asked.program

        def core(a: Any, b: Any, operands: Sequence[Any], outs: tuple[torch.Tensor, ...]) -> None:
            _check_tf32(a)
            acc = torch.matmul(a.detach().float(), b.detach().float())
            operands = [each.detach() if isinstance(each, torch.Tensor) else each for each in operands]
            for out, value in zip(outs, evaluate(program, acc, operands, dtype=torch.float32), strict=True):
                out.copy_(value)

        return core


def _check_tf32(a: torch.Tensor) -> None:
    """Raises UnsupportedError where torch would multiply these operands in TF32."""
    if a.is_cuda and a.dtype == torch.float32 and _tf32_is_on():
        raise UnsupportedError(
            "backend 'torch': torch's TF32 switch for matmul is on, so it would not compute in IEEE fp32; "
            "switch it off or use backend 'cute'"
        )


def _tf32_is_on() -> bool:
    """Whether torch.matmul may use TF32. Once the newer switch was set, reading the older one raises."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer == "none":
        newer = getattr(torch.backends, "fp32_precision", "none")
    return newer == "tf32" if newer is not None else torch.backends.cuda.matmul.allow_tf32


BACKEND = TorchBackend()
