"""The products of decoding as a captured chain, by cuBLAS and by ours: `python -m tuning.decode`.

A Llama-3-8B layer has four products for M tokens (N x K): query, key and value 6144 x 4096, the attention's output
4096 x 4096, gate and up 28672 x 4096, down 4096 x 14336. Each takes the first columns of what the one in front of it
gave, so that no two can run at the same time, and nothing else lies between them. A chain is a few layers with weights
of their own, more than three times the L2 cache. A CUDA graph holds it, as a program would capture it; chains take
turns in alternating order (`cutegemm.tuner.timing`). Every product is checked against the float64 reference of its own
operands before it is timed: a kernel that reads an operand before the one in front has written it would be found out.

Ways: cuBLAS (torch.mm), ours, and constant, which is ours with the promise that no running kernel writes the weights.
TB/s counts the bytes of the weights alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate

import cutegemm
from cutegemm.problem import DTYPES, reference, torch_dtype
from cutegemm.tuner import timing
from tuning import cli

LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(N, K) of the products of a Llama-3-8B layer, in their order."""
TOKENS = (1, 8, 16, 64)
TORCH = "cuBLAS"
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""product(x, weight, out): out = x @ weight^T"""


def ways(wanted: Sequence[str] = ("ours", "constant")) -> dict[str, Product]:
    """The ways to compute a product, cuBLAS first."""
    known: dict[str, Product] = {
        "ours": lambda x, weight, out: cutegemm.gemm(x, weight.t(), out=out),
        "constant": lambda x, weight, out: cutegemm.gemm(x, weight.t(), out=out, constant="b"),
    }
    return {TORCH: lambda x, weight, out: torch.mm(x, weight.t(), out=out), **{name: known[name] for name in wanted}}


@dataclass(frozen=True)
class Chain:
    """Weights (N, K) in their order, the first input, and room for what each product gives."""

    weights: list[torch.Tensor]
    first: torch.Tensor
    outs: list[torch.Tensor]

    @classmethod
    def draw(
        cls,
        tokens: int,
        dtype: torch.dtype,
        layers: int,
        device: str = "cuda",
        layer: Sequence[tuple[int, int]] = LAYER,
    ) -> Chain:
        """Normal weights of such a size that results keep the size of the inputs."""
        generator = torch.Generator(device=device).manual_seed(tokens)

        def normal(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, generator=generator)

        weights = [(normal(n, k) / math.sqrt(k)).to(dtype) for _ in range(layers) for n, k in layer]
        outs = [torch.empty(tokens, weight.shape[0], device=device, dtype=dtype) for weight in weights]
        return cls(weights, normal(tokens, layer[0][1]).to(dtype), outs)

    def inputs(self) -> list[torch.Tensor]:
        """What each product takes: the first columns of what the one in front of it gives."""
        before = [self.first, *self.outs[:-1]]
        return [given[:, : weight.shape[1]] for given, weight in zip(before, self.weights, strict=True)]

    def call(self, product: Product) -> Callable[[], None]:
        steps = list(zip(self.inputs(), self.weights, self.outs, strict=True))

        def run() -> None:
            for x, weight, out in steps:
                product(x, weight, out)

        return run

    def check(self, product: Product) -> str:
        """ "ok", or which product is wrong; every output is poisoned with NaN first."""
        for out in self.outs:
            out.fill_(math.nan)
        self.call(product)()
        for number, (x, weight, out) in enumerate(zip(self.inputs(), self.weights, self.outs, strict=True)):
            verdict = reference.check(out, reference.expected(x, weight.t()))
            if not verdict:
                return f"product {number}, {out.shape[0]}x{out.shape[1]}x{x.shape[1]}: {verdict.message}"
        return "ok"

    @property
    def flops(self) -> float:
        return 2.0 * self.first.shape[0] * sum(weight.numel() for weight in self.weights)

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return sum(weight.nbytes for weight in self.weights)


Row = tuple[int, str, str, timing.Timing | None, float, str]
"""(tokens, way, verdict, time of a layer, TB/s, the ratio to cuBLAS with its spread)"""


def measure(tokens: int, chain: Chain, products: Mapping[str, Product], rounds: int) -> list[Row]:
    """A row for each way."""
    verdicts = {name: chain.check(product) for name, product in products.items()}
    calls = {name: [chain.call(product)] for name, product in products.items() if verdicts[name] == "ok"}
    found = timing.interleaved(calls, chain.flops, rounds)
    rows: list[Row] = []
    for name, verdict in verdicts.items():
        timed, theirs = found.get(name), found.get(TORCH)
        ratio = ""
        if timed is not None and theirs is not None and name != TORCH:
            ratio = f"{theirs.us / timed.us:.3f} ({timed.spread(theirs)})"
        rate = chain.bytes / timed.us * 1e-6 if timed is not None else 0.0
        rows.append((tokens, name, verdict, timed, rate, ratio))
    return rows


def table(rows: Sequence[Row], layers: int) -> str:
    lines = [
        (tokens, name, f"{timed.us / layers:.2f}", f"{rate:.2f}", ratio) if timed else (tokens, name, verdict, "-", "-")
        for tokens, name, verdict, timed, rate, ratio in rows
    ]
    return tabulate(lines, headers=["M", "chain", "us a layer", "TB/s", "x cuBLAS (spread)"], disable_numparse=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every product was right."""
    made = cli.parser("decode", (__doc__ or "").split(":")[0] + ".")
    made.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="M, comma-separated (default 1,8,16,64)")
    made.add_argument("--layers", type=int, default=4, help="layers of a chain, each with its own weights (default 4)")
    made.add_argument("--rounds", type=int, default=15, help="measured rounds (default 15)")
    made.add_argument("--dtype", default="bf16", choices=[name for name in DTYPES if name != "fp32"])
    options = made.parse_args(arguments)
    try:
        tokens = [int(text) for text in options.tokens.split(",")]
    except ValueError:
        made.error(f"--tokens: got {options.tokens!r}, expected numbers, comma-separated")
    if min(tokens) < 1 or options.layers < 1 or options.rounds < 2:
        made.error("--tokens and --layers must be at least 1, --rounds 2")
    if not torch.cuda.is_available():
        print("tuning.decode times chains of products on a GPU, and torch sees none here", file=sys.stderr)
        return 2
    print(f"{timing.gpu_state()}; torch {torch.__version__}, {options.dtype}, {options.layers} layers a chain")
    rows: list[Row] = []
    for m in tokens:
        chain = Chain.draw(m, torch_dtype(options.dtype), options.layers)
        rows += measure(m, chain, ways(), options.rounds)
        print(f"M = {m} done", file=sys.stderr, flush=True)
        del chain
    print(table(rows, options.layers))
    print(timing.gpu_state())
    return 1 if any(row[2] != "ok" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
