"""Times `grouped_gemm` against torch's grouped_mm and a loop of torch.mm over the experts of published models.

Method as of tuning.bench: the providers are timed in one process, round by round in alternating order, as CUDA graphs
whose inputs rotate through three times the L2 cache; each result is checked first, against the loop in float64 (group
by group, so that it takes no more memory than a group). The rows of a group are drawn from a seed. The loop knows the
sizes on the host, which a real one would have to wait for. With `--config`, which may be given several times, the
configurations named are timed in the same rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

import cutegemm
from cutegemm import backend
from cutegemm.errors import UnsupportedError
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, grouped_request, reference, torch_dtype
from cutegemm.problem.work import RAGGED_M
from cutegemm.run import grouped
from cutegemm.tuner import timing
from tuning import cli, suites

Timer = Callable[[Mapping[str, Sequence[Callable[[], object]]], float, int], Mapping[str, timing.Timing]]
OTHERS = ("torch._grouped_mm", "loop")
ROUNDS = 9


def sizes(entry: suites.Experts, seed: int) -> list[int]:
    """Rows of each expert; they add up to the entry's."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(entry.experts)
    if entry.skew == "zipf":
        weights = 1 / torch.arange(1, entry.experts + 1)
        weights = weights[torch.randperm(entry.experts, generator=generator)]
    elif entry.skew == "one":
        weights = torch.zeros(entry.experts)
        weights[int(torch.randint(entry.experts, (), generator=generator))] = 1
    drawn = torch.multinomial(weights / weights.sum(), entry.rows, replacement=True, generator=generator)
    found: list[int] = drawn.bincount(minlength=entry.experts).tolist()
    return found


def problem(entry: suites.Experts, dtype: str = "bf16", majors: str = "tn") -> Problem:
    """The product of an entry, as the tuner knows it: by its totals."""
    return Problem.of(entry.rows, entry.n, entry.k, dtype, majors=majors, batch=entry.experts, work=RAGGED_M)


class Inputs:
    """One set of operands of an entry; the weights of all sets of one size are drawn once and copied."""

    def __init__(self, entry: suites.Experts, dtype: str, majors: str, seed: int, device: str) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        kind = torch_dtype(dtype)
        self.a = torch.randn(entry.rows, entry.k, device=device, generator=generator).to(kind)
        shape = (entry.experts, entry.n, entry.k) if majors[1] == "n" else (entry.experts, entry.k, entry.n)
        b = torch.empty(shape, dtype=kind, device=device)
        for each in b:
            each.copy_(torch.randn(each.shape, device=device, generator=generator))
        self.b = b.mT if majors[1] == "n" else b
        self.sizes = sizes(entry, seed)
        self.ends = torch.tensor(self.sizes, device=device).cumsum(0).int()
        self.out = torch.empty(entry.rows, entry.n, dtype=kind, device=device)

    def calls(self, configs: Sequence[str] = ()) -> dict[str, Callable[[], object]]:
        """One call of each provider, of which a configuration of "cute" is one; the loop writes into `out` too."""
        ours = partial(cutegemm.grouped_gemm, self.a, self.b, self.ends, out=self.out)
        found: dict[str, Callable[[], object]] = {"cutegemm": ours}
        found |= {config: partial(ours, backend="cute", config=config) for config in configs}
        if hasattr(torch, "_grouped_mm") and self.a.is_cuda:
            found["torch._grouped_mm"] = lambda: self.out.copy_(torch._grouped_mm(self.a, self.b, offs=self.ends))
            # Timed without the copy: torch has no `out`.
        found["loop"] = self.loop
        return found

    def timed(self, configs: Sequence[str] = ()) -> dict[str, Callable[[], object]]:
        found = self.calls(configs)
        if "torch._grouped_mm" in found:
            found["torch._grouped_mm"] = partial(torch._grouped_mm, self.a, self.b, offs=self.ends)
        return found

    def loop(self) -> None:
        begin = 0
        for weight, count in zip(self.b, self.sizes, strict=True):
            if count:
                torch.mm(self.a[begin : begin + count], weight, out=self.out[begin : begin + count])
            begin += count

    def verdict(self) -> str:
        """ "ok", or which group of `out` is wrong."""
        begin = 0
        for group, (weight, count) in enumerate(zip(self.b, self.sizes, strict=True)):
            rows = slice(begin, begin + count)
            checked = reference.check(self.out[rows], reference.expected(self.a[rows], weight))
            if not checked:
                return f"wrong: group {group}: {checked.message}"
            begin += count
        return "ok"


def bench(
    entry: suites.Experts, arch: Arch, dtype: str = "bf16", majors: str = "tn", rounds: int = ROUNDS,
    device: str = "cuda", timer: Timer = timing.interleaved, configs: Sequence[str] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each provider that serves the entry: its verdict, microseconds, and the ratio to the best of `OTHERS`.

    configs: texts of configurations of "cute", each a provider; the verdict of one that is refused says why.
    """
    asked = problem(entry, dtype, majors)
    count = timing.rotation(asked.min_bytes, arch.l2_bytes) if device == "cuda" else 1
    sets = [Inputs(entry, dtype, majors, seed, device) for seed in range(count)]
    verdicts = {}
    for name, call in sets[0].calls(configs).items():
        sets[0].out.fill_(float("nan"))
        try:
            call()
        except UnsupportedError as why:
            verdicts[name] = f"refused: {why}"
            continue
        verdicts[name] = sets[0].verdict()
    timed = [one.timed(configs) for one in sets]
    right = [name for name, verdict in verdicts.items() if verdict == "ok"]
    found = timer({name: [one[name] for one in timed] for name in right}, asked.flops, rounds)
    others = [found[name].us for name in right if name in OTHERS]
    rows = []
    for name, verdict in verdicts.items():
        row: dict[str, Any] = {"entry": str(entry), "provider": name, "verdict": verdict}
        if name in found:
            us = found[name].us
            row |= {"us": us, "tflops": found[name].tflops(asked.flops), "gb_per_s": asked.min_bytes / us / 1e3}
            if name not in OTHERS:
                config = chosen(sets[0]) if name == "cutegemm" else name
                row |= {"config": config, "ratio": min(others) / us if others else None}
        rows.append(row)
    return rows


def chosen(one: Inputs) -> str:
    """The configuration that `grouped_gemm` takes for these operands."""
    given = grouped_request.Sizes(one.ends)
    plan = grouped.plan_of(one.a, one.b, given, lambda acc: acc, (), one.out, None, None, "auto", None)
    return str(plan.choice.config or plan.choice.backend)


def main(arguments: list[str] | None = None) -> int:
    parser = cli.parser("grouped", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--majors", default="tn", choices=("tn", "tt"), help="tn: weights (G, N, K) as they are stored")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--config", action="append", default=[], help="a configuration to time too; repeatable")
    parser.add_argument("--only", help="entries whose text has this in it, such as 'Qwen3' or 'zipf'")
    options = parser.parse_args(arguments)
    for config in options.config:
        try:
            backend.get("cute").parse(config)
        except ValueError as why:
            parser.error(f"--config: {why}")
    wanted = [entry for entry in suites.MOE if options.only is None or options.only in str(entry)]
    if not wanted:
        parser.error(f"--only: no entry has {options.only!r} in it")
    if not torch.cuda.is_available():
        print("tuning.grouped times kernels on a GPU, and torch sees none here; tests.fuzz_groups emulates them")
        return 2
    print(timing.gpu_state())
    arch, rows = Arch.of_device(), []
    for number, entry in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {entry}", file=sys.stderr, flush=True)
        found = bench(entry, arch, options.dtype, options.majors, options.rounds, configs=options.config)
        for row in found:
            print("   ", *(f"{name} {row[name]}" for name in row if name != "entry"), file=sys.stderr, flush=True)
        rows += found
        torch.cuda.empty_cache()
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    ratios = torch.tensor([row["ratio"] for row in rows if row["provider"] == "cutegemm" and row.get("ratio")])
    if len(ratios):
        mean = ratios.log().mean().exp()
        print(f"against the best other: geometric mean {mean:.3f}, least {ratios.min():.3f}, {len(ratios)} entries")
    print(timing.gpu_state())
    return 0 if all(row["verdict"].split(":")[0] in ("ok", "refused") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
