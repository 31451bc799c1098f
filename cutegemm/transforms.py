"""`gemm` under torch.vmap and torch.func: the mapped dimension becomes the batch, and gradients nest."""

from __future__ import annotations

from typing import Any

import torch

from cutegemm import autograd

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def active(*tensors: Any) -> bool:
    """Whether one of the tensors stands for others, under vmap or a transform of torch.func."""
    return any(isinstance(tensor, torch.Tensor) and _is_wrapped(tensor) for tensor in tensors)


def apply(a: Any, b: Any, c: Any, options: dict[str, Any]) -> torch.Tensor:
    """`gemm(a, b, c, **options)` of such tensors."""
    if options["out"] is not None:
        raise ValueError(
            "out: got a tensor under vmap or torch.func, where nothing can be written into it; leave it away"
        )
    if forward_mode():
        raise ValueError("a, b: gemm has no forward-mode derivative (torch.func.jvp, jacfwd); use vjp or jacrev")
    rest = {name: value for name, value in options.items() if name not in ("out", "bias")}
    return TransformedGemm.apply(a, b, c, options["bias"], rest)


def forward_mode() -> bool:
    """Whether a transform of the forward mode is active at any level."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


class TransformedGemm(torch.autograd.Function):
    """apply(a, b, c, bias, options): D. Unlike `autograd.GemmFunction` it is known to functorch, at its price."""

    @staticmethod
    def forward(a: Any, b: Any, c: Any, bias: Any, options: dict[str, Any]) -> torch.Tensor:
        from cutegemm.gemm import gemm

        return gemm(a, b, c, bias=bias, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        a, b, c, bias, o = inputs
        settings = autograd.Settings(o["alpha"], o["beta"], o["activation"], o["precision"], o["backend"])
        autograd.save(ctx, a, b, c, bias, output, settings)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return *autograd.gradients(ctx, grad, ctx.needs_input_grad[:4]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], a: Any, b: Any, c: Any, bias: Any, options: dict[str, Any]) -> Any:
        from cutegemm.gemm import gemm

        (a, b, c, bias), beta, shape = merge(info.batch_size, (a, b, c, bias), in_dims[:4], options["beta"])
        return gemm(a, b, c, bias=bias, **{**options, "beta": beta}).view(shape), 0


def merge(size: int, tensors: tuple[Any, ...], dims: tuple[Any, ...], beta: float) -> tuple[tuple, float, tuple]:
    """One gemm for `size` of them.

    Args:
        tensors: a, b, c, bias, each with the mapped dimension that `dims` names (None: the same for all).

    Returns:
        (a, b, c, bias) and beta of the one gemm, and the shape of all results, mapped dimension first.

    Raises:
        ValueError: what `gemm` says of numbers of dimensions, which the mapped one must not hide.
    """
    mapped = [tensor is not None and dim is not None for tensor, dim in zip(tensors, dims, strict=True)]
    for name, tensor, is_mapped in zip(("a", "b"), tensors, mapped, strict=False):
        if tensor.dim() - is_mapped not in (2, 3):
            raise ValueError(
                f"{name}: got {tensor.dim() - is_mapped} dimensions, accepted are 2 (one matrix) and 3 (a batch)"
            )
    if mapped[3] and tensors[3].dim() != 2:
        raise ValueError(f"bias: got {tensors[3].dim() - 1} dimensions, expected 1, one number a column of the result")
    a, b, c, bias = (
        tensor.movedim(dim, 0) if is_mapped else tensor
        for tensor, dim, is_mapped in zip(tensors, dims, mapped, strict=True)
    )
    a_batched, b_batched = a.dim() - mapped[0] == 3, b.dim() - mapped[1] == 3
    if not mapped[0] and not mapped[1]:
        a, mapped[0] = a.expand(size, *a.shape), True
    m, n = a.shape[-2], b.shape[-1]
    shape: tuple[int, ...] = (size, m, n)
    if a_batched or b_batched:
        batch = b.shape[-3] if b_batched and (not a_batched or a.shape[-3] == 1) else a.shape[-3]
        shape = (size, batch, m, n)
        a = a if a_batched else a.unsqueeze(-3)
        b = b if b_batched else b.unsqueeze(-3)
        a, b = (t.expand(size, batch, *t.shape[-2:]).flatten(0, 1) for t in (a, b))

    def spread(tensor: Any, is_mapped: bool) -> Any:
        """One value for every element of the one gemm's result."""
        if is_mapped:
            ones = (1,) * (len(shape) - tensor.dim())
            tensor = tensor.reshape(size, *ones, *tensor.shape[1:])
        tensor = tensor.expand(shape)
        return tensor.flatten(0, 1) if len(shape) == 4 else tensor

    if mapped[3]:
        # A kernel takes one bias for all matrices: this one becomes a C.
        rows = spread(bias.unsqueeze(1), True)
        if c is not None and beta != 0:
            rows = rows.float() + beta * spread(c, mapped[2]).float()
        return (a, b, rows, None), 1.0, shape
    if c is not None:
        c = spread(c, mapped[2])
    return (a, b, c, bias), beta, shape
