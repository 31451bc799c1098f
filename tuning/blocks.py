"""Four Llama-3-8B blocks with torch's linears and with ours: `python -m tuning.blocks`.

    decoding   one token for each of 1, 8 and 64 sequences behind a cache of 512 tokens, without gradients:
               eager, compiled (torch.compile), and as a CUDA graph of the eager step
    prefill    one sequence of 4096 tokens without gradients, in the same three ways
    training   forward and backward of one sequence of 256 and of 4096 tokens, eager

The blocks are written in torch here: RMS norm, rotary embedding, grouped attention by scaled_dot_product_attention with
a cache of keys and values, and the gated MLP. Variants share their weights: `torch` has torch.nn.Linear, `ours` the
same after `replace_linears`, `constant` (decoding only) after `replace_linears(constant_weights=True)`, `fp8` (with
`--fp8`, not in training) after `replace_linears(dtype="fp8", scaling="rows")`, `fp8-constant` (decoding only) that with
`constant_weights=True`. With `--mlps` there are also `mlps` and, with `--fp8`, `fp8-mlps`, after `replace_mlps` first.
A variant's results must be as close to those of the blocks in float32 as torch's are, within a factor of two; those of
variants in fp8 as the blocks in float32 are whose linears round their operands to fp8.
Variants take turns in alternating order; a round is a number of steps between two CUDA events, so that eager figures
hold the host's time. A round lasts 0.1 s. Where a step lasts a millisecond or more, a round lasts 2 s, and there are at
most three.
Ratios are to `torch`, above 1 is faster; their spread is the middle half of the rounds'.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch.nn import functional

import cutegemm
from cutegemm import native
from cutegemm.tuner import timing
from cutegemm.tuner.spread import order_of_round
from tuning import cli
from tuning.bench_report import ratios_text, short_text

TORCH, FP8, FP8_CONSTANT, MLPS, FP8_MLPS = "torch", "fp8", "fp8-constant", "mlps", "fp8-mlps"
ROUND_SECONDS, LONG_US = 0.1, 1000.0
"""Seconds of a round; microseconds of a step from which on the card runs into its power limit. Rounds of such steps
last as long as blocks of large products (`timing`)."""


@dataclass(frozen=True)
class Size:
    """Of Llama-3-8B: width, hidden width of the MLP, heads, heads of keys and values. Blocks; tokens in the cache."""

    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 4
    context: int = 512

    @property
    def head(self) -> int:
        return self.width // self.heads


class Mlp(torch.nn.Module):
    """The gated MLP, with the names that `cutegemm.nn.replace_mlps` knows."""

    def __init__(self, size: Size, **options: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(size.width, size.hidden, False, **options) for _ in range(2))
        self.down_proj = torch.nn.Linear(size.hidden, size.width, False, **options)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class Block(torch.nn.Module):
    """One block; `cache` holds keys and values of the sequences while it decodes."""

    def __init__(self, size: Size, **options: Any) -> None:
        super().__init__()
        self.size = size
        self.before_attention = torch.nn.RMSNorm(size.width, eps=1e-5, **options)
        self.before_mlp = torch.nn.RMSNorm(size.width, eps=1e-5, **options)

        def linear(columns: int, rows: int) -> torch.nn.Linear:
            return torch.nn.Linear(columns, rows, bias=False, **options)

        self.q, self.o = linear(size.width, size.width), linear(size.width, size.width)
        self.k, self.v = (linear(size.width, size.kv_heads * size.head) for _ in range(2))
        self.mlp = Mlp(size, **options)
        self.cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: (sequences, tokens, width). turn: cosines and sines of the tokens' positions."""
        size, y = self.size, self.before_attention(x)
        q, k, v = (
            each(y).unflatten(-1, (heads, size.head)).transpose(1, 2)
            for each, heads in ((self.q, size.heads), (self.k, size.kv_heads), (self.v, size.kv_heads))
        )
        q, k = _turned(q, turn), _turned(k, turn)
        if self.cache is not None:
            keys, values = self.cache
            keys[:, :, -1:].copy_(k)
            values[:, :, -1:].copy_(v)
            k, v = keys, values
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.cache is None, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return result


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The rotary embedding of (sequences, heads, tokens, head)."""
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


class Blocks(torch.nn.Module):
    """The blocks, one behind the other."""

    def __init__(self, size: Size, **options: Any) -> None:
        super().__init__()
        self.size = size
        self.blocks = torch.nn.ModuleList(Block(size, **options) for _ in range(size.layers))

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, turn)
        return x

    def remember(self, sequences: int, like: torch.Tensor, seed: int = 0) -> None:
        """Fills the caches of keys and values with random numbers for so many sequences; with 0 there are no caches."""
        size, generator = self.size, torch.Generator(device=like.device).manual_seed(seed)
        shape = (sequences, size.kv_heads, size.context, size.head)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.cache = None
            if sequences:
                keys, values = (
                    torch.randn(shape, device=like.device, generator=generator).to(like.dtype) for _ in range(2)
                )
                block.cache = keys, values


def positions(first: int, count: int, size: Size, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, (tokens, head)."""
    rates = 500000.0 ** (-torch.arange(0, size.head, 2, device=like.device) / size.head)
    angles = torch.arange(first, first + count, device=like.device)[:, None] * rates
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def variants(model: Blocks, names: Sequence[str]) -> dict[str, Blocks]:
    """The model under each name, with linears of its own over the same parameters."""
    found = {}
    for name in names:
        # A copy of the modules that shares the tensors.
        shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
        made = copy.deepcopy(model, shared)
        quantized: dict[str, Any] = {"dtype": "fp8", "scaling": "rows"} if name.startswith(FP8) else {}
        if name in (MLPS, FP8_MLPS):
            cutegemm.nn.replace_mlps(made, **quantized)
        if quantized:
            cutegemm.nn.replace_linears(made, **quantized, constant_weights=name == FP8_CONSTANT)
        elif name != TORCH:
            cutegemm.nn.replace_linears(made, constant_weights=name == "constant")
        found[name] = made
    return found


def difference(found: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, relative to the largest value."""
    return float((found.float() - want.float()).abs().max() / want.float().abs().max())


def check(models: Mapping[str, Blocks], x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> dict[str, str]:
    """ "ok" or what is wrong with each variant's step, judged by the blocks in float32."""
    wide = copy.deepcopy(models[TORCH]).float()
    for block in wide.blocks:
        assert isinstance(block, Block)
        block.cache = None if block.cache is None else tuple(each.float() for each in block.cache)
    with torch.no_grad():
        want = wide(x.float(), tuple(each.float() for each in turn))
        errors = {name: difference(model(x, turn), want) for name, model in models.items()}
        usual = dict.fromkeys(errors, (errors[TORCH], "torch's is"))
        if narrow := [name for name in models if name.startswith(FP8)]:
            round_linears(wide)
            rounded = wide(x.float(), tuple(each.float() for each in turn))
            usual |= dict.fromkeys(narrow, (difference(rounded, want), "that of rounded operands in float32 is"))
    verdicts = {}
    for name, error in errors.items():
        allowed, whose = usual[name]
        verdicts[name] = "ok" if error <= 2 * allowed else f"wrong: error {error:.2g}, {whose} {allowed:.2g}"
    return verdicts


def round_linears(model: Blocks) -> None:
    """Makes the linears round their weights and inputs to e4m3, with a scale for each row."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return cutegemm.dequantize(*cutegemm.quantize(x.flatten(0, -2), torch.float8_e4m3fn), dtype=x.dtype).view_as(x)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(rounded(module.weight))
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))


def inference(model: Blocks, x: torch.Tensor, turn: Any, how: str) -> Callable[[], object]:
    """A step without gradients: "eager", "compiled" or "graph"."""
    step: Callable[..., Any] = model if how != "compiled" else torch.compile(model, dynamic=False)

    def run() -> object:
        with torch.no_grad():
            return step(x, turn)

    return captured(run) if how == "graph" else run


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Replays of a CUDA graph of `run`, which runs three times before, so that all is compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with timing.no_garbage_collection(), torch.cuda.graph(graph):
        kept = run()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def training(model: Blocks, x: torch.Tensor, turn: Any) -> Callable[[], object]:
    """Forward and backward of the mean of squares; gradients are dropped before each step."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x, turn).float().square().mean().backward()

    return run


def in_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, timing.Timing]:
    """Microseconds of each step in rounds of alternating order: so many of `ROUND_SECONDS`, after a warm-up round, or
    where steps are long a few of `timing.BLOCK_SECONDS`, each with a warm-up of its own.
    """
    alone = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        alone[name] = elapsed(step, 3)
    long = max(alone.values(), default=0.0) >= LONG_US
    seconds, rounds = (timing.BLOCK_SECONDS, min(rounds, timing.MOST_BLOCKS)) if long else (ROUND_SECONDS, rounds)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(0 if long else -1, rounds):
        for name in order_of_round(list(steps), max(number, 0)):
            count = max(1, round(seconds * 1e6 / alone[name]))
            for _ in range(int(timing.UNSETTLED * count) if long else 0):
                steps[name]()
            us = elapsed(steps[name], count)
            if number >= 0:
                samples[name].append(us)
    return {
        name: timing.Timing(statistics.median(values), min(values), max(values), len(values), tuple(values))
        for name, values in samples.items()
    }


def elapsed(step: Callable[[], object], count: int) -> float:
    """Microseconds a step between two events, with an idle GPU before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / count


class Line(NamedTuple):
    """Of a table. said: milliseconds, or the verdict where there are none. ratio: to torch, of other variants."""

    step: str
    variant: str
    said: str
    ratio: float | None = None
    spread: str = ""


def lines_of(what: str, found: Mapping[str, timing.Timing], verdicts: Mapping[str, str]) -> list[Line]:
    """A line of the table for each variant."""
    theirs = found.get(TORCH)
    lines = []
    for name, verdict in verdicts.items():
        timed = found.get(name)
        line = Line(what, name, verdict if timed is None else f"{timed.us * 1e-3:.3f}")
        if timed is not None and theirs is not None and name != TORCH:
            line = line._replace(ratio=theirs.us / timed.us, spread=str(timed.spread(theirs)))
        lines.append(line)
    return lines


def table(lines: Sequence[Line]) -> str:
    rows = [(*line[:3], "" if line.ratio is None else f"{line.ratio:.3f}", line.spread) for line in lines]
    return tabulate(rows, headers=["step", "variant", "ms", "x torch", "spread"], disable_numparse=True)


def summary(lines: Sequence[Line], aim: float = 1.0) -> str:
    """For each variant the geometric mean of its ratios to torch, the least, and the steps below what is wanted."""
    found = []
    for name in dict.fromkeys(line.variant for line in lines):
        ratios = [(line.step, line.ratio) for line in lines if line.variant == name and line.ratio is not None]
        if ratios:
            found.append(f"{name}: x torch {ratios_text(ratios)}")
            found += [short] if (short := short_text(ratios, aim)) else []
    return "\n".join(found)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every variant was right."""
    made = cli.parser("blocks", (__doc__ or "").split(":")[0] + ".")
    made.add_argument("--sequences", default="1,8,64", help="batches of decoding, comma-separated (default 1,8,64)")
    made.add_argument("--prefill", default="4096", help="lengths of prompts, comma-separated (default 4096)")
    made.add_argument("--tokens", default="256,4096", help="lengths of training, comma-separated (default 256,4096)")
    made.add_argument("--fp8", action="store_true", help="without gradients also linears in fp8 with scales of rows")
    made.add_argument("--mlps", action="store_true", help="without gradients also the MLPs as one module each")
    made.add_argument("--rounds", type=cli.count, default=9, help="measured rounds (default 9)")
    made.add_argument("--layers", type=cli.count, default=4, help="blocks (default 4)")
    made.add_argument("--no-compile", action="store_true", help="without torch.compile")
    options = made.parse_args(arguments)
    try:
        sequences, prompts, tokens = ([int(text) for text in given.split(",") if text]
                                      for given in (options.sequences, options.prefill, options.tokens))  # fmt: skip
    except ValueError:
        made.error("--sequences, --prefill and --tokens: expected numbers, comma-separated")
    if not torch.cuda.is_available():
        print("tuning.blocks times a model on a GPU, and torch sees none here", file=sys.stderr)
        return 2
    print(f"{timing.gpu_state()}; torch {torch.__version__}, bf16, {options.layers} Llama-3-8B blocks")
    native.wait()  # a program has it from its first minute on
    print(f"host code: {native.status()}")
    torch.manual_seed(0)
    size = Size(layers=options.layers)
    model = Blocks(size, device="cuda", dtype=torch.bfloat16)
    lines: list[Line] = []
    ways = ("eager", "graph") if options.no_compile else ("eager", "compiled", "graph")
    more = [MLPS] * options.mlps + [FP8] * options.fp8 + [FP8_MLPS] * (options.fp8 and options.mlps)
    for decodes, count in (*((True, count) for count in sequences), *((False, count) for count in prompts)):
        batch, length, names = (count, 1, ["ours", "constant"]) if decodes else (1, count, ["ours"])
        if decodes and options.fp8:
            names.append(FP8_CONSTANT)
        x = torch.randn(batch, length, size.width, device="cuda", dtype=torch.bfloat16)
        turn = positions(size.context - 1 if decodes else 0, length, size, x)
        models = variants(model, (TORCH, *names, *more))
        for each in models.values():
            each.remember(count if decodes else 0, x)
        verdicts = check(models, x, turn)
        right = [name for name, verdict in verdicts.items() if verdict == "ok"]
        for how in ways:
            torch._dynamo.reset()
            steps = {name: inference(models[name], x, turn, how) for name in right}
            what = f"decoding, {how}, batch {count}" if decodes else f"prefill, {how}, {count} tokens"
            lines += lines_of(what, in_turns(steps, options.rounds), verdicts)
            print(table(lines[-len(verdicts) :]), file=sys.stderr, flush=True)
            del steps
        del models
    for count in tokens:
        x = torch.randn(1, count, size.width, device="cuda", dtype=torch.bfloat16)
        turn = positions(0, count, size, x)
        models = variants(model, (TORCH, "ours"))
        verdicts = check(models, x, turn)
        steps = {name: training(models[name], x, turn) for name, verdict in verdicts.items() if verdict == "ok"}
        lines += lines_of(f"training, {count} tokens", in_turns(steps, options.rounds), verdicts)
        print(table(lines[-len(verdicts) :]), file=sys.stderr, flush=True)
        del models, steps
    print(table(lines))
    print(summary(lines))
    print(timing.gpu_state())
    return 1 if any(line.said.startswith("wrong") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
