"""Where the error of fp32 products from parts comes from: `python -m tuning.part_sums`; no GPU is needed.

A model of the sums alone: WGMMA by the emulator's rules (`tensor_cores.add_products`), promotions in NumPy. So K =
65536 takes seconds, where the whole emulator takes hours. `WAYS` has what the kernels do, `plain` and `compensated`, to
the bit (tests/emulated compare them), and what else was tried (docs/precision.md). SGEMM is modelled as chains of fused
multiply-adds, each over a share of K, whose sums are added; errors are those of `tuning.precision`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tabulate import tabulate

from cutegemm.emulator import tensor_cores
from cutegemm.problem.parts import TABLE
from tuning.precision import INPUTS, error, inputs

TILE = 32
"""Elements of K of a k tile."""
SIZES = {64: (128, 96), 264: (128, 96), 1024: (96, 64), 4096: (48, 32), 65536: (24, 16)}
"""Rows and columns of the results that are modelled, by K."""


def split(x: np.ndarray, precision: str, ties_away: bool = False) -> list[np.ndarray]:
    """The parts of fp32 numbers, as `cute.splitter` makes them of normal numbers: each rounded to nearest, ties to even
    or away from zero.
    """
    parts, rest = TABLE["fp32", precision], np.ascontiguousarray(x, np.float32)
    out = []
    for _ in range(parts.count):
        bits = rest.view(np.uint32)
        low = 16 if parts.element == "bf16" else 13
        tie = np.uint32(1) if ties_away else bits >> np.uint32(low) & np.uint32(1)
        rounded = bits + np.uint32((1 << (low - 1)) - 1) + tie
        out.append((rounded & ~np.uint32((1 << low) - 1)).view(np.float32))
        rest = rest - out[-1]
    return out


class Tiles:
    """The products of A (m, k) and B (k, n), fp32, whose partial sums of each k tile are computed at once.

    instruction, architecture: who adds, see `tensor_cores.RULES`; for "mma" ties of tf32 are rounded away from zero.
    """

    def __init__(
        self, a: np.ndarray, b: np.ndarray, precision: str, instruction: str = "wgmma", architecture: str = "hopper"
    ) -> None:
        self.terms = TABLE["fp32", precision].terms
        self.kind = "tf32" if precision == "tf32x3" else "bf16"
        self.rule = tensor_cores.RULES[instruction, self.kind, architecture]
        away = instruction == "mma" and self.kind == "tf32"
        beyond = -a.shape[1] % TILE
        a, b = np.pad(a, ((0, 0), (0, beyond))), np.pad(b, ((0, beyond), (0, 0)))
        self.a = [part.reshape(len(a), -1, TILE).transpose(1, 0, 2) for part in split(a, precision, away)]
        self.b = [part.reshape(-1, TILE, b.shape[1]) for part in split(b, precision, away)]

    def small(self, first: int = 0, last: int = TILE) -> np.ndarray:
        """Partial sums of all but the largest products, of elements first to last of each k tile: (tiles, m, n)."""
        out = np.zeros((len(self.b[0]), self.a[0].shape[1], self.b[0].shape[2]), np.float32)
        for i, j in self.terms[:-1]:
            out = self.add(out, i, j, first, last)
        return out

    def large(self, first: int = 0, last: int = TILE, onto: np.ndarray | None = None) -> np.ndarray:
        """The same of the largest products, from zero or added to other sums."""
        return self.add(np.zeros_like(self.small(0, 0)) if onto is None else onto, 0, 0, first, last)

    def add(self, onto: np.ndarray, i: int, j: int, first: int = 0, last: int = TILE, sign: int = 1) -> np.ndarray:
        """`onto` + sign times the products of part i of A and part j of B."""
        a, b = (np.ascontiguousarray(x) for x in (sign * self.a[i][..., first:last], self.b[j][:, first:last]))
        return tensor_cores.add_products(a, b, onto, self.rule, self.kind) if last > first else onto


def plain(tiles: Tiles) -> list[np.ndarray]:
    """One promotion a k tile, the smallest products first: `promoted.PartProducts`."""
    return [tiles.large(onto=tiles.small())]


def halves(tiles: Tiles) -> list[np.ndarray]:
    """All products of 16 of K, then those of the other 16."""
    return [tiles.large(n, n + 16, tiles.small(n, n + 16)) for n in (0, 16)]


def late(tiles: Tiles) -> list[np.ndarray]:
    """The second half of the largest products from zero: `promoted.CompensatedProducts`, with compensation."""
    return [tiles.large(16, TILE), tiles.large(0, 16, tiles.small())]


def apart(tiles: Tiles) -> list[np.ndarray]:
    """Small products, and each half of the largest, from zero."""
    return [tiles.large(16, TILE), tiles.large(0, 16), tiles.small()]


def reversed_order(tiles: Tiles) -> list[np.ndarray]:
    """The largest products first."""
    out = tiles.large()
    for i, j in tiles.terms[-2::-1]:
        out = tiles.add(out, i, j)
    return [out]


def residual(tiles: Tiles) -> list[np.ndarray]:
    """The largest products twice: their sum, and what it lost, into which the small products go. One product more."""
    top = tiles.large()
    rest = tiles.add(top, 0, 0, sign=-1)
    for i, j in tiles.terms[-2::-1]:
        rest = tiles.add(rest, i, j, sign=-1)
    return [top, -rest]


def promote(partial: list[np.ndarray], splits: int = 1, compensate: bool = False, factor: float = 1.0) -> np.ndarray:
    """The fp32 sum of partial sums, in each k tile in their order: (m, n).

    splits: CTAs that share the k tiles in turn. compensate: what additions round off is kept, and added at the
    end. factor: partial sums are multiplied by it in the same operation.
    """
    sums = []
    for part in range(splits):
        total = np.zeros(partial[0].shape[1:], np.float32)
        lost = np.zeros_like(total)
        for tile in range(part, len(partial[0]), splits):
            for each in partial:
                before, added = total, each[tile]
                total = (before.astype(np.float64) + factor * added.astype(np.float64)).astype(np.float32)
                lost = lost + (added - (total - before))
        sums.append(total + lost if compensate else total)
    return sum(sums[1:], sums[0])


def sgemm(a: np.ndarray, b: np.ndarray, shares: int) -> np.ndarray:
    """A model of SGEMM: chains of fused multiply-adds over that many shares of K, which are added in their order."""
    beyond = -a.shape[1] % shares
    a = np.pad(a, ((0, 0), (0, beyond))).astype(np.float64).reshape(len(a), shares, -1).transpose(2, 1, 0)
    b = np.pad(b, ((0, beyond), (0, 0))).astype(np.float64).reshape(shares, -1, b.shape[1]).transpose(1, 0, 2)
    total = np.zeros((shares, a.shape[2], b.shape[2]))
    for x, y in zip(a, b, strict=True):
        total = (total + x[:, :, None] * y[:, None]).astype(np.float32).astype(np.float64)
    sums = total.astype(np.float32)
    return sum(sums[1:], sums[0])


WAYS: dict[str, Callable[[Tiles], np.ndarray]] = {
    "plain": lambda t: promote(plain(t)),
    "promotion every 16": lambda t: promote(halves(t)),
    "three promotions a k tile": lambda t: promote(apart(t)),
    "largest first": lambda t: promote(reversed_order(t)),
    "16 parts of K": lambda t: promote(plain(t), 16),
    "times 1 + 2^-23": lambda t: promote(plain(t), factor=1 + 2.0**-23),
    "plain, compensated": lambda t: promote(plain(t), compensate=True),
    "compensated": lambda t: promote(late(t), compensate=True),
    "compensated, 2 parts of K": lambda t: promote(late(t), 2, compensate=True),
    "largest products twice, compensated": lambda t: promote(residual(t), compensate=True),
}


def shown(got: np.ndarray, a: torch.Tensor, b: torch.Tensor) -> str:
    """Largest and root mean square error."""
    return "{:.1e} | {:.1e}".format(*error(torch.from_numpy(got), a, b))


def rows(kind: str, k: int, seed: int, ways: Sequence[str] = tuple(WAYS)) -> list[list[str]]:
    """[kind, K, way, errors with tf32x3, with bf16x6] of each way, SGEMM's with one error."""
    a, b = inputs(kind, *SIZES[k], k, seed)
    x, y = a.numpy(), np.ascontiguousarray(b.numpy())
    out = [[kind, str(k), "rounded once", shown((a.double() @ b.double()).float().numpy(), a, b), ""]]
    for shares in (1, 4, 16, 64):
        if k >= 64 * shares:
            out.append([kind, str(k), f"SGEMM, {shares} shares of K", shown(sgemm(x, y, shares), a, b), ""])
    made = [Tiles(x, y, precision) for precision in ("tf32x3", "bf16x6")]
    return out + [[kind, str(k), way, *(shown(WAYS[way](tiles), a, b) for tiles in made)] for way in ways]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tuning.part_sums", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--k", type=int, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--inputs", nargs="+", default=list(INPUTS), choices=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    heads = ["inputs", "K", "sums", "tf32x3", "bf16x6"]
    for k in args.k:
        print(tabulate([row for kind in args.inputs for row in rows(kind, k, args.seed)], heads), flush=True)


if __name__ == "__main__":
    main()
