"""The problems that command lines pose: dtypes and shapes, with the options that say what is computed."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence

from cutegemm.problem import Problem, packing, scaling
from cutegemm.problem.dtypes import ITEMSIZE, PRODUCTS
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.grouped_request import MOST_GROUPS
from tuning import epilogues, suites


def problems(options: argparse.Namespace, dtypes: Sequence[str], shapes: Sequence[suites.Laid]) -> list[Problem]:
    """The problems of these dtypes and shapes. options: batch, work, constant, scaling, epilogue, activation,
    out_dtype, precision, and c and bias, which are dtypes or None. Raises ValueError naming an option that is wrong.
    """
    if strange := [dtype for dtype in dtypes if dtype not in PRODUCTS]:
        raise ValueError(f"--dtype: got {strange[0]!r}, accepted are {', '.join(PRODUCTS)}")
    epilogue = Epilogue(options.c, options.bias, "n", options.activation)
    if options.batch < 1:
        raise ValueError(f"--batch: got {options.batch}, expected at least 1")
    if options.work != "dense" and options.batch > MOST_GROUPS:
        raise ValueError(f"--batch: got {options.batch} with --work {options.work}, at most {MOST_GROUPS} groups")
    if options.constant and options.work != "dense":
        raise ValueError(f"--constant: got {options.constant} with --work {options.work}; accepted are dense products")
    unscaled = [dtype for dtype in dtypes if ITEMSIZE[dtype] != 1]
    if options.scaling and unscaled:
        raise ValueError(f"--scaling: got {options.scaling} with {unscaled[0]}; scales are of fp8 and int8 operands")
    if options.work == "gathered_m":
        _refuse_copied_rows(options.batch, dtypes, shapes)
    kinds = itertools.product(dtypes, shapes)
    if options.scaling == "blocks":
        programs = [None] if options.epilogue is None else options.epilogue.split(",")
        return [
            _with_scales(options, name, dtype, majors, shape)
            for name, (dtype, (shape, majors)) in itertools.product(programs, kinds)
        ]
    if options.epilogue is not None:
        return _with_programs(options, list(kinds))
    return [
        Problem.of(
            m, n, k, dtype, majors=majors, batch=options.batch, out_dtype=options.out_dtype,
            precision=options.precision, epilogue=epilogue, work=options.work, constant=options.constant,
        )
        for dtype, ((m, n, k), majors) in kinds
    ]  # fmt: skip


def _refuse_copied_rows(groups: int, dtypes: Iterable[str], shapes: Iterable[suites.Laid]) -> None:
    """Raises ValueError for gathered rows that `grouped_gemm` copies in front of another kind of product."""
    for dtype, ((m, n, k), _) in itertools.product(dtypes, shapes):
        if packing.gathers_first(m, m, groups, n, ITEMSIZE.get(dtype, 0)):
            raise ValueError(
                f"--work: got gathered_m with {m}x{n}x{k} in {groups} groups, whose rows are copied in front of the "
                "product; ragged_m is accepted, whose winner such calls take"
            )


def _with_programs(options: argparse.Namespace, kinds: list[tuple[str, suites.Laid]]) -> list[Problem]:
    """The products with each of the programs named. Raises ValueError for an option that does not go with these."""
    given = {
        "--c": options.c, "--bias": options.bias, "--activation": options.activation, "--scaling": options.scaling,
        f"--work {options.work}": options.work not in ("dense", "ragged_m", "gathered_m"),
    }  # fmt: skip
    if refused := [name for name, value in given.items() if value]:
        raise ValueError(f"--epilogue: got {options.epilogue} with {refused[0]}; a program says all that is computed")
    return [
        epilogues.problem(
            program, *shape, dtype, majors=majors, batch=options.batch, out_dtype=options.out_dtype,
            precision=options.precision, constant=options.constant, work=options.work,
        )
        for program in epilogues.named(options.epilogue) for dtype, (shape, majors) in kinds
    ]  # fmt: skip


def _with_scales(
    options: argparse.Namespace, program: str | None, dtype: str, majors: str, shape: suites.Shape
) -> Problem:
    """The product of operands in blocks of K, with that program. Raises ValueError, which names an option that does not
    go with them.
    """
    from cutegemm.problem import Problem

    given = {"--c": options.c, "--bias": options.bias, "--activation": options.activation}
    refused = [name for name, value in given.items() if value]
    if options.precision != "ieee":
        refused.append(f"--precision {options.precision}")
    if refused:
        raise ValueError(
            f"--scaling: got blocks with {refused[0]}; products are measured with scales of blocks alone, or with an "
            "--epilogue besides"
        )
    out_dtype = options.out_dtype or "bf16"
    behind = None if program is None else epilogues.without_operands(program, out_dtype)
    epilogue = Epilogue(custom=scaling.of_blocks(dtype, out_dtype, options.work, behind))
    return Problem.of(
        *shape, dtype, majors=majors, batch=options.batch, out_dtype=out_dtype, epilogue=epilogue, work=options.work,
        constant=options.constant,
    )  # fmt: skip
