"""Shared fixtures. Tests marked `gpu` are skipped, with the reason, on a machine without a CUDA device."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_ROOT = Path(__file__).parent.parent
_LEFT_OUT = pytest.StashKey[int]()
# Kernels compiled by tests are kept between runs, apart from the user's own cache.
os.environ.setdefault("CUTEGEMM_CACHE_DIR", str(_ROOT / ".pytest_cache" / "cutegemm"))
# Workers share out the cores already. Threads of torch and numpy beside them, and beside those of the processes that
# tests start, only wait for each other, and burn a quarter of all the time in that.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example that takes long tells of the machine, not of the property. CI draws the same examples and seeds every
# time, so that a change is judged by what it changed; `make nightly` draws fresh ones, and more of them (examples.py).
settings.register_profile(
    "same", max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="every case of the tests marked `product`, not a sample")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--exhaustive"):
        settings.load_profile("fresh")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """torch's own test helpers, which some tests import, load a profile of theirs with 10 examples."""
    settings.load_profile("fresh" if item.config.getoption("--exhaustive") else "same")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection makes stays to the end: the garbage collector need not look at it again and again.

    Nor need it look so often at what tests make: with Python's thresholds it took a tenth of the unit tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not config.getoption("--exhaustive"):
        _sample_products(config, items)
    if torch.cuda.is_available():
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "gpu" in item.keywords:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out = set()  # one case stands for all of a test that is skipped: to report the others takes seconds
    for first, *others in cases.values():
        count = f" ({1 + len(others)} cases)" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"needs a CUDA device{count}"))
        left_out.update(others)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _sample_products(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves of each test marked `product(keep=N)` N cases. They are found one after the other: each has as many values
    of parameters that none before it has as a case can have. Of slow cases there is a sample of their own.
    """
    products: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("product"):
            slow = item.get_closest_marker("slow") is not None
            products.setdefault((item.nodeid.split("[")[0], slow), []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in products.values():
        cases.sort(key=lambda case: hashlib.sha256(case.nodeid.encode()).digest())
        keep = cases[0].get_closest_marker("product").kwargs["keep"]
        values = {case: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases}
        seen: set[tuple[str, str]] = set()
        chosen: list[pytest.Item] = []
        while len(chosen) < min(keep, len(cases)):
            rest = (case for case in cases if case not in chosen)
            chosen.append(max(rest, key=lambda case: len(values[case] - seen)))
            seen |= values[chosen[-1]]
        left_out.update(case for case in cases if case not in chosen)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
        config.stash[_LEFT_OUT] = len(left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells how many cases it left out: the process that prints the summary collects nothing."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} cases of tests with many were left to `make nightly`")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of a test's random inputs, printed when the test fails; CUTEGEMM_TEST_SEED repeats one.

    It follows from the test's name, so that every run of `make test` draws the same inputs. It is fresh with
    `--exhaustive` (`make nightly`) and for tests that run on a GPU.
    """
    fresh = request.config.getoption("--exhaustive") or "gpu" in request.keywords
    drawn = os.urandom(4) if fresh else hashlib.sha256(request.node.nodeid.encode()).digest()[:4]
    given = os.environ.get("CUTEGEMM_TEST_SEED") or str(int.from_bytes(drawn, "little"))
    if not given.isdecimal():
        raise pytest.UsageError(f"CUTEGEMM_TEST_SEED: got {given!r}, accepted is a number of at least 0")
    value = int(given)
    print(f"CUTEGEMM_TEST_SEED={value}")
    return value


@pytest.fixture(autouse=True)
def _gpu_memory_for_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives what torch keeps of the GPU's memory back after a test: other workers run on the same GPU."""
    import torch

    yield
    if "gpu" in request.keywords and torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**28:
        torch.cuda.empty_cache()


@pytest.fixture
def large_gpu_memory() -> Iterator[None]:
    """Room for tensors of more than 2^31 elements on the GPU, which other tests of this kind do not take meanwhile."""
    from tests import needs

    with needs.gpu_memory(40):
        yield


@pytest.fixture
def store_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"
