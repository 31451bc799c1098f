"""What is between the two products of a mixture (`Form`), and the programs of these products.

The gate may be a name or a function of the caller's. Experts may have biases, and gate and up may take turns.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cutegemm import ops
from cutegemm.errors import EpilogueError
from cutegemm.problem import request
from cutegemm.problem.dtypes import TERMS, torch_dtype
from cutegemm.problem.program.graph import Program
from cutegemm.problem.program.known import lookup
from cutegemm.pytorch import compiled
from cutegemm.pytorch.grouped_autograd import PRODUCT
from cutegemm.pytorch.mlp import GATES

_BIASES = tuple(torch_dtype(name) for name in TERMS if torch_dtype(name).is_floating_point)
_ACCEPTED = (
    f"{', '.join(map(repr, GATES))} ('silu' makes SwiGLU), and a function of gate and up, such as "
    "cutegemm.gating.ClampedSwiglu(limit=7.0)"
)


@dataclass(frozen=True)
class ClampedSwiglu:
    """`ops.clamped_swiglu` with these numbers, as an activation that can be pickled.

    limit: the largest value of gate, and the largest magnitude of up; a number above 0. alpha: what the gate is
    multiplied by in the sigmoid. offset: what is added to up. Those of gpt-oss are 7.0, 1.702 and 1.0. Raises
    TypeError for what is no number, ValueError for another limit.
    """

    limit: float
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        for name in ("limit", "alpha", "offset"):
            if isinstance(given := getattr(self, name), bool) or not isinstance(given, (int, float)):
                raise TypeError(f"{name}: got {type(given).__name__}, expected a Python number")
        if not self.limit > 0:
            raise ValueError(f"limit: got {self.limit}, expected a number above 0")

    def __call__(self, gate: Any, up: Any) -> Any:
        return ops.clamped_swiglu(gate, up, self.limit, self.alpha, self.offset)


_NO_FUNCTIONS = (type, torch.nn.Module)
"""Callables that no activation is."""
Function = Callable[[Any, Any], Any]
"""Of gate and up, values of an epilogue or tensors, to the hidden layer."""


def _by_name(activation: Callable[[Any], Any]) -> Function:
    return lambda gate, up: activation(gate) * up


def _clamped(limit: float, alpha: float, offset: float) -> Function:
    return lambda gate, up: ops.clamped_swiglu(gate, up, limit, alpha, offset)


_known_clamped = lru_cache(maxsize=64)(_clamped)
_FUNCTIONS: dict[str, Function] = {
    "silu": _by_name(ops.silu), "gelu": _by_name(ops.gelu), "gelu_tanh": _by_name(ops.gelu_tanh),
    "relu": _by_name(ops.relu),
}  # fmt: skip
"""The function for each name: always the same, so that `lookup` knows it again."""


class Form(NamedTuple):
    """What is between the products of a mixture, and how gate and up lie.

    activation: a name of `mlp.GATES`, or a function. interleaved: whether rows of gate and of up take turns; else those
    of gate come first.
    """

    activation: str | Function = "silu"
    interleaved: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is act(gate) * up of halves, which the fastest ways of `moe` compute."""
        return isinstance(self.activation, str) and not self.interleaved

    def function(self) -> Function:
        """What is computed of gate and up."""
        given = self.activation
        if isinstance(given, str):
            return _FUNCTIONS[given]
        if type(given) is not ClampedSwiglu:  # a subclass may compute something else
            return given
        make = _clamped if torch.compiler.is_dynamo_compiling() else _known_clamped
        return make(given.limit, given.alpha, given.offset)

    def first_epilogue(self, biased: bool) -> Callable[..., Any]:
        """The epilogue of the first product: of accumulators, each row's weight, and where asked for the biases of gate
        and of up.
        """
        split, hidden = ops.pairs if self.interleaved else ops.halves, self.function()

        def plain(acc: Any, weight: Any) -> Any:
            gate, up = split(acc)
            return hidden(gate, up) * weight

        def with_biases(acc: Any, weight: Any, of_gate: Any, of_up: Any) -> Any:
            gate, up = split(acc)
            return hidden(gate + of_gate, up + of_up) * weight

        return with_biases if biased else plain


def divided(both: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of a tensor that has columns of both."""
    gate, up = ops.pairs(both) if interleaved else ops.halves(both)
    return gate, up


def _second_epilogue(acc: Any, weight: Any, bias: Any) -> Any:
    """Of the second product, whose rows carry their weight already."""
    return acc + weight * bias


def first_operands(weight: torch.Tensor, b_gate_up: torch.Tensor | None, interleaved: bool) -> list[torch.Tensor]:
    """Those of the first product's program: each row's weight, and the biases of gate and up."""
    if b_gate_up is None:
        return [weight]
    return [weight, *(each[:, None] for each in divided(b_gate_up, interleaved))]


def second_operands(weight: torch.Tensor, b_down: torch.Tensor | None) -> list[torch.Tensor]:
    """Those of the second product's program, which has none without a bias: each row's weight, and the bias."""
    return [] if b_down is None else [weight, b_down[:, None]]


def texts(form: Form, weights: torch.Tensor, b_gate_up: Any = None, b_down: Any = None) -> tuple[str, str]:
    """The texts of the programs of the two products, for these weights of slots and these biases.

    The first takes each row's weight and the biases of gate and up, (G, 1, N); the second the weight and its bias.
    """
    biases = tuple(None if each is None else each.dtype for each in (b_gate_up, b_down))
    if isinstance(form.activation, str):
        return _texts(form.activation, form.interleaved, weights.dtype, *biases)
    if type(form.activation) is ClampedSwiglu and not torch.compiler.is_dynamo_compiling():
        return _of_constants(form.activation, form.interleaved, weights.dtype, *biases)
    _, second = _texts("silu", False, weights.dtype, None, biases[1])
    described = _described(weights.dtype, *(biases[:1] * 2 if biases[0] else ()))
    epilogue = form.first_epilogue(b_gate_up is not None)
    if torch.compiler.is_dynamo_compiling():
        return compiled.text_for(epilogue, described), second
    return lookup(epilogue, compiled.inputs_of(described)).text, second


_NUMBERS: dict[Hashable, int] = {}
_NEW_NUMBERS = itertools.count(16)
"""Smaller ones are places of names in the C++ part."""
_MOST_NUMBERS = 4096


def known_texts(form: Form, weights: Any, b_gate_up: Any, b_down: Any) -> tuple[str, str] | None:
    """`texts`, None of what is no form, or of weights and biases that are no tensors: the checks of a call say why."""
    if isinstance(form.activation, _NO_FUNCTIONS):
        return None
    try:
        return texts(form, weights, b_gate_up, b_down)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def number_of(computed: Hashable) -> int:
    """The number by which the C++ part knows what is computed of a mixture's tensors: the texts of two programs, or
    `quantized_mixing.Computed`.
    """
    found = _NUMBERS.get(computed)
    if found is not None:
        return found
    if len(_NUMBERS) >= _MOST_NUMBERS:  # no number is given twice: what was known by one of these is told again
        _NUMBERS.clear()
    return _NUMBERS.setdefault(computed, next(_NEW_NUMBERS))


def _texts(
    activation: str, interleaved: bool, weight: torch.dtype, b_gate_up: torch.dtype | None, b_down: torch.dtype | None
) -> tuple[str, str]:
    return _of_constants(activation, interleaved, weight, b_gate_up, b_down)


_texts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo need not look at how programs are made


@lru_cache(maxsize=64)
def _of_constants(
    activation: str | ClampedSwiglu, interleaved: bool, weight: torch.dtype, b_gate_up: torch.dtype | None,
    b_down: torch.dtype | None,
) -> tuple[str, str]:  # fmt: skip
    first = Form(activation, interleaved).first_epilogue(b_gate_up is not None)
    inputs = compiled.inputs_of(_described(weight, *([b_gate_up] * 2 if b_gate_up else [])))
    text = lookup(first, inputs).text
    if b_down is None:
        return text, PRODUCT
    return text, lookup(_second_epilogue, compiled.inputs_of(_described(weight, b_down))).text


def _described(weight: torch.dtype, *biases: torch.dtype) -> tuple[compiled.Described, ...]:
    """The operands of a program: a weight a row, and biases of the columns of each group."""
    return (weight, True, False, False), *((each, False, True, True) for each in biases)


def check(form: Form, w_gate_up: Any, w_down: Any, b_gate_up: Any, b_down: Any, of: str = "w_gate_up") -> None:
    """Raises TypeError or ValueError naming the argument, what was given and what is accepted. The weights fit. of: the
    name of `w_gate_up`.
    """
    activation, interleaved = form
    program = check_form(activation, interleaved)
    if b_gate_up is not None and program is not None:
        read = {node.attribute for node in program.nodes if node.op == "acc"}
        if len(read) < 2:
            raise ValueError(
                f"b_gate_up: got one with a function for activation that reads {'up' if 1 in read else 'gate'} alone; "
                "expected None, or a function of both"
            )
    if interleaved and w_gate_up.dim() == 4:
        raise ValueError(
            f"interleaved: got True with w_gate_up of shape {tuple(w_gate_up.shape)}, which stacks gate and up; "
            "expected (E, 2 F, H)"
        )
    check_biases(w_gate_up, w_down, {"b_gate_up": b_gate_up, "b_down": b_down}, of)


def check_biases(w_gate_up: Any, w_down: Any, biases: dict[str, Any], of: str = "w_gate_up") -> None:
    """Raises TypeError or ValueError, by its name, for a bias that these weights cannot have. biases: that of gate and
    up first. of: the name of `w_gate_up`.
    """
    count, rows, hidden = w_down.shape
    for (name, bias), extent in zip(biases.items(), (2 * hidden, rows), strict=True):
        if bias is None:
            continue
        request.check_type(name, bias)
        if bias.is_nested or bias.layout != torch.strided:
            raise TypeError(f"{name}: got a nested tensor or layout {bias.layout}, expected a dense (strided) one")
        request.check_device(name, bias, w_gate_up.device, of)
        if not torch.compiler.is_dynamo_compiling() and bias.is_neg():
            raise ValueError(f"{name}: it is a lazily negated view; call .resolve_neg()")
        if bias.dtype not in _BIASES:
            raise TypeError(f"{name}: got dtype {bias.dtype}, accepted are {', '.join(map(str, _BIASES))}")
        if bias.dim() != 2 or bias.shape[0] != count or bias.shape[1] != extent:
            raise ValueError(f"{name}: got shape {tuple(bias.shape)}, expected {(count, extent)} with these weights")


def check_form(activation: Any, interleaved: Any) -> Program | None:
    """The program of a function for `activation`, None of a name and while dynamo traces.

    Raises TypeError, ValueError or EpilogueError unless these are what `Form` has.
    """
    if not isinstance(interleaved, bool):
        raise TypeError(f"interleaved: got {type(interleaved).__name__}, accepted are True and False")
    if isinstance(activation, _NO_FUNCTIONS):
        got = activation.__name__ if isinstance(activation, type) else f"a module {type(activation).__name__}"
        raise TypeError(f"activation: got {got}, accepted are {_ACCEPTED}")
    if isinstance(activation, str) or not callable(activation):
        if not (isinstance(activation, str) and activation in GATES):
            raise ValueError(f"activation: got {request.shown(activation)}, accepted are {_ACCEPTED}")
        return None
    if torch.compiler.is_dynamo_compiling():
        return None
    program = _traced(Form(activation).function())
    if len(program.outputs) != 1 or program.outputs[0].reduce is not None:
        raise EpilogueError("activation: the function returns several results or a reduction, expected one value")
    return program


def _traced(function: Function) -> Program:
    """The program of a function of gate and up. Raises TypeError or EpilogueError where it can be none."""

    def epilogue(acc: Any) -> Any:
        gate, up = ops.halves(acc)
        return function(gate, up)

    try:
        return lookup(epilogue, ())
    except EpilogueError as why:
        _, returns, what = str(why).partition(": the epilogue returns ")
        kind = what.partition(", accepted")[0]
        found = f"the function returns {kind}, expected one value made of gate and up" if returns else why
        found = _without_operands(str(found))
        raise EpilogueError(f"activation: {found}") from why
    except TypeError:
        _check_parameters(function)
        raise


_ADVICE = (", and pass tensors by operands=", "pass it by operands=, and name a parameter of the function for it")
"""What messages about an epilogue say of its operands, which a function for `activation` has not."""


def _without_operands(message: str) -> str:
    for advice in _ADVICE:
        message = message.replace(
            advice, "the function takes gate, up and Python numbers alone" if advice[0] != "," else ""
        )
    return message


def _check_parameters(function: Function) -> None:
    """Raises TypeError for a function that does not take gate and up."""
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        parameters.bind(0, 0)
    except TypeError as why:
        raise TypeError(
            f"activation: it is called with gate and up, and its parameters are {parameters}: {why}"
        ) from None
