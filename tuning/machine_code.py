"""The machine code of configurations as digests, so that two versions of the sources can be compared.

    python -m tuning.machine_code < requests > answers

A request is a line of JSON, ["H200", "cute", CONFIG, PROBLEM]: GPU model, backend, and the texts of a configuration and
a problem. The first answer is {"sources": FOLDER}, where the sources lie; then a line of JSON a request follows, in the
same order: {"fingerprint": ..., "code": ...} or {"error": ...}.
`tuning.winners restamp` runs this in two checkouts and restamps the rows whose code is the same to the byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import cutegemm

Request = tuple[str, str, str, str]
"""(GPU model, backend, configuration, problem), the last two as texts."""


def answers(folder: Path, requests: Iterable[Request]) -> list[dict[str, str]]:
    """What `python -m tuning.machine_code` says in a checkout of the sources, one answer a request.

    Raises ValueError when that folder has no such tool, or it fails.
    """
    sources = Path(_said(folder, "")[0]["sources"])
    # A folder without the package would be answered by the installed one. It is asked before anything is compiled.
    if sources.resolve() != folder.resolve():
        raise ValueError(f"before: got {folder}, expected a checkout of the sources; {sources} answered")
    return _said(folder, "".join(json.dumps(request) + "\n" for request in requests))[1:]


def _said(folder: Path, lines: str) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "tuning.machine_code"]
    done = subprocess.run(command, cwd=folder, input=lines, text=True, capture_output=True, env=_without_path())
    if done.returncode:
        raise ValueError(f"before: tuning.machine_code failed in {folder}: {done.stderr.strip()[-500:]}")
    return list(map(json.loads, done.stdout.splitlines()))


def _without_path() -> dict[str, str]:
    """The environment for another checkout: its own modules come first there, not those of this one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@cache
def answer(gpu: str, backend: str, config: str, problem: str) -> dict[str, str]:
    """The fingerprint and code digest of one kernel, compiled or from the store; {"error": why} when there is none."""
    from cutegemm import backend as backends
    from cutegemm.errors import GemmError
    from cutegemm.hardware import arch as arch_table
    from cutegemm.hardware.cubin import code_digest
    from cutegemm.problem import text
    from cutegemm.winners.fingerprint import fingerprint

    try:
        kernels = backends.get(backend)
        signature = text.parse(problem).signature
        kernel = kernels.build(signature, kernels.parse(config), arch_table.get(gpu))
        return {"fingerprint": fingerprint(backend, config), "code": code_digest(kernel.cubin)}
    except (ValueError, KeyError, GemmError) as why:
        return {"error": f"{type(why).__name__}: {why}"}


def main() -> int:
    print(json.dumps({"sources": str(Path(cutegemm.__file__).parents[1])}))
    for line in sys.stdin:
        try:
            gpu, backend, config, problem = json.loads(line)
        except (TypeError, ValueError) as why:
            print(json.dumps({"error": f"got {line.strip()[:80]!r}, which is no request: {why}"}), flush=True)
            continue
        print(json.dumps(answer(gpu, backend, config, problem)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
