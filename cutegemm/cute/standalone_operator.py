"""The host entry of kernels without a product (`standalone.py`), in the DSL."""

from __future__ import annotations

from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_ptr

from cutegemm.cute.early_launch import BeginsEarly
from cutegemm.run import arguments


class StandaloneOperator(BeginsEarly):
    """A kernel of a grid of `ctas`, whose entry takes `POINTERS`, the stream and `NUMBERS`.

    Attributes:
        config: its tile, which has `threads`. POINTERS: names of addresses. NUMBERS: names and types of numbers, `ctas`
            and, the last one, `early` among them.
    """

    config: Any
    kernel: Any
    POINTERS: ClassVar[tuple[str, ...]]
    NUMBERS: ClassVar[tuple[tuple[str, Any], ...]]

    def pointee(self, name: str) -> tuple[Any, int]:
        """(the type that an address has, the alignment in bytes that the compiler may assume)."""
        return Int32, 4

    def fake_arguments(self) -> tuple:
        """Stand-ins that give `cute.compile` the types of the entry's arguments."""
        pointees = (self.pointee(name) for name in self.POINTERS)
        made = (make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=align) for kind, align in pointees)
        return (*made, make_fake_stream(), *(number(1) for _, number in self.NUMBERS))

    @cute.jit
    def __call__(self, *values):
        self.launch(arguments.named((*self.POINTERS, "stream", *(name for name, _ in self.NUMBERS)), values))

    def launch(self, args) -> None:
        given = args._asdict()
        stream = given.pop("stream")
        self.kernel(arguments.named(given, given.values())).launch(
            grid=(args.ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=args.early if self.programmatic else False,
        )
