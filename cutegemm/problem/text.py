"""From the text of a problem, as measurements keep it, back to the problem."""

from __future__ import annotations

import re

from cutegemm.problem import ITEMSIZE, MAX_EXTENT, TABLE, Matrix, Problem
from cutegemm.problem.dtypes import PRODUCTS, TERMS, TYPES, why_mixture_refused, why_not_multiplied
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.problem import program_operands, program_outputs
from cutegemm.problem.program.text import parse as read_program
from cutegemm.problem.work import DENSE, GATHERED, INTEGERS, RAGGED_M
from cutegemm.problem.work import TABLE as WORKS

_SIZE = r"(\d{1,10})"
_FORM = re.compile(
    rf"(?:{_SIZE}x)?{_SIZE}x{_SIZE}x{_SIZE} (\w+)(?:\*(\w+))?->(\w+)/(\w+)/a([km])(\d+)/b([kn])(\d+)/c(\d+)/d(\d+)"
    r"/(?:(?:([a-z_]+)\()?alpha\*acc(?:\+beta\*C\[(\w+)\])?(?:\+bias_([mn])\[(\w+)\])?\)?"
    # A program writes its divisions as `x / y`: the space tells them from the slash before the name of a work.
    r"|(def .+?)(?:@([0-9,]+))?)(?:/halves[0-9]+)?(?:/(?!constant_)(\w+))?(?:/constant_([ab]))?",
    re.ASCII,
)
_ALIGNMENTS = ("1", "2", "4", "8", "16")
_HAVING_ALIKE = re.compile(rf"\b(?:{'|'.join(name for name, row in TABLE.items() if row.alike)})\b")


def parse(text: str) -> Problem:
    """A problem whose `str` is `text`: contiguous matrices, except for a C that the text says is read by elements.

    Strides that the text leaves open are those of contiguous matrices. Products in groups may have scales of blocks of
    K, and no other program. Raises ValueError saying what is wrong with a text that no problem with something to
    multiply has.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError("expected '[Lx]MxNxK' and a signature, as cutegemm writes them")
    batch, m, n, k = (int(size or 1) for size in found.groups()[:4])
    for name, extent in (("the batch", batch), ("M", m), ("N", n), ("K", k)):
        if not 1 <= extent <= MAX_EXTENT:
            raise ValueError(f"{name} is {extent}, accepted are 1 to {MAX_EXTENT}")
    dtype, b_dtype, out_dtype, precision, a_major, align_a, b_major, align_b, align_c, align_d = found.groups()[4:14]
    activation, c_dtype, bias_axis, bias_dtype, program, aligns, work, constant = found.groups()[14:]
    if work not in (None, *WORKS):
        raise ValueError(f"work {work!r}, accepted are {', '.join(WORKS)}")
    work = work or DENSE
    count_a, count_b, count_d = (WORKS[work].matrices(operand, batch) for operand in "abd")
    for named in (dtype, b_dtype, out_dtype, c_dtype, bias_dtype):
        if named not in (None, *(TYPES if named is out_dtype else PRODUCTS)):
            raise ValueError(f"dtype {named!r}, accepted are {', '.join(PRODUCTS)}")
    if b_dtype is not None and (refused := why_not_multiplied(dtype, b_dtype)):
        raise ValueError(refused)
    if precision not in PRODUCTS[dtype].units:
        raise ValueError(f"precision {precision!r} of {dtype}, accepted are {', '.join(PRODUCTS[dtype].units)}")
    if refused := why_mixture_refused(dtype, out_dtype=out_dtype, c=c_dtype, bias=bias_dtype):
        raise ValueError(refused)
    epilogue = Epilogue(c_dtype, bias_dtype, bias_axis or "n", activation)
    if program is not None:
        epilogue = _with_program(program, aligns, out_dtype, n, work)
    if refused := epilogue.why_refused_for(dtype):
        raise ValueError(refused)
    a = _matrix(m, k, count_a, a_major == "k", _alignment("A", align_a, dtype))
    b = _matrix(k, n, count_b, b_major == "n", _alignment("B", align_b, b_dtype or dtype))
    d = _matrix(m, n // 2 if epilogue.gating else n, count_d, True, _alignment("D", align_d, out_dtype))
    c = None
    if c_dtype is not None and align_c == "0":
        c = Matrix(m, n, 2 * n, 2, 2 * m * n if count_d > 1 else 0, ITEMSIZE[c_dtype])
    elif c_dtype is not None:
        c = _matrix(m, n, count_d, True, _alignment("C", align_c, c_dtype))
    problem = Problem(
        m, n, k, batch, dtype, out_dtype, precision, a, b, c, d, epilogue, work,
        program_operands(epilogue, m, n, k, batch), program_outputs(epilogue, m, n, batch), b_dtype, constant or "",
    )  # fmt: skip
    if str(problem) != text:
        raise ValueError(f"it would be written {str(problem)!r}")
    return problem


def _with_program(text: str, aligns: str | None, out_dtype: str, n: int, work: str) -> Epilogue:
    """The epilogue of a program's text and of the alignment classes behind it, for a product with `n` columns.

    Raises ValueError where no call that is measured has it.
    """
    program = read_program(text)
    first = program.outputs[0]
    if (first.dtype, first.reduce) != (out_dtype, None) or any(output.dtype is None for output in program.outputs):
        raise ValueError(f"the program is {text!r}; accepted are a matrix in {out_dtype} and results of a dtype each")
    alone = all(given.scales for given in program.inputs) and len(program.outputs) == 1
    gated = program.gating and alone and work in (RAGGED_M, GATHERED)
    if work != DENSE and program != program.product and not gated:
        raise ValueError(
            f"the program is {text!r}; accepted of {work} products are scales of blocks of K alone"
            + (", and gate and up without operands" if work in (RAGGED_M, GATHERED) else "")
        )
    if program.gating and n % 2:
        raise ValueError(f"N is {n}; a program of gate and up takes an even number")
    if program.uses("partner") and (n // 2 if program.gating else n) % 2:
        raise ValueError(f"N is {n}; a program with partner takes an even number of columns of D")
    strange = [each for each in program.inputs if not each.scales and each.dtype not in (*TERMS, "int32")]
    if strange:
        raise ValueError(f"operand {strange[0].name} is {strange[0].dtype}, accepted are {', '.join(TERMS)} and int32")
    inputs = [(f"operand {each.name}", each.dtype) for each in program.inputs if each.varies == "mn"]
    outputs = [(f"result {i}", str(each.dtype)) for i, each in enumerate(program.outputs) if i and each.reduce is None]
    numbers = aligns.split(",") if aligns else []
    if len(numbers) != len(inputs) + len(outputs):
        raise ValueError(
            f"@{aligns or ''} has alignments of {len(numbers)} matrices, expected {len(inputs) + len(outputs)}: one "
            "for each matrix among the operands and among the results behind the first"
        )
    classes = [
        0 if number == "0" and place < len(inputs) else _alignment(name, number, dtype)
        for place, ((name, dtype), number) in enumerate(zip([*inputs, *outputs], numbers, strict=True))
    ]
    return Epilogue(custom=program, aligns=tuple(classes))


def _alignment(name: str, text: str, dtype: str) -> int:
    if text not in _ALIGNMENTS or int(text) < {**ITEMSIZE, **INTEGERS}[dtype]:
        raise ValueError(f"{name} is aligned to {text} bytes, accepted are 1, 2, 4, 8 and 16, and at least an element")
    return int(text)


def _matrix(rows: int, cols: int, batch: int, row_major: bool, align: int) -> Matrix:
    # A column-major matrix of one row has a leading dimension too: with a stride of 1 it would be row-major.
    strides = (cols, 1) if row_major else (1, max(rows, 2))
    return Matrix(rows, cols, *strides, rows * cols if batch > 1 else 0, align)


def other_16_bit(text: str) -> str:
    """The text of a signature or problem with fp16 for bf16 and bf16 for fp16: `DType.alike` for each dtype that has
    one.
    """
    return _HAVING_ALIKE.sub(lambda found: str(TABLE[found[0]].alike), text)
