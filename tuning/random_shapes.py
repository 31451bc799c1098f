"""Random shapes for judging a choice and for teaching it: `--drawn sizes`, `layers`, `others` or `gated`, and with
`--flops` those of so many flop alone.

The same seed draws the same shapes. A seed that judged once, or that times were learned from, judges no more. Two draws
of layers share some shapes, whatever their seeds, because there are few models. So what was learned from `layers` is
judged by `others`, the layers of other models. `gated` has weights of both.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem

SMALLEST, LARGEST, STEP, ROW_BYTES = 16, 32768, 8, 16
MOST_SECONDS = 0.7e-3
"""Of the roofline bound."""
MOST_BYTES = 2e9
MOST_TOKENS = 8192
MOST_SECONDS_OF_A_LAYER = 3e-3
SHARDS = (1, 2, 4, 8)
"""Numbers of GPUs that an MLP is divided among."""
MOST_DRAWS = 20000
"""For each problem that is asked for."""

Flops = tuple[float, float]
"""The least and the most of a problem."""
ANY: Flops = (0.0, math.inf)

MODELS = {
    "gpt2": (768, 2304, 768, 3072, 0),
    "gpt2-xl": (1600, 4800, 1600, 6400, 0),
    "bert-base": (768, 2304, 768, 3072, 0),
    "vit-large": (1024, 3072, 1024, 4096, 0),
    "llama-2-7b": (4096, 12288, 4096, 11008, 32000),
    "llama-2-13b": (5120, 15360, 5120, 13824, 32000),
    "llama-3.1-8b": (4096, 6144, 4096, 14336, 128256),
    "llama-3.1-70b": (8192, 10240, 8192, 28672, 128256),
    "llama-3.2-1b": (2048, 3072, 2048, 8192, 128256),
    "llama-3.2-3b": (3072, 5120, 3072, 8192, 128256),
    "mistral-7b": (4096, 6144, 4096, 14336, 32000),
    "phi-3-mini": (3072, 9216, 3072, 8192, 32064),
    "gemma-2-9b": (3584, 8192, 4096, 14336, 256000),
    "qwen2.5-0.5b": (896, 1152, 896, 4864, 151936),
    "qwen2.5-1.5b": (1536, 2048, 1536, 8960, 151936),
    "qwen2.5-7b": (3584, 4608, 3584, 18944, 152064),
    "qwen2.5-14b": (5120, 7168, 5120, 13824, 152064),
    "qwen2.5-32b": (5120, 7168, 5120, 27648, 152064),
    "qwen2.5-72b": (8192, 10240, 8192, 29568, 152064),
}
"""Width of the model, of queries with keys and values, of attention's output, of the feed-forward, and the vocabulary
(0: none, or no multiple of 8), from their config.json on huggingface.co."""
OTHER_MODELS = {
    "opt-6.7b": (4096, 12288, 4096, 16384, 50272),
    "opt-2.7b": (2560, 7680, 2560, 10240, 50272),
    "gemma-2-2b": (2304, 4096, 2048, 9216, 256000),
    "gemma-2-27b": (4608, 8192, 4096, 36864, 256000),
    "phi-3-medium": (5120, 7680, 5120, 17920, 32064),
    "yi-34b": (7168, 9216, 7168, 20480, 64000),
    "internlm2-20b": (6144, 8192, 6144, 16384, 92544),
    "stablelm-3b": (2560, 7680, 2560, 6912, 50304),
    "whisper-large": (1280, 3840, 1280, 5120, 0),
    "granite-3-8b": (4096, 6144, 4096, 12800, 0),
}
"""The same of models that no times were learned from. What they share with `MODELS` is not drawn."""


def sizes(
    count: int, seed: int, dtype: str, majors: str, arch: Arch, precision: str = "ieee", flops: Flops = ANY
) -> list[Problem]:
    """Different problems: sizes log-uniform, multiples of 8, the roofline bound under `MOST_SECONDS`. Here and in
    `layers` and `others`, A and B have rows of whole multiples of `ROW_BYTES`.

    Raises:
        ValueError: of the problems drawn hardly any has so many flop.
    """
    source = random.Random(seed)
    low, high = math.log(SMALLEST), math.log(LARGEST)

    def shapes() -> Iterator[tuple[int, int, int]]:
        while True:
            m, n, k = (STEP * round(math.exp(source.uniform(low, high)) / STEP) for _ in range(3))
            yield m, n, k

    return _different(shapes(), count, dtype, majors, arch, MOST_SECONDS, precision, flops)


def layers(
    count: int, seed: int, dtype: str, majors: str, arch: Arch, precision: str = "ieee", flops: Flops = ANY
) -> list[Problem]:
    """Different products of the linear layers of `MODELS`, for up to `MOST_TOKENS` tokens, many of them powers of two.

    With the majors "tn" a layer runs forward, with "tt" it passes gradients back (N and K in exchange, the weight
    row-major), with "nt" it is the gradient of a weight (the tokens are K), and with "nn" it has columns of
    activations. Tokens of the last two are multiples of 8.
    """
    return _layers(_weights(MODELS), count, seed, dtype, majors, arch, precision, flops)


def others(
    count: int, seed: int, dtype: str, majors: str, arch: Arch, precision: str = "ieee", flops: Flops = ANY
) -> list[Problem]:
    """The same of `OTHER_MODELS`."""
    known = set(_weights(MODELS))
    new = [pair for pair in _weights(OTHER_MODELS) if pair not in known]
    return _layers(new, count, seed, dtype, majors, arch, precision, flops)


def gated(
    count: int, seed: int, dtype: str, majors: str, arch: Arch, precision: str = "ieee", flops: Flops = ANY
) -> list[Problem]:
    """The first products of gated MLPs of both kinds of models, whole or divided among `SHARDS` GPUs along the
    hidden features; N counts the columns of gate and up."""
    models = (*MODELS.values(), *OTHER_MODELS.values())
    weights = [(2 * feed // by, width) for width, *_, feed, _ in models for by in SHARDS if feed % (STEP * by) == 0]
    return _layers(list(dict.fromkeys(weights)), count, seed, dtype, majors, arch, precision, flops)


KINDS = {"sizes": sizes, "layers": layers, "others": others, "gated": gated}


def followed(problem: Problem, program: str | None, blocks: bool = False) -> Problem:
    """The same product with an epilogue. program: a name of `tuning.epilogues`, None for none. blocks: with scales of
    blocks, as `in_blocks`; then the program has no operands.

    Raises:
        ValueError: the dtype has no scales, or the program does not go with these sizes.
    """
    from tuning import epilogues

    if blocks:
        return in_blocks(problem, program)
    if program is None:
        return problem
    (named,) = epilogues.named(program)
    signature = problem.signature
    return epilogues.problem(
        named, problem.m, problem.n, problem.k, problem.dtype, majors=signature.majors, precision=signature.precision
    )


def in_blocks(problem: Problem, program: str | None = None) -> Problem:
    """The same to bf16, with scales of blocks: 1 x 128 of A and 128 x 128 of B. program: the name of an epilogue of
    `tuning.epilogues` that is applied to the scaled product; None for none.

    Raises:
        ValueError: the dtype has no scales.
    """
    from cutegemm.problem import Problem, scaling
    from cutegemm.problem.epilogue import Epilogue
    from tuning import epilogues

    behind = None if program is None else epilogues.without_operands(program, "bf16")
    custom = scaling.of_blocks(problem.dtype, "bf16", problem.work, behind)
    epilogue, majors = Epilogue(custom=custom), problem.signature.majors
    return Problem.of(
        problem.m, problem.n, problem.k, problem.dtype, majors=majors, out_dtype="bf16", epilogue=epilogue
    )


def add_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup, of: str = "") -> None:
    """`--drawn`, a name of `KINDS`, and `--flops`; `of` is the option that they belong to."""
    parser.add_argument(
        "--drawn",
        choices=KINDS,
        default="sizes",
        help=f"at random{of}: any sizes (default), layers of models, or of others, which nothing was learned from, or "
        "first products of gated MLPs, whole or divided among GPUs",
    )
    parser.add_argument(
        "--flops",
        metavar="FIRST..LAST",
        type=_span,
        default=ANY,
        help=f"of so many flop alone{of}, such as 1e10..1e11",
    )


def drawn(
    options: argparse.Namespace, count: int, seed: int, majors: str, arch: Arch, precision: str = "ieee"
) -> list[Problem]:
    """What the options of `add_option` ask for, in `options.dtype`; ends the command with 2 where hardly any problem
    has so many flop as `--flops` says."""
    try:
        return KINDS[options.drawn](count, seed, options.dtype, majors, arch, precision, options.flops)
    except ValueError as why:
        print(f"--flops: {why}", file=sys.stderr)
        raise SystemExit(2) from why


def _span(text: str) -> Flops:
    try:
        first, last = map(float, text.split(".."))
    except ValueError:
        first, last = math.nan, math.nan
    if not 0 <= first <= last:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted are two numbers of flop such as 1e10..1e11")
    return first, last


def _weights(models: Mapping[str, tuple[int, int, int, int, int]]) -> list[tuple[int, int]]:
    """(N, K) of the models' linear layers, each once; of the feed-forward as if gate and up lay side by side."""
    found: dict[tuple[int, int], None] = {}
    for width, qkv, attended, feed, vocabulary in models.values():
        found |= dict.fromkeys(((qkv, width), (width, attended), (feed, width), (2 * feed, width), (width, feed)))
        if vocabulary:
            found[vocabulary, width] = None
    return list(found)


def _layers(
    weights: Sequence[tuple[int, int]],
    count: int,
    seed: int,
    dtype: str,
    majors: str,
    arch: Arch,
    precision: str,
    flops: Flops,
) -> list[Problem]:
    source = random.Random(f"layers {seed}")

    def shapes() -> Iterator[tuple[int, int, int]]:
        while True:
            n, k = source.choice(weights)
            tokens = round(2 ** source.uniform(0, math.log2(MOST_TOKENS)))
            if source.random() < 0.5:
                tokens = 1 << (tokens - 1).bit_length()
            if majors[0] == "n":
                tokens = STEP * -(-tokens // STEP)
            yield (n, k, tokens) if majors == "nt" else (tokens, k, n) if majors == "tt" else (tokens, n, k)

    return _different(shapes(), count, dtype, majors, arch, MOST_SECONDS_OF_A_LAYER, precision, flops)


def _different(
    shapes: Iterator[tuple[int, int, int]],
    count: int,
    dtype: str,
    majors: str,
    arch: Arch,
    most: float,
    precision: str,
    flops: Flops,
) -> list[Problem]:
    from cutegemm.hardware.roofline import roofline
    from cutegemm.problem import Problem

    found: dict[str, Problem] = {}
    least_flops, most_flops = flops
    for m, n, k in itertools.islice(shapes, MOST_DRAWS * count):
        if len(found) == count:
            break
        if not least_flops <= 2.0 * m * n * k <= most_flops:
            continue
        problem = Problem.of(m, n, k, dtype, majors=majors, precision=precision)
        if min(problem.signature.align_a, problem.signature.align_b) < ROW_BYTES:
            continue
        if problem.min_bytes <= MOST_BYTES and roofline(problem, arch).bound_s <= most:
            found[str(problem)] = problem
    if len(found) < count:
        raise ValueError(
            f"of {MOST_DRAWS * count} shapes drawn {len(found)} have {least_flops:g} to {most_flops:g} flop and serve; "
            f"{count} were asked for"
        )
    return list(found.values())
