"""What an epilogue is written with: functions of fp32 values, indices, casts, gating, reductions, and ready programs.

An epilogue is a Python function of `acc`, the fp32 accumulators of a product, and of its operands. It is written for
one element of D and called once, with symbolic values; every kernel then computes what it returns:

    y = cutegemm.gemm(x, w, epilogue=lambda acc, bias, res: ops.gelu(acc + bias) + res, operands=(bias, residual))
    h = cutegemm.gemm(x, w_gate_up, epilogue=ops.swiglu)

Functions of numbers also take a torch.Tensor and compute on it in its dtype, so that an epilogue can be tried on
tensors; those that need an element's place in D raise EpilogueError there. All raise EpilogueError, a TypeError that
names the line of the epilogue, for what they do not take.
"""

from __future__ import annotations

from cutegemm.ops import elements, places, ready
from cutegemm.ops.elements import *  # noqa: F403
from cutegemm.ops.places import *  # noqa: F403
from cutegemm.ops.ready import *  # noqa: F403

__all__ = [*elements.__all__, *places.__all__, *ready.__all__]
