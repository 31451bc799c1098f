"""The programs of backward passes: derived once for each program and each set of gradients that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from cutegemm.problem.program.derive import Backward, Source, backward, pruned, saving
from cutegemm.problem.program.graph import Node, Output, Program
from cutegemm.problem.program.simplify import simplified

ACC = (Source("acc", 0), Source("acc", 1))


class Maximum(NamedTuple):
    """An output that is a maximum over rows or columns; its gradient is spread over the elements that equal it.

    program: gives the matrix that it is the maximum of. operands: the numbers of those that the program takes.
    """

    output: int
    program: Program
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Needed:
    """The gradients that are asked for.

    Attributes:
        backward: gives them; its "upstream" sources are numbers of the program's outputs. None where all are zero.
        maxima: of each output that is a maximum and has a gradient.
        reads_acc: whether the accumulators of the forward pass are needed.
    """

    backward: Backward | None
    maxima: tuple[Maximum, ...]
    reads_acc: bool

    @property
    def reads(self) -> frozenset[int]:
        """The operands that are needed."""
        found = {source.number for source in (self.backward.reads if self.backward else ()) if source.kind == "operand"}
        return frozenset(found.union(*(each.operands for each in self.maxima)))


@lru_cache(maxsize=1024)
def needed(program: Program, live: tuple[int, ...], product: bool, operands: tuple[int, ...]) -> Needed:
    """What a backward pass computes.

    Args:
        live: the outputs that have a gradient. product: whether a or b needs one. operands: which operands need one.
    """
    outputs, maxima, nodes = [], [], list(program.nodes)
    for number in live:
        output = program.outputs[number]
        if output.reduce is not None and "max" in output.reduce:
            node = output.node
            if output.reduce.endswith("abs"):
                node = len(nodes)
                nodes.append(Node("abs", (output.node,)))
            output = Output(node)
            alone, kept = pruned(Program(program.inputs, tuple(nodes), (output,), program.gating))
            maxima.append(Maximum(number, alone, tuple(kept)))
        outputs.append(output)
    found = backward(Program(program.inputs, tuple(nodes), tuple(outputs), program.gating))
    found = replace(
        found,
        reads=tuple(
            Source("upstream", live[source.number]) if source.kind == "upstream" else source for source in found.reads
        ),
    )
    wanted = [
        source for source in found.gives if (product if source.kind == "acc" else source.number in operands)
    ]  # fmt: skip
    if not wanted:
        return Needed(None, (), False)
    found = found.only(wanted)
    upstream = {source.number for source in found.reads if source.kind == "upstream"}
    spread = tuple(each for each in maxima if each.output in upstream)
    reads_acc = any(source.kind == "acc" for source in found.reads) or any(each.program.uses("acc") for each in spread)
    return Needed(found, spread, reads_acc)


@lru_cache(maxsize=1024)
def recording(program: Program, needs: Needed, dtype: str | None) -> tuple[Program, tuple[Source, ...]]:
    """The forward program that also gives the accumulators, in a dtype, which a backward pass reads; and which."""
    assert needs.backward is not None
    if not needs.maxima:
        return saving(program, needs.backward, dtype)
    accumulators = ACC if program.gating else ACC[:1]
    return saving(program, replace(needs.backward, reads=accumulators), dtype)


class Passed(NamedTuple):
    """The gradients that are upstream gradients as they are, which nothing need compute.

    passed: (gradient, upstream gradient) of each. rest: gives the others, None where there are none.
    """

    passed: tuple[tuple[Source, Source], ...]
    rest: Backward | None

    def of(self, values: Mapping[Source, Any]) -> dict[Source, Any]:
        """Those that are passed on, of the values by what they are. An expanded one is made dense: once, not for each
        product that reads it.
        """
        dense = {upstream: values[upstream] for _, upstream in self.passed}
        dense = {source: each.contiguous() if 0 in each.stride() else each for source, each in dense.items()}
        return {source: dense[upstream] for source, upstream in self.passed}


@lru_cache(maxsize=1024)
def passed_on(found: Backward, operands: tuple[int, ...]) -> Passed:
    """What a backward pass need not compute. operands: those whose gradients may be passed on too."""
    passed = []
    for source, output in zip(found.gives, found.program.outputs, strict=True):
        node = found.program.nodes[output.node]
        if node.op == "input" and (source.kind == "acc" or source.number in operands):
            number = int(node.attribute or 0)
            if found.reads[number].kind == "upstream" and found.program.inputs[number].varies == "mn":
                passed.append((source, found.reads[number]))
    rest = [source for source in found.gives if source not in dict(passed)]
    return Passed(tuple(passed), found.only(rest) if rest else None)


def by_source(found: Backward, results: Sequence[Any]) -> dict[Source, Any]:
    """The gradients that were evaluated. Those of the same values are one tensor, which autograd does not give to two
    operands; of two views of one memory it would not know.
    """
    made: dict[int, Any] = {}
    for output, result in zip(found.program.outputs, results, strict=True):
        made.setdefault(output.node, result)
    return {source: made[each.node] for source, each in zip(found.gives, found.program.outputs, strict=True)}


class Fused(NamedTuple):
    """The gradients as the epilogue of a product.

    program: its operands are what `reads` says. outputs: for each gradient that is given, the number of the result.
    """

    program: Program
    reads: tuple[Source, ...]
    outputs: tuple[int, ...]


@lru_cache(maxsize=1024)
def fused(found: Backward, gating: str | None, dtypes: tuple[str | None, ...], recompute: bool) -> Fused:
    """The gradients as an epilogue. dtypes: of what `found` gives. recompute: the accumulators of the forward pass are
    those of the product, which is then the one of the forward pass with its gating; else they are operands.
    """
    kept = [number for number, source in enumerate(found.reads) if not recompute or source.kind != "acc"]
    nodes = []
    for node in found.program.nodes:
        if node.op == "input":
            number = int(node.attribute or 0)
            if number in kept:
                node = node._replace(attribute=kept.index(number))
            else:
                node = Node("acc", (), found.reads[number].number if gating else None)
        nodes.append(node)
    outputs = [output._replace(dtype=dtype) for output, dtype in zip(found.program.outputs, dtypes, strict=True)]
    inputs = tuple(found.program.inputs[number] for number in kept)
    program = simplified(Program(inputs, tuple(nodes), tuple(outputs), gating if recompute else None))
    stored = tuple(dict.fromkeys(program.outputs))  # the same values in the same dtype are stored once
    places = tuple(stored.index(output) for output in program.outputs)
    return Fused(replace(program, outputs=stored), tuple(found.reads[number] for number in kept), places)
