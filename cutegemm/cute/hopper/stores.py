"""Which epilogue a configuration of the Hopper kernel has."""

from __future__ import annotations

from typing import Any

from cutegemm.cute import types
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.fragment import FragmentStore
from cutegemm.cute.hopper.plain_store import PlainTmaEpilogue, TransposedByteEpilogue, TransposedPairsEpilogue
from cutegemm.cute.hopper.quantized_store import QuantizedEpilogue
from cutegemm.cute.hopper.slab_store import SlabStore, TransposedSlabStore
from cutegemm.cute.hopper.store import TmaEpilogue, TransposedTmaEpilogue
from cutegemm.problem import Signature


def make_store(config: HopperConfig, signature: Signature) -> Any:
    """The store for a configuration and signature.

    All have `make_atoms` for the host, and `start`. The `FragmentStore` of sums that several CTAs share out takes
    single vectors; the others take a warpgroup's rows of a tile: `store(accumulators, region)`, then `finish()`.
    """
    if config.parts > 1:
        return FragmentStore(config, signature)
    if signature.epilogue.program.quantizes:
        return QuantizedEpilogue(config, signature)
    in_pairs = signature.epilogue.gating == "pairs"
    by_matrix = types.NUMERIC[signature.out_dtype].width == 16 and not in_pairs
    straight: Any = TmaEpilogue if by_matrix else PlainTmaEpilogue
    turned: Any = (
        TransposedTmaEpilogue if by_matrix else TransposedPairsEpilogue if in_pairs else TransposedByteEpilogue
    )
    if not config.uses_tma_store(signature):
        straight, turned = SlabStore, TransposedSlabStore
    return (turned if config.swapped else straight)(config, signature)
