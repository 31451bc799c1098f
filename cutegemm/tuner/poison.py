"""Memory for the results of a kernel under test: bytes that no right kernel leaves there, between guard bands."""

from __future__ import annotations

import torch

GUARD = 2048
"""Elements before and behind a result that no kernel may touch."""
OTHER = 0x7B
"""A byte that makes finite numbers of every dtype. Where a result may be NaN, memory is poisoned a second time, with
this."""


class Guarded:
    """Memory for `count` elements of a dtype between guard bands, to be poisoned.

    Attributes:
        whole: all of it. inner: without the guard bands. byte: what it was poisoned with last.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: str | torch.device) -> None:
        self.whole = torch.empty(count + 2 * GUARD, dtype=dtype, device=device)
        self.inner = self.whole[GUARD : GUARD + count]
        self.byte = _usual(self.whole)

    def poison(self, byte: int | None = None) -> None:
        """Fills all of it, as the function `poison` does."""
        self.byte = poison(self.whole, byte)

    @property
    def intact(self) -> bool:
        """Whether the guard bands are as `poison` left them."""
        bands = self.whole[:GUARD], self.whole[-GUARD:]
        return all(bool(holding(band, self.byte).all()) for band in bands)


def poison(whole: torch.Tensor, byte: int | None = None) -> int:
    """Fills a contiguous tensor with a byte, by default one of which no right result consists: NaN, or 0x80 of an
    integer. Returns the byte.
    """
    byte = _usual(whole) if byte is None else byte
    whole.view(torch.uint8).fill_(byte)
    return byte


def holding(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    """Which elements consist of this byte: a boolean tensor of the same shape."""
    parts = tensor.contiguous().view(torch.uint8).view(*tensor.shape, tensor.element_size())
    return (parts == byte).all(-1)


def _usual(tensor: torch.Tensor) -> int:
    return 0xFF if tensor.is_floating_point() else 0x80
