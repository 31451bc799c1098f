"""cutegemm: GEMM kernels for NVIDIA GPUs, D = act(alpha * A @ B + beta * C + bias).

>>> import torch, cutegemm
>>> a, b = torch.randn(96, 64), torch.randn(64, 80)
>>> cutegemm.gemm(a, b).shape
torch.Size([96, 80])

Importing the package touches no GPU and starts no thread; the compilers are imported when a kernel is first
needed.
"""

from cutegemm import moe_operator as torch_moe_op
from cutegemm import nn, ops
from cutegemm.errors import EpilogueError, GemmError, UnsupportedError
from cutegemm.gemm import explain, gemm, prepare, trace_epilogue
from cutegemm.grouped import grouped_gemm
from cutegemm.linear import linear
from cutegemm.memory import clear_workspaces
from cutegemm.moe import moe
from cutegemm.problem import Problem
from cutegemm.problem.program.graph import Program
from cutegemm.pytorch import operator as torch_op
from cutegemm.pytorch import program_operator as torch_program_op
from cutegemm.pytorch import quantize_operator as torch_quantize_op
from cutegemm.pytorch import scaled_operator as torch_scaled_op
from cutegemm.quantize import dequantize, quantize
from cutegemm.run.float32 import float32_precision, get_float32_precision, set_float32_precision
from cutegemm.scaled_mm import scaled_mm
from cutegemm.tune import tune

__version__ = "0.1.0"
__all__ = [
    "EpilogueError",
    "GemmError",
    "Problem",
    "Program",
    "UnsupportedError",
    "__version__",
    "clear_workspaces",
    "dequantize",
    "explain",
    "float32_precision",
    "gemm",
    "get_float32_precision",
    "grouped_gemm",
    "linear",
    "moe",
    "nn",
    "ops",
    "prepare",
    "quantize",
    "scaled_mm",
    "set_float32_precision",
    "trace_epilogue",
    "tune",
]

del (
    torch_moe_op,
    torch_op,
    torch_program_op,
    torch_quantize_op,
    torch_scaled_op,
)  # imported for the operators that they define
