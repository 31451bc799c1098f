"""Gradients of programs: `backward` gives a program that computes them, by reverse mode over the graph.

The derived program is ungated and reads no accumulators: what the forward pass accumulated is an operand of it, as are
the gradients of the outputs. So it can be differentiated again, evaluated, bounded and lowered like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cutegemm.problem.program.build import Builder
from cutegemm.problem.program.graph import F32, Input, Output, Program
from cutegemm.problem.program.simplify import simplified


class Source(NamedTuple):
    """A tensor of the forward pass: kind "operand", number of the input; "acc", 0 (or 1 for up's); "upstream", the
    gradient of an output, its number.
    """

    kind: str
    number: int = 0


@dataclass(frozen=True)
class Backward:
    """A program that computes gradients elementwise.

    Attributes:
        program: reads no accumulators unless `accumulated` made them; each output is a matrix of D's shape.
        reads: what each of the program's inputs is. Of a reduction's gradient that is (M, 1) or (1, N).
        gives: what each of its outputs is the gradient of: "acc" for the accumulators (the columns of gate or of up for
            a gated program), "operand" for an input, still to be summed to that input's shape. What is not among them
            has no gradient: integers, numbers passed by value, and whatever no output depends on.
    """

    program: Program
    reads: tuple[Source, ...]
    gives: tuple[Source, ...]

    def only(self, gives: Sequence[Source]) -> Backward:
        """The same for some of the gradients. Raises ValueError for one that is not given."""
        if missing := set(gives) - set(self.gives):
            raise ValueError(f"{missing} is not given; given are {self.gives}")
        outputs = tuple(self.program.outputs[self.gives.index(source)] for source in gives)
        program, kept = pruned(replace(self.program, outputs=outputs))
        return Backward(program, tuple(self.reads[each] for each in kept), tuple(gives))

    def accumulated(self, source: Source) -> Backward:
        """The same with the accumulators of a product in place of one input, such as the gradient that a product makes.

        Raises ValueError for what the program does not read as a matrix.
        """
        if source not in self.reads:
            raise ValueError(f"{source.kind} {source.number} is not read; read are {self.reads}")
        number = self.reads.index(source)
        if self.program.inputs[number].varies != "mn" or self.program.uses("acc"):
            raise ValueError(f"{source.kind} {source.number} is no matrix, or there are accumulators already")
        builder, new = _copied(self.program, self.program.inputs, to_acc=number)
        outputs = [out._replace(node=new[out.node]) for out in self.program.outputs]
        program, kept = pruned(builder.program(outputs))
        return Backward(program, tuple(self.reads[each] for each in kept), self.gives)


def backward(
    program: Program, *, batched: bool = False, saved: str = "fp32", upstream: Sequence[str] | None = None
) -> Backward:
    """The gradients of a program with respect to its accumulators and its operands.

    Args:
        batched: whether D has a batch.
        saved: dtype in which the accumulators of the forward pass are given.
        upstream: dtypes of the gradients of the outputs, by default fp32.

    Conditions, indices, integers and random numbers have no gradient; a cast passes it on unrounded; relu and abs have
    0 at 0; where both arguments of minimum or maximum are equal, each has half.

    Raises ValueError for a maximum over a row or a column, and for quantized results.
    """
    if program.quantizes:
        raise ValueError(
            "epilogue: results of ops.quantize have no gradient; call it under torch.no_grad(), or with tensors that "
            "require none"
        )
    dtypes = upstream or ["fp32"] * len(program.outputs)
    sources = [Source("operand", i) for i in range(len(program.inputs))]
    inputs = list(program.inputs)
    accumulators = (0, 1) if program.gating else (0,)
    for number in accumulators:
        sources.append(Source("acc", number))
        inputs.append(Input("", saved, True, True, batched))
    for number, (out, dtype) in enumerate(zip(program.outputs, dtypes, strict=True)):
        if out.reduce is not None and not out.reduce.endswith("sum"):
            raise ValueError(f"output {number}: {out.reduce} has no gradient here; row_sum and column_sum have")
        sources.append(Source("upstream", number))
        row, column = (out.reduce or "").startswith("row"), (out.reduce or "").startswith("column")
        inputs.append(Input("", dtype, not column, not row, batched))
    inputs = [given._replace(name=f"x{i}") for i, given in enumerate(inputs)]

    builder, new = _copied(program, inputs, first_acc=len(program.inputs))
    tape = _Tape(builder, program, new)
    for number, out in enumerate(program.outputs):
        tape.add(out.node, builder.add("input", attribute=len(program.inputs) + len(accumulators) + number))
    found = tape.run()
    gives = sorted(source for source in found if source.kind == "acc")
    gives += sorted(
        source for source in found if source.kind == "operand" and not program.inputs[source.number].by_value
    )
    derived, kept = pruned(builder.program(Output(found[source]) for source in gives))
    return Backward(derived, tuple(sources[each] for each in kept), tuple(gives))


def _copied(
    program: Program, inputs: Sequence[Input], to_acc: int | None = None, first_acc: int = 0
) -> tuple[Builder, list[int]]:
    """A builder with the program's nodes, and their numbers in it. Accumulators become inputs from `first_acc` on, and
    the input `to_acc` becomes the accumulators. Activations become products with their factor, which their
    derivative needs too.
    """
    builder = Builder(inputs)
    formulas = _Formulas(builder)
    new: list[int] = []
    for node in program.nodes:
        if node.op == "acc":
            new.append(builder.add("input", attribute=first_acc + int(node.attribute or 0)))
        elif node.op == "input" and node.attribute == to_acc:
            new.append(builder.add("acc"))
        elif node.op in ("gelu", "gelu_tanh", "silu"):
            argument = new[node.args[0]]
            new.append(formulas("mul", argument, formulas.factor(node.op, argument)))
        else:
            new.append(builder.copy(node, new))
    return builder, new


def pruned(program: Program) -> tuple[Program, list[int]]:
    """The simplified program without the inputs that it does not read, and the numbers of those that it keeps."""
    program = simplified(program)
    kept = sorted({int(node.attribute or 0) for node in program.nodes if node.op == "input"})
    nodes = tuple(
        node._replace(attribute=kept.index(int(node.attribute or 0))) if node.op == "input" else node
        for node in program.nodes
    )
    inputs = tuple(program.inputs[number] for number in kept)
    return simplified(Program(inputs, nodes, program.outputs, program.gating)), kept


class _Tape:
    """The gradients of nodes, from the last to the first."""

    def __init__(self, builder: Builder, program: Program, new: list[int]) -> None:
        self.builder, self.program, self.new = builder, program, new
        self.gradients: dict[int, int] = {}

    def add(self, node: int, gradient: int) -> None:
        """Adds to the gradient of a node of the forward program."""
        if self.program.types[node] == F32:
            before = self.gradients.get(node)
            self.gradients[node] = gradient if before is None else self.builder.add("add", before, gradient)

    def run(self) -> dict[Source, int]:
        """The gradient of each leaf that has one."""
        found: dict[Source, int] = {}
        for number in reversed(range(len(self.program.nodes))):
            gradient = self.gradients.get(number)
            if gradient is None:
                continue
            node = self.program.nodes[number]
            if node.op in ("acc", "input"):
                found[Source("acc" if node.op == "acc" else "operand", int(node.attribute or 0))] = gradient
            elif node.op in _RULES:
                formulas = _Formulas(self.builder)
                args = [self.new[arg] for arg in node.args]
                for arg, part in zip(
                    node.args, _RULES[node.op](formulas, gradient, self.new[number], *args), strict=True
                ):
                    if part is not None:
                        self.add(arg, part)
        return found


class _Formulas:
    """Arithmetic on the numbers of nodes."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def __call__(self, op: str, *args: int | float) -> int:
        """A node; floats among the arguments are constants."""
        return self.builder.add(op, *(self.builder.const(arg) if isinstance(arg, float) else arg for arg in args))

    def product(self, *args: int | float) -> int:
        result, *rest = args
        for each in rest:
            result = self("mul", result, each)
        assert isinstance(result, int)
        return result

    def sign(self, gradient: int, x: int) -> int:
        return self(
            "where", self("gt", x, 0.0), gradient, self("where", self("lt", x, 0.0), self("neg", gradient), 0.0)
        )

    def extreme(self, gradient: int, wins: str, x: int, y: int) -> tuple[int, int]:
        """Of minimum and maximum: `wins` says how x compares with y where it is the result. As torch has it, both share
        where they are equal, and each has all where one is NaN.
        """
        share = self("where", self("eq", x, y), self("mul", gradient, 0.5), gradient)
        loses = "gt" if wins == "lt" else "lt"
        return self("where", self(loses, x, y), 0.0, share), self("where", self(wins, x, y), 0.0, share)

    def factor(self, op: str, x: int) -> int:
        """What an activation multiplies its argument with: Phi(x), or sigmoid(2u), or sigmoid(x)."""
        if op == "gelu":
            return self("mul", self("add", self("erf", self("mul", x, 0.5**0.5)), 1.0), 0.5)
        if op == "gelu_tanh":
            return self("sigmoid", self("mul", x, self("add", self.product(x, x, 0.044715 * _SCALE), _SCALE)))
        return self("sigmoid", x)

    def gelu(self, gradient: int, x: int) -> int:
        """Phi(x) + x phi(x)."""
        density = self("mul", self("exp", self.product(x, x, -0.5)), (2 * math.pi) ** -0.5)
        return self("mul", gradient, self("add", self.factor("gelu", x), self("mul", x, density)))

    def gelu_tanh(self, gradient: int, x: int) -> int:
        """s + x s (1 - s) 2u', where s = sigmoid(2u) and u = sqrt(2 / pi) (x + 0.044715 x^3)."""
        s = self.factor("gelu_tanh", x)
        slope = self("add", self.product(x, x, 3 * 0.044715 * _SCALE), _SCALE)
        return self("mul", gradient, self("add", s, self.product(x, s, self("sub", 1.0, s), slope)))

    def silu(self, gradient: int, x: int) -> int:
        """s + x s (1 - s), where s = sigmoid(x)."""
        s = self.factor("silu", x)
        return self("mul", gradient, self("add", s, self.product(x, s, self("sub", 1.0, s))))


_SCALE = 2 * (2 / math.pi) ** 0.5
"""2u / x of gelu_tanh at 0."""
_Parts = tuple["int | None", ...]
_RULES: dict[str, Callable[..., _Parts]] = {
    # (formulas, gradient of the result, result, arguments...) -> the gradients of the arguments
    "neg": lambda f, g, r, x: (f("neg", g),),
    "exp": lambda f, g, r, x: (f("mul", g, r),),
    "exp2": lambda f, g, r, x: (f.product(g, r, math.log(2)),),
    "log": lambda f, g, r, x: (f("div", g, x),),
    "log2": lambda f, g, r, x: (f("div", f("mul", g, 1 / math.log(2)), x),),
    "sqrt": lambda f, g, r, x: (f("div", f("mul", g, 0.5), r),),
    "rsqrt": lambda f, g, r, x: (f.product(g, -0.5, r, r, r),),
    "reciprocal": lambda f, g, r, x: (f.product(f("neg", g), r, r),),
    "tanh": lambda f, g, r, x: (f("mul", g, f("sub", 1.0, f("mul", r, r))),),
    "sigmoid": lambda f, g, r, x: (f.product(g, r, f("sub", 1.0, r)),),
    "erf": lambda f, g, r, x: (f.product(g, f("exp", f("neg", f("mul", x, x))), 2 / math.pi**0.5),),
    "abs": lambda f, g, r, x: (f.sign(g, x),),
    "relu": lambda f, g, r, x: (f("where", f("le", x, 0.0), 0.0, g),),  # of NaN as torch's, g
    "gelu": lambda f, g, r, x: (f.gelu(g, x),),
    "gelu_tanh": lambda f, g, r, x: (f.gelu_tanh(g, x),),
    "silu": lambda f, g, r, x: (f.silu(g, x),),
    "add": lambda f, g, r, x, y: (g, g),
    "sub": lambda f, g, r, x, y: (g, f("neg", g)),
    "mul": lambda f, g, r, x, y: (f("mul", g, y), f("mul", g, x)),
    "div": lambda f, g, r, x, y: (f("div", g, y), f("neg", f("div", f("mul", g, r), y))),
    "minimum": lambda f, g, r, x, y: f.extreme(g, "lt", x, y),
    "maximum": lambda f, g, r, x, y: f.extreme(g, "gt", x, y),
    "where": lambda f, g, r, c, x, y: (None, f("where", c, g, 0.0), f("where", c, 0.0, g)),
    "cast": lambda f, g, r, x: (g,),
    "partner": lambda f, g, r, x: (f("partner", g),),
}
"""The derivatives. What is not here has none: constants, conditions, indices, random numbers, converted integers."""


def saving(program: Program, needed: Backward, dtype: str | None) -> tuple[Program, tuple[Source, ...]]:
    """The forward program with further outputs, in a dtype, for those accumulators that a backward pass reads; and
    what these outputs are, in their order.
    """
    wanted = tuple(source for source in needed.reads if source.kind == "acc")
    builder = Builder(program.inputs)
    new: list[int] = []
    for node in program.nodes:
        new.append(builder.copy(node, new))
    outputs = [out._replace(node=new[out.node]) for out in program.outputs]
    for source in wanted:
        attribute = source.number if program.gating else None
        outputs.append(Output(builder.add("acc", attribute=attribute), dtype))
    return simplified(builder.program(outputs, program.gating)), wanted
