"""The instruction families. Importing this package registers all of them."""

from importlib import import_module

FAMILIES = (
    "integer", "bits", "floating", "half", "convert", "loadstore", "atomic", "warp", "misc", "barrier", "async_copy",
    "register_pool", "matrix", "mma", "mbarrier", "tma", "remote_store", "wgmma",
)  # fmt: skip

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
