"""`python -m cutegemm.emulator`: run a real kernel without a GPU, check its result, and print what it did."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from cutegemm.emulator import Report
    from cutegemm.emulator.workload import Workload
    from cutegemm.problem import Problem

DESCRIPTION = """\
Runs the compiled PTX of a kernel in the emulator: no GPU is needed. The result is compared with the float64
reference, every check is on (races, uninitialized reads, missing fences, bounds), and the profile counts what
the kernel did: instructions by class, shared-memory bank conflicts and global sectors by PTX line, bytes moved.

`cutegemm emulate` is the same command as `python -m cutegemm.emulator`."""

EXAMPLES = """\
examples:
  python -m cutegemm.emulator --backend cute --dtype fp16 --shape 256
  python -m cutegemm.emulator --backend cute --dtype fp16 --shape 200x136x72 --config sm80/64x64x32/w32x32/s3
  python -m cutegemm.emulator --backend legacy --dtype fp32 --shape 64x64x40 --majors tt --seed 3
  python -m cutegemm.emulator --ptx kernel.ptx
"""


MOST_BYTES = 4 << 30
"""Of a problem's matrices."""


def parser() -> argparse.ArgumentParser:
    from cutegemm import backend, problem

    out = argparse.ArgumentParser(
        "python -m cutegemm.emulator",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--backend", default="cute", choices=backend.WITH_KERNELS)
    products = tuple(problem.dtypes.PRODUCTS)
    out.add_argument("--dtype", default="fp16", choices=products, help="of A and B (default: fp16)")
    out.add_argument(
        "--out-dtype", choices=products, help="of D; by default as gemm has it: of fp8 bf16, of int8 int32"
    )
    out.add_argument("--precision", default="ieee", choices=problem.PRECISIONS, help="tf32: fp32 on tensor cores")
    out.add_argument(
        "--shape", default="256", metavar="MxNxK", help="in elements; one number for all three (default: 256)"
    )
    out.add_argument("--batch", type=int, default=1)
    out.add_argument("--majors", default="tn", choices=("tn", "tt", "nn", "nt"), help="BLAS letters (default: tn)")
    out.add_argument("--config", help="the backend's text form (default: its heuristic's choice)")
    out.add_argument(
        "--arch", help="an architecture of the table, such as sm_80 or H200 (default: CUTEGEMM_ARCH, or sm_90a)"
    )
    out.add_argument("--seed", default="0", help="draws operands and timing (default: 0)")
    out.add_argument("--no-checks", action="store_true", help="only out-of-bounds accesses and stuck kernels are found")
    out.add_argument("--lines", type=int, default=12, help="PTX lines to print per table (default: 12; 0 for all)")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    out.add_argument("--dump-ptx", metavar="FILE", help="write the kernel's PTX text there")
    out.add_argument("--ptx", metavar="FILE", help="inspect a PTX file instead: entries, instructions, synchronization")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 right, 1 wrong or a finding of the emulator, 2 bad arguments."""
    options = parser().parse_args(arguments)
    if options.ptx:
        return inspect(Path(options.ptx))
    from cutegemm.emulator import EmulationError
    from cutegemm.errors import GemmError

    try:
        return _emulate(options)
    except EmulationError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (ValueError, GemmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _emulate(options: argparse.Namespace) -> int:
    from cutegemm.choice import plan
    from cutegemm.emulator import Checks, bridge
    from cutegemm.emulator.workload import Workload, build, parse_shape
    from cutegemm.hardware import arch as arch_table
    from cutegemm.problem import Problem

    shape = parse_shape(options.shape)
    if 0 in shape[:2]:
        raise ValueError(f"--shape: got {options.shape!r}; M and N are at least 1, as an empty D needs no kernel")
    for name, least in (("batch", 1), ("lines", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name}: got {getattr(options, name)}, accepted is {least} or more")
    options.seed = bridge.seed_of("--seed", options.seed)
    arch = arch_table.get(options.arch) if options.arch else plan.emulated_arch()
    problem = Problem.of(
        *shape,
        options.dtype,
        majors=options.majors,
        batch=options.batch,
        out_dtype=options.out_dtype,
        precision=options.precision,
    )
    if problem.min_bytes > MOST_BYTES:
        raise ValueError(
            f"--shape: got {options.shape!r}, whose matrices take {problem.min_bytes / 2**30:.1f} GiB; accepted are "
            f"{MOST_BYTES / 2**30:.0f}, which the emulator takes hours for"
        )
    kernel = build(options.backend, problem, arch, options.config)
    if options.dump_ptx:
        try:
            Path(options.dump_ptx).write_text(kernel.ptx)
        except OSError as why:
            raise ValueError(f"--dump-ptx: {why}") from None
    work = Workload.of(problem, kernel, seed=options.seed)
    checks = Checks.none() if options.no_checks else None
    verdict, reports = work.run(seed=options.seed, checks=checks, profile=True)
    if options.json:
        print(json.dumps(_as_json(options, work, verdict, reports), indent=1))
    else:
        print(render(options.backend, arch.name, work, verdict, reports, options.lines))
    return 0 if verdict.ok else 1


def render(backend: str, arch: str, work: Workload, verdict: Any, reports: Sequence[Report], lines: int) -> str:
    """The whole report as text."""
    problem = work.problem
    seconds = sum(report.seconds for report in reports)
    rows = [
        ("kernel", f"{backend} {work.kernel.config} for {arch}"),
        ("problem", str(problem)),
        *((f"launch {i + 1}", str(launch)) for i, launch in enumerate(work.operations)),
        ("result", f"{'right' if verdict.ok else 'WRONG'}: {verdict.message}"),
        ("emulated in", f"{seconds:.2f} s, {problem.flops / max(seconds, 1e-9) / 1e6:.1f} Mflop/s"),
    ]
    parts = [tabulate(rows, tablefmt="plain")]
    for number, report in enumerate(reports):
        title = f"launch {number + 1}: " if len(reports) > 1 else ""
        parts.append(f"{title}instructions\n{instruction_table(report)}")
        parts.append(f"{title}memory\n{memory_table(report, problem if len(reports) == 1 else None)}")
        for name, table in (("bank conflicts", conflict_table), ("global sectors", sector_table)):
            parts.append(f"{title}{name} by PTX line\n{table(report, lines)}")
    return "\n\n".join(parts)


def instruction_table(report: Report) -> str:
    """Warp instructions by class, most first."""
    total = max(report.warp_instructions, 1)
    counts = sorted(report.instructions.items(), key=lambda item: -item[1])
    rows = [(name, count, f"{count / total:.1%}", f"{count / report.ctas:.1f}") for name, count in counts]
    rows.append(("all", report.warp_instructions, "", f"{report.warp_instructions / report.ctas:.1f}"))
    return tabulate(rows, ("class", "warp instructions", "share", "per CTA"), disable_numparse=True, colalign=_RIGHT3)


_RIGHT3 = ("left", "right", "right", "right")


def memory_table(report: Report, problem: Problem | None) -> str:
    """Bytes by path, sectors against ideal, and arithmetic intensity (flops per byte that crosses global memory)."""
    rows: list[tuple[str, str]] = [(kind, f"{count:,} B") for kind, count in sorted(report.bytes.items())]
    sectors, ideal = report.sectors
    if ideal:
        rows.append(("global sectors", f"{sectors:,} of 32 B; {ideal:,} would hold the bytes asked for"))
        rows.append(("coalescing", f"{ideal / sectors:.1%}"))
    rows.append(("bank conflicts", f"{report.bank_conflicts:,} extra passes over shared memory"))
    if problem is not None:
        moved = global_bytes(report)
        if moved:
            best = problem.flops / max(problem.min_bytes, 1)
            rows.append(("arithmetic intensity", f"{problem.flops / moved:.1f} flop/B requested; {best:.1f} at best"))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def global_bytes(report: Report) -> int:
    """Bytes that the kernel moves to or from global memory, by any path. Boxes of TMA count whole."""
    elsewhere = "shared", "local", "param", "wgmma"
    return sum(count for kind, count in report.bytes.items() if not kind.startswith(elsewhere))


def conflict_table(report: Report, limit: int) -> str:
    """The shared-memory instructions with the most bank conflicts."""
    rows = [r for r in report.lines.values() if r.shared_ideal]
    rows.sort(key=lambda r: (-r.bank_conflicts, r.line))
    body = [
        (r.line, _clip(r.text), r.executions, r.shared_wavefronts, r.shared_ideal, r.bank_conflicts)
        for r in rows[: limit or None]
    ]
    return tabulate(body, ("line", "instruction", "executed", "passes", "ideal", "conflicts")) if body else "none used"


def sector_table(report: Report, limit: int) -> str:
    """The global-memory instructions that touch the most sectors beyond the ideal."""
    rows = [r for r in report.lines.values() if r.sectors_ideal]
    rows.sort(key=lambda r: (r.sectors_ideal - r.sectors, r.line))
    body = [
        (r.line, _clip(r.text), r.executions, r.sectors, r.sectors_ideal, f"{r.sectors_ideal / max(r.sectors, 1):.0%}")
        for r in rows[: limit or None]
    ]
    header = ("line", "instruction", "executed", "sectors", "ideal", "coalescing")
    return tabulate(body, header) if body else "none used"


def _clip(text: str, width: int = 70) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _as_json(options: argparse.Namespace, work: Workload, verdict: Any, reports: Sequence[Report]) -> dict[str, Any]:
    return {
        "backend": options.backend,
        "config": str(work.kernel.config),
        "problem": str(work.problem),
        "seed": options.seed,
        "ok": verdict.ok,
        "error_of_bound": verdict.ratio,
        "launches": [str(launch) for launch in work.operations],
        "reports": [report.as_dict() for report in reports],
    }


def inspect(path: Path) -> int:
    """Prints what a PTX file holds: entries, opcodes, synchronization; and what of it the emulator cannot run."""
    from cutegemm.emulator import EmulationError, parse_module
    from cutegemm.emulator.entries import CaptureError, ptx_entries
    from cutegemm.emulator.mutate import mutations

    try:
        text = path.read_text()
        entries = ptx_entries(text)
        if not entries:
            raise CaptureError("it has no .entry, so it is no PTX of a kernel")
        module = parse_module(text)
    except (OSError, UnicodeDecodeError, CaptureError, EmulationError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 2
    rows = [
        (e.name, len(e.params), e.param_bytes, e.required_block or "any", e.required_cluster or "any", e.static_smem)
        for e in entries.values()
    ]
    print(tabulate(rows, ("entry", "parameters", "bytes", "block", "cluster", "static smem")))
    for name in module.entries:
        opcodes = Counter(instruction.op for instruction in module.kernel(name).instrs)
        table = [(opcode, count) for opcode, count in sorted(opcodes.items(), key=lambda item: (-item[1], item[0]))]
        print(f"\n{name}: {sum(opcodes.values())} instructions\n{tabulate(table, ('opcode', 'count'))}")
    sites = {(m.line, _clip(m.text, 100)) for m in mutations(text)}
    print(f"\nsynchronization\n{tabulate(sorted(sites), ('line', 'instruction')) if sites else 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
