"""Which kernel `gemm` would run for a problem, and why, without tensors and without a GPU.

python -m tuning.explain --shapes 4096x4096x4096 --dtype bf16 --gpu H200
python -m tuning.explain --shapes 8192x28672x4096 --batch 8 --work ragged_m --dtype e4m3 --scaling blocks
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cutegemm.backend import NAMES
from cutegemm.choice import plan as planning
from cutegemm.choice import prepared
from cutegemm.choice.plan import Plan
from cutegemm.errors import GemmError
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import PRECISIONS
from cutegemm.problem.dtypes import PRODUCTS
from cutegemm.problem.epilogue import ACTIVATIONS
from tuning import cli, posed, suites


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns 0, or 2 for what the command line or a backend refuses."""
    parser = cli.parser("explain", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", required=True, help="MxNxK, or one number for a square product; several by commas")
    parser.add_argument("--batch", type=int, default=1, help="matrices, or groups of a work")
    parser.add_argument("--work", default="dense", choices=("dense", "ragged_m", "ragged_n", "ragged_k", "gathered_m"),
                        help="groups that divide M, N or K, which the shapes then have the totals of")  # fmt: skip
    parser.add_argument("--scaling", choices=("tensor", "rows", "blocks"), help="of fp8 and int8: blocks has scales of "
                        "1 x 128 of A and 128 x 128 of B; tensor and rows choose as without")  # fmt: skip
    parser.add_argument("--epilogue", metavar="NAME", help="an epilogue program; N counts gate and up: swiglu, geglu, "
                        "gelu_bias_residual, ... (another name gets the list); several by commas")  # fmt: skip
    parser.add_argument("--dtype", choices=tuple(PRODUCTS), default="bf16")
    parser.add_argument(
        "--out-dtype", choices=tuple(PRODUCTS), help="by default as gemm has it: of fp8 bf16, of int8 int32"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="ieee", help="fast of fp8, the others of fp32")
    parser.add_argument(
        "--majors",
        default="tn",
        choices=["tn", "tt", "nn", "nt"],
        help="BLAS letters of A and B: tn has both along K (default: tn)",
    )
    parser.add_argument("--c", action="store_true", help="add beta * C, of D's dtype")
    parser.add_argument("--bias", action="store_true", help="add a bias of D's dtype")
    parser.add_argument("--activation", choices=ACTIVATIONS)
    parser.add_argument("--gpu", default="H200", help=f"one of {', '.join(arch_table.ARCHS)} (default: H200)")
    parser.add_argument("--backend", choices=NAMES, default="auto")
    parser.add_argument("--config", help="a configuration; by default gemm's choice")
    options = parser.parse_args(arguments)
    out = options.out_dtype or PRODUCTS[options.dtype].output
    options.c, options.bias, options.constant = out if options.c else None, out if options.bias else None, ""
    try:
        arch = arch_table.get(options.gpu)
    except ValueError:
        accepted = ", ".join(arch_table.ARCHS)
        print(f"{parser.prog}: --gpu: got {options.gpu!r}, accepted are {accepted}", file=sys.stderr)
        return 2
    try:
        # gemm copies what lies otherwise of 8-bit operands before anything is chosen.
        copied = options.majors != "tn" and PRODUCTS[options.dtype].itemsize == 1
        shapes = [suites.Laid(shape, "tn" if copied else options.majors) for shape in suites.parse(options.shapes)]
        for number, problem in enumerate(posed.problems(options, [options.dtype], shapes)):
            problem, choice, asked = prepared.choose(problem, arch, options.backend, options.config)
            plan = Plan(problem, choice, arch, None, preparations=tuple((each, None) for each in asked))
            print("\n" * bool(number) + planning.describe(plan))
            if copied:
                print(f"copied first: {options.majors} is shown as tn, which gemm makes of 8-bit operands by a copy")
    except (ValueError, KeyError, GemmError) as why:
        print(f"{parser.prog}: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
