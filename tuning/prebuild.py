"""Compiling a list of kernels into the kernel store, in parallel processes."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cutegemm.hardware.arch import Arch
from cutegemm.problem import Signature


def compile_all(
    kernels: Iterable[tuple[Signature, str, str]], arch: Arch, jobs: int | None = None
) -> tuple[int, float, dict[str, str]]:
    """Compiles every kernel that the store lacks.

    Args:
        kernels: (signature, name of the backend, configuration's text) of each.
        jobs: processes; by default as many as cores and memory allow.

    Returns:
        How many were compiled, the seconds that took, and of those that failed: "CONFIG for SIGNATURE" -> why.
    """
    from cutegemm import backend
    from cutegemm.tuner.compile_pool import CompilePool
    from cutegemm.tuner.space import Candidate

    begun = time.perf_counter()
    failed: dict[str, str] = {}
    with CompilePool(jobs) as pool:
        sessions = []
        for signature, name, config in dict.fromkeys(kernels):
            session = pool.session(signature, arch)
            candidate = Candidate(name, backend.get(name).parse(config))
            if not session.stored(candidate):
                session.submit(candidate)
                sessions.append((session, signature))
        for session, signature in sessions:
            while session.outstanding:
                for candidate, why in session.collect(1.0):
                    if why is not None:
                        failed[f"{candidate.config} for {signature}"] = why
    return len(sessions), time.perf_counter() - begun, failed
