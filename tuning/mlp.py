"""Times forward and backward of a gated MLP beside torch.compile: `python -m tuning.mlp`.

y = down(silu(gate(x)) * up(x)), 2048 -> 5504 -> 2048, in bf16, with the gradients of x and of both weights. Variants:

    torch      one product with the stacked weight [gate; up] and one with down, under torch.compile
    apart      the same with two products for gate and up, as models of Hugging Face have it
    ours       `cutegemm.nn.SwiGLU`
    compiled   the same under torch.compile

Every step is captured in a CUDA graph. Results and gradients must be as close to those in float32 as torch's are, as in
tuning.moe. Variants take turns in alternating order. Ratios are to `torch`, above 1 is faster.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

import cutegemm
from cutegemm.tuner import timing
from tuning import blocks, cli, moe

WIDTH, HIDDEN = 2048, 5504
AIMS = {256: 1.15, 4096: 1.03}
"""Ratios to torch that are wanted, by the number of tokens."""
RESULTS = ("result", "gradient of x", "gradient of gate_up_weight", "gradient of down_weight")


def stacked(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The MLP by two products. x: (M, width). gate_up: (2 hidden, width). down: (width, hidden)."""
    gate, up = functional.linear(x, gate_up).chunk(2, -1)
    return functional.linear(functional.silu(gate) * up, down)


def apart(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The MLP by three products."""
    gate, up = (functional.linear(x, each) for each in gate_up.chunk(2))
    return functional.linear(functional.silu(gate) * up, down)


def exact(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The MLP in float32."""
    return stacked(x.float(), gate_up.float(), down.float())


def inputs_of(tokens: int, width: int, hidden: int, device: str, seed: int = 0) -> list[torch.Tensor]:
    """x and both weights in bf16, of normal numbers that keep the size of what they multiply."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = (tokens, width), (2 * hidden, width), (width, hidden)
    scales = 1.0, width**-0.5, hidden**-0.5
    drawn = (
        torch.randn(shape, device=device, generator=generator).mul_(scale).bfloat16()
        for shape, scale in zip(shapes, scales, strict=True)
    )
    return [torch.nn.Parameter(each) for each in drawn]


def ours(given: list[torch.Tensor]) -> moe.Step:
    """Our module with these weights, as a step of (x, gate_up, down)."""
    _, gate_up, down = given
    module = cutegemm.nn.SwiGLU(gate_up.shape[1], down.shape[1], device="meta")
    module.gate_up_weight, module.down_weight = gate_up, down
    return lambda x, *weights: module(x)


def steps_of(given: list[torch.Tensor], compiles: bool) -> dict[str, moe.Step]:
    """The variants by name."""
    torch._dynamo.reset()
    if not compiles:
        return {blocks.TORCH: stacked, "apart": apart, "ours": ours(given)}
    faster = {
        name: torch.compile(step, fullgraph=True, dynamic=False)
        for name, step in ((blocks.TORCH, stacked), ("apart", apart), ("compiled", ours(given)))
    }
    return {blocks.TORCH: faster[blocks.TORCH], "apart": faster["apart"], "ours": ours(given)} | faster


def check(steps: dict[str, moe.Step], given: list[torch.Tensor]) -> dict[str, str]:
    """ "ok" or what is wrong with each variant."""
    return moe.check(moe.training, steps, given, exact, RESULTS)


def bench(tokens: int, rounds: int) -> list[blocks.Line]:
    """The lines of the table for so many tokens."""
    print(f"{tokens} tokens", file=sys.stderr, flush=True)
    given = inputs_of(tokens, WIDTH, HIDDEN, "cuda")
    steps = steps_of(given, True)
    verdicts = check(steps, given)
    graphs = {
        name: blocks.captured(moe.training(steps[name], given)) for name, verdict in verdicts.items() if verdict == "ok"
    }
    return blocks.lines_of(f"{tokens} tokens", blocks.in_turns(graphs, rounds), verdicts)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every variant was right."""
    made = cli.parser("mlp", (__doc__ or "").split(":")[0] + ".")
    made.add_argument("--tokens", default="256,4096", help="rows of x, comma-separated (default 256,4096)")
    made.add_argument("--rounds", type=cli.count, default=9, help="measured rounds (default 9)")
    options = made.parse_args(arguments)
    try:
        counts = [int(text) for text in options.tokens.split(",")]
    except ValueError:
        made.error(f"--tokens: got {options.tokens!r}, expected numbers, comma-separated")
    if min(counts) < 1:
        made.error(f"--tokens: got {options.tokens!r}, expected numbers from 1 on")
    if not torch.cuda.is_available():
        print("tuning.mlp times kernels on a GPU, and torch sees none here", file=sys.stderr)
        return 2
    print(f"{timing.gpu_state()}; torch {torch.__version__}, bf16, {WIDTH} -> {HIDDEN} -> {WIDTH}")
    lines = {count: bench(count, options.rounds) for count in counts}
    print(blocks.table([line for each in lines.values() for line in each]))
    for count, found in lines.items():
        print(f"{count} tokens:\n{blocks.summary(found, AIMS.get(count, 1.0))}")
    print(timing.gpu_state())
    return 1 if any(line.said.startswith("wrong") for each in lines.values() for line in each) else 0


if __name__ == "__main__":
    sys.exit(main())
