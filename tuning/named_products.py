"""Products that a command line names, and the ways to each: torch's, ours, and ours by configurations that are named.

What `tuning.traffic` and `tuning.power` share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tuning import cli, suites


def add_options(made: argparse.ArgumentParser) -> None:
    """The options that `products` and `ways` read."""
    made.add_argument("--shapes", help="MxNxK, or one number for a square product; comma-separated")
    made.add_argument(
        "--entries", help=f"products in groups of suite `moe`, comma-separated, such as {next(iter(_entries()))!r}"
    )
    made.add_argument("--config", action="append", default=[], help="a configuration to run too; repeatable")
    made.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    made.add_argument("--majors", default="tn", choices=("tn", "tt", "nn", "nt"), help="of A and B, of --shapes alone")


def products(options: argparse.Namespace) -> list[str]:
    """What to compute, of `--shapes` and `--entries`. Raises ValueError naming what is not known."""
    found = ["x".join(map(str, shape)) for shape in suites.parse(options.shapes)] if options.shapes else []
    for text in options.entries.split(",") if options.entries else ():
        if text not in _entries():
            raise ValueError(f"--entries: got {text!r}, accepted are {', '.join(_entries())}")
        found.append(text)
    if not found:
        raise ValueError("name what to run: --shapes or --entries")
    cli.configurations(options.config)
    return list(dict.fromkeys(found))


def ways(product: str, options: argparse.Namespace) -> tuple[tuple[Any, Any], list[tuple[str, Callable[[], Any]]]]:
    """((A, B), (name, call) of each way), on operands drawn at random."""
    import torch

    import cutegemm
    from cutegemm.problem import Problem
    from tuning.bench_basis import Case
    from tuning.grouped_ways import FORWARD, LOOP, OURS, TORCH, Draw

    if product in _entries():
        known = FORWARD.ways(Draw(_entries()[product], 0, "cuda"), options.dtype, "tn")
        ours: Any = known[OURS].call
        a, b = ours.args[:2]
        others = [(name, known[name].call) for name in (LOOP, TORCH)]
    else:
        (shape,) = suites.parse(product)
        a, b = Case(Problem.of(*shape, options.dtype, majors=options.majors)).operands(0)
        others, ours = [("torch", partial(torch.mm, a, b))], partial(cutegemm.gemm, a, b)
    return (a, b), [*others, *_named(options.config, ours)]


def _named(configs: Sequence[str], call: Callable[..., Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "cutegemm", call
    for config in configs:
        yield config, partial(call, backend="cute", config=config)


def _entries() -> dict[str, suites.Experts]:
    """The entries of suite `moe` by the text of their sizes."""
    return {str(entry).split(" (")[0]: entry for entry in suites.MOE}
