"""Kernels whose epilogue program makes them spill registers: refused where asked for by name, else replaced.

How many registers a program needs with a configuration is known once the kernel is compiled: the machine code says how
much local memory a thread has. A kernel that spills without its program too is accepted, as a kernel without a program
is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutegemm import backend as backends
from cutegemm.errors import UnsupportedError
from cutegemm.hardware.cubin import usage

if TYPE_CHECKING:
    from cutegemm.backend import Backend, Kernel
    from cutegemm.choice.plan import Choice
    from cutegemm.hardware.arch import Arch
    from cutegemm.problem import Problem

    Build = Callable[[Any], tuple[Kernel, int]]
    """build(config) -> its kernel, and the bytes that a thread of it spills"""


def spilled(problem: Problem, kernel: Kernel, config: Any, backend: Backend[Any], arch: Arch) -> int:
    """Bytes that a thread of this kernel spills because of the problem's epilogue program, 0 without one.

    Where there are any, the kernel without the program is compiled too, to see whether it spills as well.
    """
    if problem.epilogue.custom is None:
        return 0
    found = _stack(kernel)
    alone = problem.without_program()
    if found and backend.check(config, alone, arch) is None and _stack(backend.build(alone.signature, config, arch)):
        return 0
    return found


def _stack(kernel: Kernel) -> int:
    return max(each.stack for each in usage(kernel.cubin))


def refusal(problem: Problem, config: Any, count: int) -> UnsupportedError:
    """The error for a configuration whose kernel spills `count` bytes a thread."""
    return UnsupportedError(
        f"config {config} cannot serve {problem}: a thread of its kernel spills {count} bytes of registers because of "
        "the epilogue program. Take a configuration with a smaller tile, which has fewer accumulators a thread, or a "
        "program that needs fewer operands at once, or leave config out: then one is chosen that has room"
    )


def settled(
    problem: Problem, choice: Choice, arch: Arch, build: Build, suits: Callable[[Any], bool]
) -> tuple[Choice, Kernel]:
    """The choice and its kernel; where that kernel spills, the next cheapest candidate with fewer accumulators a
    thread, and so on. Where all of these spill, the one that spills least.

    Args:
        build: as `Build` says. suits: whether a configuration may be taken.
    """
    kernel, count = build(choice.config)
    if not count:
        return choice, kernel
    # Imported at first use, because importing cutegemm is cheap.
    from cutegemm.choice import heuristics

    accumulators = backends.get(choice.backend).accumulators
    tried = [(count, choice.config, kernel)]
    least = accumulators(choice.config)
    for config in heuristics.ascending(problem, arch, choice.backend):
        if accumulators(config) >= least or not suits(config):
            continue
        kernel, count = build(config)
        tried.append((count, config, kernel))
        least = accumulators(config)
        if not count:
            break
    count, config, kernel = min(tried, key=lambda one: one[0])
    seen = ", ".join(f"{each} by {number} bytes a thread" for number, each, _ in tried if number)
    taken = (
        "it spills, the least of the candidates tried" if count else "the next cheapest lighter candidate spills none"
    )
    why = f"{choice.why}; registers spill with this program in {seen}: {taken}"
    return choice._replace(config=config, why=why), kernel
