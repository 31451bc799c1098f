"""The console command `cutegemm`: every tool of the collection under one name.

`cutegemm NAME ...` is `python -m MODULE ...`; `cutegemm NAME --help` shows the options of that tool.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tuning import cli

TOOLS = {
    "sweep": ("tuning.sweep", "find the fastest configuration of a shape, for gemm to use"),
    "winners": ("tuning.winners", "list, export, import, prune and restamp what was measured"),
    "bench": ("tuning.bench", "time cutegemm beside torch and others: table, JSON, CSV, plot"),
    "grouped": ("tuning.grouped", "time products in groups beside torch's grouped_mm and a loop"),
    "fused": ("tuning.fused", "time epilogue programs beside torch eager and torch.compile"),
    "precision": ("tuning.precision", "error against time of float32's precisions"),
    "quantize": ("tuning.quantize", "time quantization beside a copy and torch.compile"),
    "explain": ("tuning.explain", "say which kernel gemm would run for a problem on a GPU, and why"),
    "ladder": ("tuning.ladder", "climb a teaching ladder: fp32, 16bit or hopper"),
    "traffic": ("tuning.traffic", "count the bytes that kernels move, with Nsight Compute"),
    "power": ("tuning.power", "clock, power and energy of products that run without a pause"),
    "occupancy": ("tuning.occupancy", "registers, shared memory, CTAs per SM, waves, roofline of a kernel"),
    "emulate": ("cutegemm.emulator.__main__", "run and profile one compiled kernel without a GPU"),
    "emit": ("cutegemm.cutlass2x.__main__", "print or compile a CUTLASS 2.x configuration"),
    "plot": ("tuning.plot", "draw what bench measured"),
    "decode": ("tuning.decode", "time chains of decoding products, also with constant weights"),
    "blocks": ("tuning.blocks", "time Llama blocks with torch's linears and with ours"),
    "mlp": ("tuning.mlp", "time forward and backward of a gated MLP beside torch.compile"),
    "moe": ("tuning.moe", "time a mixture of experts beside torch's grouped_mm under torch.compile"),
    "host-cost": ("tuning.host_cost", "host time of eager calls, of a choice, and of new shapes"),
    "exhaustive": ("tuning.exhaustive", "how far a sweep's choice is from the best of many configurations"),
    "untuned": ("tuning.untuned", "how far the heuristic's choice is from the tuned one, on random shapes"),
    "favourites": (
        "tuning.favourites",
        "time what the cost model likes best on random shapes, for calibrate and learn",
    ),
    "calibrate": ("tuning.calibrate", "fit the cost model to measured times"),
    "learn": ("tuning.learn", "learn from measured times what the cost model leaves unexplained"),
    "candidates": ("tuning.candidates", "choose the configurations that the heuristic compares"),
    "published": ("tuning.published", "time the published CUTLASS 2.x configurations"),
}
"""Name -> (module with `main(arguments)`, what it does)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool that the first argument names; returns its exit status, or 2 for a name that no tool has."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, *rest = given
    if name not in TOOLS:
        print(f"cutegemm: got {name!r}, accepted are {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(TOOLS[name][0]).main(rest)
        if sys.stdout is not None:  # which it is where the caller has closed it
            sys.stdout.flush()
    except BrokenPipeError:
        if cli.nobody_reads():
            return 1
        raise
    return status


def usage() -> str:
    """The text of `cutegemm --help`."""
    width = max(map(len, TOOLS))
    lines = (f"  {name:<{width}}  {text}" for name, (_, text) in TOOLS.items())
    return "\n".join(["usage: cutegemm NAME [options]; cutegemm NAME --help shows the options", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
