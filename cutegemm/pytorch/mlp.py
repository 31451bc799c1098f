"""The gated MLP, D = (act(X G^T) * (X U^T)) W^T, with both gates' work in the epilogues of its products.

Forward: H = gated(X [G; U]^T) in one kernel, D = H W^T. Where gradients are recorded the first kernel also stores what
act(gate) * up was made of, in X's dtype. Backward: dH = dD W is never stored, because the epilogue of that product
applies the derivative of the gating and gives [dgate, dup], next to each other in one buffer. With it dX = [dgate, dup]
[G; U] and d[G; U] = [dgate, dup]^T X are one product each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cutegemm import native, ops
from cutegemm.problem import request
from cutegemm.problem.dtypes import dtype_name
from cutegemm.problem.program.derive import Source
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.known import lookup
from cutegemm.pytorch import autograd, programs, sharded, transforms
from cutegemm.pytorch.autocast import cast_operands
from cutegemm.pytorch.dispatch import is_beyond_autograd
from cutegemm.pytorch.program_gradients import needed, recording
from cutegemm.run import float32
from cutegemm.run.how import How, refuse_promise

GATES = {"silu": ops.swiglu, "gelu": ops.geglu, "gelu_tanh": ops.geglu_tanh, "relu": ops.reglu}
"""Activation -> the epilogue on [gate; up]."""


def check_activation(activation: Any) -> None:
    """Raises ValueError unless it is one of `GATES`."""
    if not (isinstance(activation, str) and activation in GATES):
        raise ValueError(f"activation: got {request.shown(activation)}, accepted are {', '.join(map(repr, GATES))}")


def check_weights(gate: Any, up: Any, down: Any) -> None:
    """Raises TypeError unless they are tensors, ValueError unless they have the shapes of one MLP."""
    for name, each in (("gate", gate), ("up", up), ("down", down)):
        request.check_type(name, each)
        if each.is_nested or each.layout != torch.strided:
            raise TypeError(f"{name}: got a nested tensor, or layout {each.layout}; expected a dense (strided) one")
    if gate.dim() != 2 or gate.shape != up.shape or down.dim() != 2 or down.shape[1] != gate.shape[0]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (gate, up, down))
        raise ValueError(f"gate, up, down: got shapes {shapes}, expected (hidden, in), (hidden, in), (out, hidden)")
    for name, each in (("up", up), ("down", down)):
        request.check_device(name, each, gate.device, "gate")


def stack_weights(own: torch.Tensor, state: dict[str, Any], prefix: str) -> None:
    """Makes the entries of a `SwiGLU` of the three weights that Hugging Face's models have. own: its gate_up_weight."""
    gate, up, down = (f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down"))
    if all(isinstance(state.get(name), torch.Tensor) for name in (gate, up)):
        shapes = tuple(state[gate].shape), tuple(state[up].shape)
        if shapes[0] != shapes[1]:  # which, stacked, could fit
            raise ValueError(f"state_dict: got {gate} of shape {shapes[0]} and {up} of shape {shapes[1]}, expected one")
        kinds = [f"{each.dtype}, {each.layout} on {each.device}" for each in (state[gate], state[up])]
        if kinds[0] != kinds[1]:
            raise TypeError(f"state_dict: got {gate} of {kinds[0]} and {up} of {kinds[1]}, expected them alike")
        check_one([name for name in (f"{prefix}gate_up_weight", gate) if name in state])
        state[f"{prefix}gate_up_weight"] = torch.cat((state.pop(gate), state.pop(up)))
    check_one([name for name in (f"{prefix}down_weight", down) if name in state])
    if down in state:
        state[f"{prefix}down_weight"] = state.pop(down)
    reshape_weight(state, f"{prefix}gate_up_weight", own)


def check_one(keys: list[str]) -> None:
    """Raises ValueError where a state has several tensors that say one thing, of which one would be dropped."""
    if len(keys) > 1:
        raise ValueError(f"state_dict: got {' and '.join(keys)}, expected one of them")


def reshape_weight(state: dict[str, Any], name: str, own: torch.Tensor) -> None:
    """Gives an entry of a state_dict the shape of a weight: gate and up stacked in one dimension, or in one of 2."""
    given = state.get(name)
    if isinstance(given, torch.Tensor):
        shapes = tuple(given.shape), tuple(own.shape)
        if _stacked(shapes[0]) == shapes[1] or _stacked(shapes[1]) == shapes[0]:
            state[name] = given.reshape(own.shape)


def _stacked(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """(..., 2 F, H) of (..., 2, F, H), None of another shape."""
    return (*shape[:-3], 2 * shape[-2], shape[-1]) if len(shape) > 2 and shape[-3] == 2 else None


class Settings(NamedTuple):
    """The arguments of one call besides its tensors."""

    activation: str
    precision: str | None
    backend: str
    constant_weights: bool = False

    @property
    def how(self) -> How:
        """How the products with the weights are computed in a forward pass."""
        return How(self.precision, self.backend, None, "b" if self.constant_weights else None)

    def product(self, a: Any, b: Any, **options: Any) -> Any:
        """`gemm` with these settings."""
        return autograd._gemm(a, b, precision=self.precision, backend=self.backend, **options)

    def by_weight(self, x: Any, weight: Any, **options: Any) -> Any:
        """x @ weight^T in a forward pass, with the promise about weights where it is made."""
        return self.product(x, weight.t(), constant="b" if self.constant_weights else None, **options)

    def composed(self, x: Any, gate_up: Any, down: Any) -> Any:
        """The MLP as two calls of `gemm`, which know every transform and every order of derivative."""
        return self.by_weight(self.by_weight(x, gate_up, epilogue=GATES[self.activation]), down)


def known(x: Any, gate_up: Any, down: Any, settings: Settings) -> torch.Tensor | None:
    """The MLP's result by the C++ part; None where a gradient is recorded, or the C++ part was not told of a product. x
    may have any number of dimensions."""
    if (serves := native.gated_mlp) is None or (meant := programs.meant_by(GATES[settings.activation])) is None:
        return None
    how = settings.how
    if how.precision is None and float32.in_use:
        how = how._replace(precision=float32.default(x, how.backend))
    found = serves(x, gate_up, down, programs.number_of(meant), *how)
    return found if isinstance(found, torch.Tensor) else None


def gated_mlp(x: Any, gate_up: Any, down: Any, settings: Settings) -> torch.Tensor:
    """(M, out) from x (M, in), gate_up (2 * hidden, in) or (2, hidden, in), and down (out, hidden)."""
    if sharded.is_distributed(x, gate_up, down) and not torch.compiler.is_dynamo_compiling():
        return _of_parts(x, gate_up, down, settings)
    if gate_up.dim() == 3:
        if not gate_up.is_contiguous():  # flattening copies it, just in front of the product
            settings = settings._replace(constant_weights=False)
        gate_up = gate_up.flatten(0, 1)
    if torch.compiler.is_dynamo_compiling() or is_beyond_autograd(x, gate_up, down):
        return settings.composed(x, gate_up, down)
    if torch._C._is_any_autocast_enabled():
        weights = gate_up, down
        x, gate_up, down, _, (precision, *_) = cast_operands(x, gate_up, down, None, None, How(settings.precision))
        kept = settings.constant_weights and gate_up is weights[0] and down is weights[1]
        with torch._C._DisableAutocast():
            return gated_mlp(x, gate_up, down, settings._replace(precision=precision, constant_weights=kept))
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, gate_up, down)):
        if settings.precision is None and float32.in_use:  # gradients have the precision of now
            settings = settings._replace(precision=float32.default(x, settings.backend))
        return _record(x, gate_up, down, settings)
    return settings.composed(x, gate_up, down)


def _of_parts(x: Any, gate_up: Any, down: Any, settings: Settings) -> Any:
    """`gated_mlp` of DTensors: each rank has a part of the rows, of the hidden units, or of the result's columns."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    refuse_promise("constant_weights", settings.constant_weights)
    tensors = {"x": x, "gate_up": gate_up, "down": down}
    mesh, everywhere = sharded.mesh_of("cutegemm.nn.SwiGLU", tensors), Replicate()
    shape = (x.shape[0], down.shape[0])
    rules = [sharded.Rule((everywhere,) * 3, (everywhere,))]
    if shape[0] >= mesh.size():
        rules.append(sharded.Rule((Shard(0), everywhere, everywhere), (Shard(0),)))
    if gate_up.dim() == 3 and down.shape[1] >= mesh.size():
        rules.append(sharded.Rule((everywhere, Shard(1), Shard(1)), (Partial(),)))
    if shape[1] >= mesh.size():
        rules.append(sharded.Rule((everywhere, everywhere, Shard(0)), (Shard(1),)))

    def call(parts: list[Any], results: Any) -> list[torch.Tensor]:
        return [gated_mlp(parts[0], parts[1], parts[2], settings)]

    return sharded.compute(mesh, list(tensors.values()), rules, call, [shape])[0]


@lru_cache(maxsize=64)
def _programs(activation: str, dtype: str) -> tuple[Program, Program]:
    """The forward program, whose further outputs are gate and up; and the program that makes dgate and dup of the
    accumulators of dH and of the operands gate and up.
    """
    program = lookup(GATES[activation], ())
    needs = needed(program, (0,), True, ())
    assert needs.backward is not None
    forward, saved = recording(program, needs, dtype)
    derived = needs.backward.accumulated(Source("upstream", 0))
    assert saved == derived.reads == (Source("acc", 0), Source("acc", 1)) == derived.gives
    inputs = tuple(each._replace(dtype=dtype) for each in derived.program.inputs)
    return forward, Program(inputs, derived.program.nodes, derived.program.outputs)


class GatedMLP(torch.autograd.Function):
    """apply(x, gate_up, down, settings)."""

    @staticmethod
    def forward(ctx: Any, x: Any, gate_up: Any, down: Any, settings: Settings) -> torch.Tensor:
        forward, _ = _programs(settings.activation, str(dtype_name(x.dtype)))
        h, gate, up = settings.by_weight(x, gate_up, epilogue=forward)
        ctx.settings = settings._replace(constant_weights=False)
        ctx.save_for_backward(x, gate_up, down, h if ctx.needs_input_grad[2] else None, gate, up)
        return settings.by_weight(h, down)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, gate_up, down, h, gate, up = ctx.saved_tensors
        settings: Settings = ctx.settings._replace(precision=float32.of_gradients(ctx.settings.precision))
        needs = ctx.needs_input_grad
        grad = autograd.readable(grad)
        if torch.is_grad_enabled():
            return *autograd.recorded_gradients(settings.composed, (x, gate_up, down), needs[:3], grad), None
        dx = dgate_up = ddown = None
        if needs[2]:
            ddown = settings.product(grad.t(), h)
        if needs[0] or needs[1]:
            hidden = gate.shape[1]
            _, derived = _programs(settings.activation, str(dtype_name(x.dtype)))
            given = {"epilogue": derived, "operands": (gate, up)}
            if transforms.active(grad):  # a batch of gradients, which cannot be written into a tensor
                both = torch.cat(settings.product(grad, down, **given), -1)
            else:
                both = torch.empty((x.shape[0], 2 * hidden), dtype=x.dtype, device=x.device)
                settings.product(grad, down, **given, out=(both[:, :hidden], both[:, hidden:]))
            dx = settings.product(both, gate_up) if needs[0] else None
            dgate_up = settings.product(both.t(), x) if needs[1] else None
        return dx, dgate_up, ddown, None


_record = super(torch.autograd.Function, GatedMLP).apply
