"""Sharding rules: how torch.ops.cutegemm.gemm computes with DTensors, each rank with its own part; and what DTensor
leaves to the other operators (`handle`), whose rules are in sharding_programs.py and sharding_quantize.py.

A rule says for one dimension of a device mesh how operands and result are placed. DTensor combines the rules of several
dimensions, takes the combination that moves the least, and redistributes what is placed otherwise.

    rule        a (M, K)     b (K, N)     c            bias         D
    replicate   Replicate    Replicate    Replicate    Replicate    Replicate
    rows        Shard(M)     Replicate    Shard(M)     Replicate    Shard(M)
    columns     Replicate    Shard(N)     Shard(N)     Shard(0)     Shard(N)
    batch       Shard(L)     Shard(L)     Shard(L)     Replicate    Shard(L)
    depth       Shard(K)     Shard(K)     Partial      Partial      Partial

An operand that an extent broadcasts is replicated there. In "depth" each rank has a sum over its part of K, and D is
the sum of all ranks' once it is redistributed; c and bias are terms of one of them. There is no such rule with an
activation, which is not a sum: DTensor then gathers the operands. A gradient is a product of the same kind: of
column-wise layers dA is Partial, of row-wise ones it is sharded along K.

torch.distributed.tensor takes half a second to import, and nothing here imports it before a DTensor is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cutegemm.errors import GemmError
from cutegemm.run.how import How

_MODULE = "torch.distributed.tensor"
_FIRST_OPTION = 3
"""Where in the arguments of torch.ops.cutegemm.gemm the first stands that is no tensor: alpha."""
_NO_TENSORS = [None] * (2 + len(How._fields))
"""The placements of the arguments behind the bias."""
_registered = False
_handlers: dict[str, Callable[..., Any]] = {}


def handle(name: str, function: Callable[..., Any]) -> None:
    """Has DTensor leave calls of torch.ops.cutegemm.`name` to a function of the same arguments."""
    _handlers[name] = function


_INTO = ("gemm_out", "gemm_program_out", "grouped_gemm_out", "quantize_out", "quantize_given_out", "dequantize_out")
"""The operators that write into tensors given."""


def _refuse(*arguments: Any, **options: Any) -> None:
    raise ValueError("out: got one in a call with DTensors, whose results have placements of their own; leave it away")


def _handler(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda operator, args, kwargs: function(*args, **kwargs)


def needed() -> None:
    """Registers the rules, where DTensors can exist and it has not been done. Call it when a subclass of Tensor is met.

    Raises GemmError where this version of torch has another way to register rules.
    """
    if not _registered and _MODULE in sys.modules:
        _register()


def _register() -> None:
    global _registered
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    operator = torch.ops.cutegemm.gemm.default
    register_sharding(operator)(rules)
    # DTensor remembers what the rules gave by the operands' placements and, of the other arguments, by those behind the
    # first int. This operator has none, and what beta, activation and out_dtype are decides a rule and a dtype.
    try:
        infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        infos[operator] = type(infos[operator])(_FIRST_OPTION, None, needs_pytree=True)
        handlers = DTensor._op_dispatcher._custom_op_handlers
        for name, function in (_handlers | dict.fromkeys(_INTO, _refuse)).items():
            handlers[getattr(torch.ops.cutegemm, name).default] = _handler(function)
    except (AttributeError, KeyError, TypeError) as why:
        raise GemmError(
            f"DTensor: torch {torch.__version__} registers sharding rules in a way that cutegemm does not know "
            f"({why}); versions 2.11 to 2.13 were tested"
        ) from why
    _registered = True


def rules(
    a: Any, b: Any, c: Any = None, alpha: float = 1.0, beta: float = 0.0, bias: Any = None,
    activation: str | None = None, out_dtype: Any = None, *how: Any, **more: Any,
) -> list[tuple[list[Any], list[Any]]]:  # fmt: skip
    """The rules of one call: (placements of D, placements of the arguments), one mesh dimension each.

    Args: as torch.ops.cutegemm.gemm; of a tensor its shape is read.

    Raises ValueError for a promise about an operand: DTensor may gather it just in front.
    """
    How(*how, **more).refuse_distributed()
    from torch.distributed.tensor import Partial, Replicate, Shard

    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batches = [each.shape[0] for each in (a, b) if len(each.shape) == 3]
    batch, whole = max(batches, default=1), 3 if batches else 2

    def along(tensor: Any, place: int, extent: int) -> Any:
        """Sharded along the dimension that is number `place` of D's last three, where the tensor has its extent."""
        dim = len(tensor.shape) - 3 + place
        return Shard(dim) if dim >= 0 and tensor.shape[dim] == extent else Replicate()

    def rule(d: Any, of_a: Any, of_b: Any, of_c: Any, of_bias: Any) -> tuple[list[Any], list[Any]]:
        c_and_scalars = [None if c is None else of_c, None, None]
        return [d], [of_a, of_b, *c_and_scalars, None if bias is None else of_bias, *_NO_TENSORS]

    def of_c(place: int, extent: int) -> Any:
        return None if c is None else along(c, place, extent)

    everywhere = Replicate()
    found = [rule(everywhere, everywhere, everywhere, everywhere, everywhere)]
    if m > 1:
        found.append(rule(Shard(whole - 2), along(a, 1, m), everywhere, of_c(1, m), everywhere))
    if n > 1:
        found.append(rule(Shard(whole - 1), everywhere, along(b, 2, n), of_c(2, n), Shard(0)))
    if batch > 1:
        found.append(rule(Shard(0), along(a, 0, batch), along(b, 0, batch), of_c(0, batch), everywhere))
    if k > 1 and activation is None:
        of_k = Shard(len(a.shape) - 1), Shard(len(b.shape) - 2)
        found.append(rule(Partial(), *of_k, Partial(), Partial()))
    return found
