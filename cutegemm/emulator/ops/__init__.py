"""The instruction families. Importing this package registers all of them."""

from cutegemm.emulator.ops import (  # noqa: F401
    async_copy,
    atomic,
    barrier,
    bits,
    convert,
    floating,
    half,
    integer,
    loadstore,
    matrix,
    mbarrier,
    misc,
    mma,
    tma,
    warp,
    wgmma,
)
