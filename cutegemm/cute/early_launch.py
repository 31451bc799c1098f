"""Kernels whose launches may begin before the kernel in front has ended (programmatic dependent launch)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cutegemm.cute.launch_config import PROGRAMMATIC


class BeginsEarly:
    """A kernel whose host entry has an argument `early`: other than 0, the launch may begin early.

    Attributes:
        target: the architecture that the kernel is compiled for, which `compile.compile_operator` sets.
        args: the kernel's arguments by name.
    """

    target = "sm_80"
    args: Any

    @property
    def programmatic(self) -> bool:
        """Whether the GPU that the kernel is compiled for has programmatic dependent launch."""
        return int(self.target.strip("sm_af")) >= 10 * PROGRAMMATIC[0] + PROGRAMMATIC[1]

    @cute.jit
    def await_front(self):
        """Waits for the kernel in front, if this launch began early, and lets the next one begin then.

        A kernel reads and writes no memory before it calls this.
        """
        if cutlass.const_expr(self.programmatic):  # noqa: SIM102
            if self.args.early != 0:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
