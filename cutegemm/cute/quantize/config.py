"""Which kernel quantizes a matrix: its signature, and the tile of a CTA.

A matrix has `rows` rows of `k` elements, and its values lie along K. A thread takes `vector` neighbours along K at a
time. They are loaded at once where K is contiguous in x; else element by element, and then the lanes of a warp stand
in neighbouring rows, so that their loads are coalesced and no shared memory transposes anything.

    passes                        where
    "whole"                       each group lies in the tile of one CTA, in registers: x is read once
    "amax", then "parts"          a group is larger: every CTA of the first launch writes the largest magnitudes that it
                                  found, and every CTA of the second one takes the maximum of these: no atomics
    "given"                       with a scale that the caller gives, and to dequantize

A mixture's tokens are quantized once and written to the rows of all their experts: "whole" groups of single rows may
have `Signature.places`, which an index in the place of the partial maxima names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutegemm.problem.dtypes import ITEMSIZE
from cutegemm.problem.quantization import BLOCK, Group

THREADS = 256
MOST_THREADS = 1024
WARP = 32
MOST_PARTS = 1024
"""Partial maxima of a whole tensor: each warp of the second launch reads all of them."""
DEEP = 4
"""Most vectors of a row that a thread keeps in registers: 1024 threads of a CTA have 64 registers each."""
PASSES = ("whole", "amax", "parts", "given", "back")
"""What a kernel does; "back" dequantizes."""
MOST_PLACES = 10
"""Rows that a row of x may become: a thread keeps their numbers in registers, of which 1024 threads have 64 each."""
POINTERS = ("x", "v", "s", "p")
"""The addresses that a kernel takes: x, values, scales, partial maxima or the rows that each row of x becomes."""


@dataclass(frozen=True)
class Signature:
    """What the machine code of a kernel depends on, besides its tile.

    Attributes:
        does: one of `PASSES`. dtype: of x. values: name of the format.
        group: elements that share a scale; for "given" and "back" also of 1 along K.
        along_k: whether the elements of a row of x are neighbours; those of the values always are.
        width: elements that every access of neighbours may take at once. It divides K: no access crosses its end.
        places: how many rows of the values each row of x becomes, each with its scale; 0 for the one of its number.
    """

    does: str
    dtype: str
    values: str
    group: Group
    along_k: bool
    width: int
    places: int = 0

    def __str__(self) -> str:
        layout = "k" if self.along_k else "any"
        text = f"{self.does} {self.dtype} {self.values} {self.group} {layout} w{self.width}"
        return f"{text} x{self.places}" if self.places else text


class Tile(NamedTuple):
    """The part of a matrix that a CTA takes: `threads_r` x `threads_k` threads, each `deep_r` x `deep_k` vectors.

    `vector`: elements of a vector, along K.
    """

    threads_r: int
    threads_k: int
    deep_r: int
    deep_k: int
    vector: int

    @property
    def threads(self) -> int:
        return self.threads_r * self.threads_k

    @property
    def rows(self) -> int:
        return self.threads_r * self.deep_r

    @property
    def k(self) -> int:
        return self.threads_k * self.deep_k * self.vector

    def __str__(self) -> str:
        return f"quantize/{self.threads_r}x{self.threads_k}/{self.deep_r}x{self.deep_k}/v{self.vector}"

    def why_invalid(self, signature: Signature) -> str | None:
        """None when a kernel of this signature can have this tile, else a sentence."""
        if self.threads % WARP or not 0 < self.threads <= MOST_THREADS:
            return f"{self} has {self.threads} threads; a CTA has a multiple of {WARP}, {MOST_THREADS} at most"
        if not signature.along_k and self.threads_r % WARP:
            return f"{self}: where K is not contiguous, the lanes of a warp stand in {WARP} different rows"
        if signature.along_k and self.threads_k & (self.threads_k - 1):
            return f"{self}: lanes exchange maxima by powers of 2; {self.threads_k} threads along K are none"
        if self.vector % signature.width or self.vector % 4:
            return f"{self}: a vector is made of 4-byte words and of accesses of {signature.width} elements"
        if signature.does in ("given", "back") and signature.group.k == BLOCK and BLOCK % self.vector:
            return f"{self}: a vector of {self.vector} elements has more than one scale"
        if signature.does == "whole":
            rows, k = signature.group
            if (k or self.k) != self.k or rows not in (1, self.rows):
                return f"{self}: a group of {signature.group} elements is not in one tile of {self.rows} x {self.k}"
            across = not signature.along_k or self.threads_k > WARP
            if rows == 1 and across and self.deep_r > 1:
                return f"{self}: one row a thread where warps exchange the maxima of rows"
        return None


def vector_of(dtype: str, along_k: bool) -> int:
    """Elements of a vector: 16 bytes of x along K, or 16 of the values."""
    return 16 // ITEMSIZE[dtype] if along_k else 16


def in_one_pass(group: Group, dtype: str, along_k: bool, k: int) -> bool:
    """Whether each group fits into the registers of one CTA."""
    if group.rows == 0:
        return False
    return group.k == BLOCK or (along_k and k <= MOST_THREADS * DEEP * vector_of(dtype, along_k))


def choose(signature: Signature, rows: int, k: int, matrices: int, sms: int) -> Tile:
    """The tile for matrices of rows x k. It keeps as many bytes in flight as memory needs (about 32 KiB an SM)."""
    vector = vector_of(signature.dtype, signature.along_k)
    if not signature.along_k:
        square = signature.does == "whole" and signature.group.rows == BLOCK
        return Tile(WARP, THREADS // WARP, BLOCK // WARP if square else 1, 1, vector)
    if signature.does == "whole" and signature.group.k == BLOCK:
        threads_k = BLOCK // vector
        threads_r = THREADS // threads_k
        if signature.group.rows == BLOCK:
            return Tile(threads_r, threads_k, BLOCK // threads_r, 1, vector)
        deep = _deep_rows(-(-rows // threads_r) * -(-k // BLOCK) * matrices, sms)
        return Tile(threads_r, threads_k, deep, 1, vector)
    if signature.does == "whole":
        vectors = -(-k // vector)
        threads_k = 8
        while vectors > threads_k * DEEP:
            threads_k *= 4 if threads_k == 8 else 2
        deep = 1
        while vectors > threads_k * deep:
            deep *= 2
        return Tile(max(THREADS // threads_k, 1), threads_k, 1, deep, vector)
    threads_k = WARP if k > 8 * vector else 8
    threads_r = THREADS // threads_k
    tiles = -(-rows // threads_r) * -(-k // (threads_k * vector)) * matrices
    return Tile(threads_r, threads_k, _deep_rows(tiles, sms), 1, vector)


def _deep_rows(tiles: int, sms: int) -> int:
    """Rows of a thread: 4 where there are enough of them to give each SM several CTAs."""
    return 4 if tiles >= 16 * sms else 1
