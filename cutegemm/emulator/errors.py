"""What the emulator reports: one exception class per kind of finding, each naming the PTX line and the thread."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """A kernel did something wrong, or asked for something the emulator cannot do.

    The message holds the finding, the PTX line (number and text) and, where known, the CTA and the thread.
    ``line`` is the PTX line number (1-based) or None.
    """

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class PtxError(EmulationError):
    """The PTX text could not be understood."""


class UnsupportedInstruction(PtxError):
    """An instruction, or a form of one, that the emulator does not implement."""


class LaunchError(EmulationError):
    """The launch does not fit the kernel: unknown entry, wrong block, too few parameter bytes, ..."""


class OutOfBounds(EmulationError):
    """An access outside every mapped tensor, or outside the CTA's shared, local, const or param space."""


class MisalignedAccess(EmulationError):
    """An access whose address is not a multiple of its size."""


class ReadOnlyWrite(EmulationError):
    """A store into memory that was mapped with writable=False."""


class UninitializedRead(EmulationError):
    """A read of shared memory that nothing has written."""


class DataRace(EmulationError):
    """Two accesses of the same shared memory, at least one a write, that no synchronization orders."""


class BeforeTheWait(DataRace):
    """Global memory that the kernel in front may still write, or read, is used before griddepcontrol.wait."""


class MissingProxyFence(EmulationError):
    """Shared memory written by ordinary stores is read by TMA or wgmma without fence.proxy.async between."""


class AsyncReadTooEarly(DataRace):
    """Shared memory that an asynchronous copy fills is used before that copy was waited for."""


class MbarrierMisuse(EmulationError):
    """An mbarrier used before its initialization, counted below zero, or destroyed while in use."""


class AccumulatorInFlight(EmulationError):
    """A register of a wgmma in flight is used before wgmma.wait_group, or wgmma.fence is missing."""


class BarrierMisuse(EmulationError):
    """A named or cluster barrier used with counts that do not agree, or by exited warps."""


class RegisterMisuse(EmulationError):
    """A setmaxnreg with an illegal count, or one that not all warps of a warpgroup execute alike."""


class ExitTooEarly(EmulationError):
    """A CTA exits while a bulk store may still read its shared memory, or its cluster uses it after it has exited."""


class NoProgress(EmulationError):
    """No warp can continue: the message lists which warps wait where, and for what."""


class KernelTrap(EmulationError):
    """The kernel executed trap, or a failed assertion."""
