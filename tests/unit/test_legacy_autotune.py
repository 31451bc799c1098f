"""The search over configurations, with a bench that invents the times: what wins, what is recorded, when it stops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cutegemm.errors import GemmError
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.winners.fingerprint import fingerprint
from legacy_cuda.config import LegacyConfig, parse
from tests.tuning_fakes import Clock
from tuning import autotune as search
from tuning import ladder
from tuning.workbench import Row

PROBLEM = Problem.of(512, 512, 512, "fp32", majors="tt")
H200 = arch_table.get("H200")
CANDIDATES = [parse(f"async_copy/bm64/bn64/bk{bk}/tm{tm}/tn4") for bk in (8, 16) for tm in (4, 8)]


class Bench:
    """Times by configuration; None means that the result is wrong, an exception that the launch fails."""

    problem, arch = PROBLEM, H200

    def __init__(self, times: dict[LegacyConfig, object], *_args) -> None:
        self.times = times

    def check(self, config: LegacyConfig) -> str:
        if isinstance(self.times[config], Exception):
            raise self.times[config]
        return "3 elements outside the bound" if self.times[config] is None else "ok"

    def quick_seconds(self, config: LegacyConfig) -> float:
        return float(self.times[config])

    def measure(self, config: LegacyConfig, rounds: int) -> Row:
        return Row(config, PROBLEM, float(self.times[config]), 0.5, "ok")


@pytest.fixture(autouse=True)
def no_compiling(monkeypatch):
    def build(signature, config, arch):
        if config.parameters["bk"] == 16 and config.parameters["tm"] == 8:
            raise GemmError("refused by the compiler")
        return SimpleNamespace(cubin=b"code", config=config)

    monkeypatch.setattr(search, "BACKEND", SimpleNamespace(build=build, name="legacy"))
    monkeypatch.setattr(search, "family", lambda name, signature, arch: iter(CANDIDATES))


def test_the_fastest_right_one_wins_and_everything_is_recorded(store):
    times = {CANDIDATES[0]: 2e-3, CANDIDATES[1]: 1e-3, CANDIDATES[2]: None}
    lines: list[str] = []
    won = search.autotune(Bench(times), "thread_tile", budget_s=30, winners=store, report=lines.append)
    assert won == CANDIDATES[1]
    best = store.best("H200", 132, str(PROBLEM), backend="legacy", fingerprint=fingerprint("legacy", ""))
    assert best is not None
    assert (best.config, best.seconds) == (str(CANDIDATES[1]), 1e-3)
    verdicts = {row.config: row.verdict for row in store.rows()}
    assert verdicts[str(CANDIDATES[2])] == "3 elements outside the bound"
    assert verdicts[str(CANDIDATES[3])] == "did not compile"
    assert len(verdicts) == len(CANDIDATES)
    assert any("outside the bound" in line for line in lines)


def test_a_launch_that_fails_is_recorded_and_cannot_win(store):
    times = {CANDIDATES[0]: GemmError("launch failed"), CANDIDATES[1]: None, CANDIDATES[2]: None}
    assert search.autotune(Bench(times), "thread_tile", budget_s=30, winners=store) is None
    assert store.best("H200", 132, str(PROBLEM)) is None
    assert "launch failed" in {row.verdict for row in store.rows()}


def test_the_budget_is_kept(store, monkeypatch):
    monkeypatch.setattr(
        search, "family", lambda *a: iter([parse(f"async_copy/bm64/bn64/bk8/tm{t}/tn4") for t in (4, 8)] * 1)
    )
    clock = Clock()
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(Bench, "check", lambda self, config: clock.sleep(0.3) or "ok")
    search.autotune(Bench(dict.fromkeys(CANDIDATES, 1e-3)), "thread_tile", budget_s=0.2, winners=store)
    assert len({row.config for row in store.rows()}) == 1
    search.autotune(Bench(dict.fromkeys(CANDIDATES, 1e-3)), "thread_tile", budget_s=0.5, winners=store)
    assert len({row.config for row in store.rows()}) == 2


def test_the_ladder_shows_rungs_and_winners(monkeypatch, capsys, store):
    """The path of a machine with a GPU, its measurements invented."""
    times = {parse("naive"): 2e-3, **dict.fromkeys(CANDIDATES[:3], 1e-3)}
    monkeypatch.setattr(ladder, "Workbench", lambda *shape: Bench(times))
    monkeypatch.setattr(ladder, "host_cost", lambda *a: "1 us")
    monkeypatch.setattr(ladder.Arch, "of_device", staticmethod(lambda: H200))
    monkeypatch.setattr(search, "Winners", lambda: store)
    monkeypatch.setattr(ladder, "cuda_is_there", lambda: True)
    assert ladder.main(["--rung", "naive", "--size", "512", "--autotune", "20", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("size ") :]
    assert "naive" in table
    assert "autotuned thread_tile: async_copy/bm64/bn64" in table
    times[parse("naive")] = None
    monkeypatch.setattr(Bench, "measure", lambda self, c, rounds: Row(c, PROBLEM, 1e-3, 0.5, self.check(c)))
    assert ladder.main(["--rung", "naive", "--size", "512"]) == 1
    assert "3 elements outside the bound" in capsys.readouterr().out
