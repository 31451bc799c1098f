"""Times `cutegemm.moe` against the compiled grouped_mm path of transformers: `python -m tuning.moe`.

    forward     of 1 to 8192 tokens, without gradients
    training    forward and backward, to gradients of x, of the routing's weights and of both weights of the experts

A block has 128 experts of which a token takes 8, 2048 -> 768 -> 2048 (Qwen3-30B-A3B), 8 of which it takes 2, 4096 ->
14336 -> 4096 (Mixtral-8x7B), or 32 of which it takes 4, 2880 -> 2880 -> 2880, with biases, a gate that clamps, and
weights that lie the other way with gate and up in turn (gpt-oss-20b). The choice of experts is an input, drawn evenly
or by a Zipf law. `torch` is the compiled baseline, `ours` calls `cutegemm.moe`, `compiled` is the same under
torch.compile. Every step is captured in a CUDA graph. With `--scaling` the forward pass is also timed in fp8: `Fp8MoE`
with scales of rows or of blocks of 128, which quantizes its inputs on the way; and so are DeepSeek-V3's 256 experts, of
which a token takes 8, 7168 -> 2048 -> 7168. Results and gradients must be as close to those in float32 as torch's are,
within a factor of two, in the root of the mean square; fp8 has a limit of its own. Variants take turns in alternating
order, as in tuning.blocks. Ratios are to `torch`, above 1 is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import cutegemm
from cutegemm.tuner import timing
from tuning import blocks, cli

FP8_ERROR = 0.1
"""Root of the mean square of a mixture in fp8, relative to float32: an e4m3 number is rounded by 3 % on average."""
AIMS = {False: 1.2, True: 1.15}
"""Ratios to torch that are wanted at every point: forward, and of training steps."""
LIMITED = cutegemm.gating.ClampedSwiglu(7.0, 1.702, 1.0)
"""The activation of gpt-oss."""
TOKENS = "1,4,16,32,64,128,256,512,1024,2048,4096,8192"
Step = Callable[..., torch.Tensor]
"""step(x, experts, weights, *what `weights_of` gives) -> the mixture"""


RESULTS = (
    "result", "gradient of x", "gradient of weights", "gradient of w_gate_up", "gradient of w_down",
    "gradient of b_gate_up", "gradient of b_down",
)  # fmt: skip


class Block(NamedTuple):
    """Of one model: experts, those that a token takes, width, hidden width of an expert.

    biased: whether experts have biases and are as those of gpt-oss besides, see `gated`.
    """

    name: str
    experts: int
    top_k: int
    width: int
    hidden: int
    biased: bool = False


BLOCKS = (
    Block("Qwen3-30B-A3B", 128, 8, 2048, 768), Block("Mixtral-8x7B", 8, 2, 4096, 14336),
    Block("gpt-oss-20b", 32, 4, 2880, 2880, biased=True),
)  # fmt: skip
IN_FP8 = (*BLOCKS, Block("DeepSeek-V3", 256, 8, 7168, 2048))
"""Those timed with `--scaling`."""


def gated(both: torch.Tensor, biased: bool) -> torch.Tensor:
    """The hidden layer of columns of gate and up; of experts with biases they take turns, and are limited."""
    if not biased:
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def grouped_mm(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, *biases: Any) -> torch.Tensor:
    """What the experts of transformers 5.23 compute with `experts_implementation="grouped_mm"`, in the same steps."""
    top_k, slots = experts.shape[1], experts.numel()
    numbers, order = torch.sort(experts.reshape(-1))
    counts = torch.histc(numbers.int() if x.is_cuda else numbers.float(), gate_up.shape[0], 0, gate_up.shape[0] - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    wide = functional.grouped_mm(x[order // top_k], gate_up if biases else gate_up.mT, offs=ends)
    wide = wide + biases[0][numbers] if biases else wide
    found = functional.grouped_mm(gated(wide, len(biases) > 0), down if biases else down.mT, offs=ends)
    found = found + biases[1][numbers] if biases else found
    found = found * weights.reshape(-1)[order, None]
    place = torch.empty_like(order)
    place[order] = torch.arange(slots, device=x.device)
    return found[place].view(-1, top_k, found.shape[1]).sum(1).to(x.dtype)


def ours(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, *biases: Any) -> torch.Tensor:
    """The same by `cutegemm.moe`."""
    if not biases:
        return cutegemm.moe(x, experts, weights, gate_up, down)
    return cutegemm.moe(
        x, experts, weights, gate_up.mT, down.mT, b_gate_up=biases[0], b_down=biases[1], interleaved=True,
        activation=LIMITED,
    )  # fmt: skip


def exact(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, *biases: Any) -> torch.Tensor:
    """The mixture in float32, expert by expert."""
    if not biases:
        gate_up, down = gate_up.mT, down.mT
    result = torch.zeros(x.shape[0], down.shape[2], device=x.device)
    for number in range(gate_up.shape[0]):
        token, choice = torch.where(experts == number)
        of_both, of_down = (each[number].float() for each in biases) if biases else (0, 0)
        both = x[token].float() @ gate_up[number].float() + of_both
        found = gated(both, len(biases) > 0) @ down[number].float() + of_down
        result = result.index_add(0, token, found * weights[token, choice, None].float())
    return result


def weights_of(block: Block, device: str, seed: int = 0) -> list[torch.Tensor]:
    """[w_gate_up, w_down] in bf16, which keep the size of what they multiply; where the block says so transposed, and
    with biases behind them.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    count, rows = block.experts, (2 * block.hidden, block.width)
    shapes = [(count, rows[0], block.width), (count, rows[1], block.hidden), *((count, each) for each in rows)]
    made = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes[: 4 if block.biased else 2]]
    for each in made:
        each.normal_(std=each.shape[2] ** -0.5 if each.dim() == 3 else 1.0, generator=generator)
    if block.biased:
        made[:2] = [each.mT.contiguous() for each in made[:2]]
    return [each.requires_grad_() for each in made]


def inputs_of(block: Block, tokens: int, skew: str, device: str, seed: int = 0) -> list[torch.Tensor]:
    """x in bf16, the experts of each token, and their weights in bf16, as Qwen3-MoE's router gives them."""
    generator = torch.Generator(device=device).manual_seed(seed)
    logits = torch.randn(tokens, block.experts, device=device, generator=generator)
    if skew == "zipf":
        ranks = torch.randperm(block.experts, device=device, generator=generator) + 1
        logits = logits - ranks.log()
    weights, experts = logits.softmax(-1).topk(block.top_k)
    weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
    x = torch.randn(tokens, block.width, device=device, generator=generator).bfloat16()
    return [x.requires_grad_(), experts, weights.requires_grad_()]


def steps_of(names: Sequence[str]) -> dict[str, Step]:
    """The variants by name."""
    torch._dynamo.reset()
    made: dict[str, Step] = {
        blocks.TORCH: torch.compile(grouped_mm, fullgraph=True, dynamic=False),
        "ours": ours,
        "compiled": torch.compile(ours, fullgraph=True, dynamic=False),
    }
    return {name: made[name] for name in names}


def in_fp8(recipes: Sequence[str], *experts: torch.Tensor) -> dict[str, Step]:
    """`Fp8MoE` with what `weights_of` gives, quantized here, by the recipe of its scales."""
    made: dict[str, Step] = {}
    gate_up, down, *biases = (each.detach() for each in experts)
    form: dict[str, Any] = {}
    if biases:
        form = {"b_gate_up": biases[0], "b_down": biases[1], "activation": LIMITED, "interleaved": True}
        form["transposed"] = True
    for recipe in recipes:
        layer = cutegemm.nn.Fp8MoE.from_weights(gate_up, down, scaling=recipe, **form)
        made[f"fp8 {recipe}"] = lambda x, experts, weights, *of_experts, layer=layer: layer(x, experts, weights)
    return made


def forward(step: Step, given: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """The result, without gradients."""

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return [step(*given)]

    return run


def training(step: Step, given: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """The result, and the gradients of its product with a fixed tensor."""
    upstream = torch.randn_like(given[0])
    inputs = [each for each in given if each.requires_grad]

    def run() -> list[torch.Tensor]:
        found = step(*given)
        return [found.detach(), *torch.autograd.grad(found, inputs, upstream.to(found.dtype))]

    return run


def difference(found: torch.Tensor, want: torch.Tensor) -> float:
    """The error relative to what is right, root of the mean square."""
    return float((found.float() - want.float()).norm() / want.float().norm())


def check(
    how: Callable[[Step, Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]], steps: Mapping[str, Step],
    given: Sequence[torch.Tensor], exact: Step = exact, names: Sequence[str] = RESULTS,
) -> dict[str, str]:  # fmt: skip
    """ "ok" or what is wrong with each variant, judged by `exact`, the same in float32, and by torch's error.

    names: of the results. Variants whose name begins with "fp8" may err by `FP8_ERROR`.
    """

    def results(step: Step) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return how(step, given)()

    want = results(exact)
    errors = {
        name: [difference(*pair) for pair in zip(results(step), want, strict=True)] for name, step in steps.items()
    }
    verdicts = {}
    for name, found in errors.items():
        wrong = [
            f"wrong {names[number]}: error {own:.2g}, torch's is {theirs:.2g}"
            for number, (own, theirs) in enumerate(zip(found, errors[blocks.TORCH], strict=True))
            if not own <= (FP8_ERROR if name.startswith("fp8") else 2 * theirs)
        ]
        verdicts[name] = wrong[0] if wrong else "ok"
    return verdicts


def bench(
    block: Block, tokens: Sequence[int], skew: str, trains: bool, names: Sequence[str], rounds: int,
    recipes: Sequence[str] = (),
) -> list[blocks.Line]:  # fmt: skip
    """The lines of the table for a block: forward, or training steps, of so many tokens. recipes: of scales in fp8."""
    lines: list[blocks.Line] = []
    how, word = (training, "training") if trains else (forward, "forward")
    experts = weights_of(block, "cuda")
    quantized = in_fp8(recipes, *experts)
    for count in tokens:
        given = [*inputs_of(block, count, skew, "cuda"), *experts]
        steps = {**steps_of(names), **quantized}
        verdicts = check(how, steps, given)
        graphs = {
            name: blocks.captured(how(steps[name], given)) for name, verdict in verdicts.items() if verdict == "ok"
        }
        found = blocks.in_turns(graphs, rounds)
        lines += (new := blocks.lines_of(f"{block.name}, {skew}, {word}, {count} tokens", found, verdicts))
        # A run that is stopped has said what it measured.
        print(
            f"{new[0].step}: " + ", ".join(f"{each.variant} {each.said}" for each in new), file=sys.stderr, flush=True
        )
        del graphs, given
        torch.cuda.empty_cache()
    return lines


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every variant was right."""
    made = cli.parser("moe", (__doc__ or "").split(":")[0] + ".")
    made.add_argument("--tokens", default=TOKENS, help=f"forward, comma-separated (default {TOKENS})")
    made.add_argument(
        "--train-tokens", default="4096", help="training steps, without --scaling, comma-separated (default 4096)"
    )
    made.add_argument("--skew", default="uniform,zipf", help="how experts are drawn (default uniform,zipf)")
    made.add_argument("--only", help="blocks whose name has this in it, such as 'Qwen3'")
    made.add_argument(
        "--scaling", help="also in fp8, forward alone, with scales of tensor, rows, blocks, comma-separated"
    )
    made.add_argument("--rounds", type=cli.count, default=9, help="measured rounds (default 9)")
    options = made.parse_args(arguments)
    try:
        tokens, train_tokens = ([int(text) for text in given.split(",") if text]
                                for given in (options.tokens, options.train_tokens))  # fmt: skip
    except ValueError:
        made.error("--tokens and --train-tokens: expected numbers, comma-separated")
    if wrong := [count for count in (*tokens, *train_tokens) if count < 1]:
        made.error(f"--tokens, --train-tokens: got {wrong[0]}, expected at least 1")
    skews = options.skew.split(",")
    if set(skews) - {"uniform", "zipf"}:
        made.error(f"--skew: got {options.skew!r}, accepted are uniform and zipf, comma-separated")
    recipes = options.scaling.split(",") if options.scaling else []
    if set(recipes) - {"tensor", "rows", "blocks"}:
        made.error(f"--scaling: got {options.scaling!r}, accepted are tensor, rows and blocks, comma-separated")
    wanted = [block for block in (IN_FP8 if recipes else BLOCKS) if options.only is None or options.only in block.name]
    if not wanted:
        made.error(f"--only: no block has {options.only!r} in its name")
    if not torch.cuda.is_available():
        print("tuning.moe times kernels on a GPU, and torch sees none here", file=sys.stderr)
        return 2
    print(f"{timing.gpu_state()}; torch {torch.__version__}, bf16")
    names = (blocks.TORCH, "ours", "compiled")
    lines: dict[bool, list[blocks.Line]] = {False: [], True: []}
    for block in wanted:
        for skew in skews:
            lines[False] += bench(block, tokens, skew, False, names, options.rounds, recipes)
            if not recipes:
                lines[True] += bench(block, train_tokens, skew, True, names, options.rounds)
    print(blocks.table([*lines[False], *lines[True]]))
    for trains, aim in AIMS.items():
        if said := blocks.summary(lines[trains], aim):
            print(f"{'training' if trains else 'forward'}:\n{said}")
    print(timing.gpu_state())
    return 1 if any(line.said.startswith("wrong") for each in lines.values() for line in each) else 0


if __name__ == "__main__":
    sys.exit(main())
