"""A sweep that several processes share: every problem is searched once, and what a dead process had is taken over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from cutegemm.tuner import run, shared
from cutegemm.tuner.search import Options, Outcome
from cutegemm.tuner.shared import SharedClaims, StoreLost
from cutegemm.winners import Measurement, Winners
from cutegemm.winners.fingerprint import fingerprint
from cutegemm.winners.row import BOTH
from tests import sweep_ranks
from tests.tuning_fakes import PROBLEM, FakeCompiler, FakeTimer, candidate
from tests.waiting import PATIENCE, wait_until
from tuning import sweep

ROOT = Path(__file__).parents[2]
OUTCOME = Outcome(PROBLEM, 0)
QUICK = {"beat_s": 0.02, "lost_s": 0.3, "poll_s": 0.01}


@pytest.fixture
def claims():
    """Makes the claims of processes that share one store; they leave at the end."""
    store, made = HashStore(), []

    def make(rank: int, world: int, count: int) -> SharedClaims:
        made.append(SharedClaims(store, rank, world, count, message=lambda outcome: f"by {rank}", **QUICK))
        return made[-1]

    yield make
    for each in made:
        each.leave()


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(name, monkeypatch):
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", name: "x"}.items():
        monkeypatch.setenv(variable, value)
    message = f"{name}: got 'x' in the environment, expected a whole number, as torchrun sets it"
    if name == "LOCAL_WORLD_SIZE":
        with pytest.raises(ValueError, match=message):
            sweep._own_gpu()
    elif name == "WORLD_SIZE":
        with pytest.raises(ValueError, match=message):
            shared.is_shared()
    else:
        assert shared.is_shared()
        with pytest.raises(ValueError, match=message):
            shared.connect([PROBLEM])


def test_many_processes_and_lanes_take_every_problem_once(claims):
    made = [claims(rank, 4, 60) for rank in range(4)]
    taken: list[int] = []

    def work(own: SharedClaims) -> None:
        while (number := own.take()) is not None:
            taken.append(number)
            own.finished(number, OUTCOME)

    threads = [threading.Thread(target=work, args=(own,)) for own in made for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    assert sorted(taken) == list(range(60))
    messages = made[0].gather()
    assert sorted(messages) == list(range(60))
    assert {text[:3] for text in messages.values()} == {"by "}


def test_a_dead_process_costs_its_own_problems(claims):
    """Those that it finished stay done; the others wait for what it had claimed, and one of them gets it."""
    dead, living = claims(1, 2, 3), claims(0, 2, 3)
    assert dead.take() == 0
    dead.finished(0, OUTCOME)
    assert dead.take() == 1
    assert living.take() == 2
    living.finished(2, OUTCOME)
    dead._ended.set()  # no more signs of life
    assert living.take() == 1
    living.finished(1, OUTCOME)
    assert living.take() is None
    assert living.gather() == {0: "by 1", 1: "by 0", 2: "by 0"}


def test_a_living_process_keeps_what_it_searches(claims):
    slow, other = claims(0, 2, 1), claims(1, 2, 1)
    assert slow.take() == 0
    asked = []
    assert other.take(lambda: len(asked) > 60 or asked.append(1) is not None) is None  # twice `lost_s`
    slow.finished(0, OUTCOME)
    assert other.take() is None


def test_a_gpu_that_does_nothing_leaves_the_problems_to_others(claims, tmp_path):
    """Its process gives two problems back and takes no third; what no GPU does is done after two tries."""
    broken, working = claims(0, 2, 5), claims(1, 2, 5)
    store = Winners(tmp_path / "winners.sqlite3")
    problems = sweep_ranks.problems(5)

    def searched(own: SharedClaims, timer: FakeTimer) -> list[Outcome]:
        return run.run(
            problems, ["cute"], [timer], FakeCompiler(), store, Options(budget=5.0), ranker=lambda *_: [],
            first=lambda *_: [candidate("sm90/64x64x64/coop1/c1x1/s4/row")], seeded=False, claims=own,
        )  # fmt: skip

    failed = searched(broken, FakeTimer({}, open_fails="out of memory"))
    assert [outcome.ended.startswith("not timed") for outcome in failed] == [True, True]
    assert len(searched(working, FakeTimer({}))) == 5
    assert sorted(broken.gather()) == list(range(5))


def test_what_no_gpu_does_is_done_at_last(claims):
    first, second = claims(0, 2, 1), claims(1, 2, 1)
    for own in (first, second):
        assert own.take() == 0
        own.failed(0, OUTCOME)
    assert first.take() is None
    assert first.gather() == {0: "by 1"}


def test_rows_of_others_are_added_once(tmp_path):
    """Ranks of one host share a winners store; those of other hosts have their own."""
    here, there = Winners(tmp_path / "here.sqlite3"), Winners(tmp_path / "there.sqlite3")
    row = Measurement("H200", 132, str(PROBLEM), "cute", "sm90/64x64x64/coop1/c1x1/s4/row", "old", 2e-6, "ok")
    there.record(row)
    text = shared.message_of(OUTCOME, there, "H200", 132)
    assert '"rows"' in text
    assert "64x64x64" not in text  # a row of other kernels than today's
    today = fingerprint("cute", row.config)
    fresh = replace(row, fingerprint=today, seconds=3e-6, reference_seconds=6e-6, method=BOTH)
    there.record(fresh)
    messages = {0: shared.message_of(OUTCOME, there, "H200", 132)}
    for _ in range(2):
        (outcome,) = shared.gathered(messages, [PROBLEM], [], here)
        assert (outcome.winner.seconds, outcome.winner.reference_seconds) == (3e-6, 6e-6)
        assert outcome.winner.method == BOTH
        assert [(each.seconds, each.origin) for each in here.rows()] == [(3e-6, "imported")]
    assert not shared.gathered({}, [PROBLEM], [], here)
    with pytest.raises(ValueError, match="another process calls it"):
        shared.gathered(messages, sweep_ranks.problems(1), [], here)


def test_a_store_that_is_gone_is_named():
    class Gone:
        def add(self, *_):
            raise RuntimeError("Connection was reset")

    with pytest.raises(StoreLost, match=r"the store of the sweep does not answer: Connection was reset"):
        SharedClaims(Gone(), 0, 2, 1)


def test_two_processes_of_which_one_is_killed(tmp_path):
    """As torchrun starts them, with its store in another process; rank 1 is killed in its second search."""
    server = TCPStore("localhost", 0, None, True, wait_for_workers=False)
    environment = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "HANGS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.sweep_ranks", str(tmp_path), "8"]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        wait_until(lambda: len(searched(tmp_path, 1)) == 2)
        processes[1].send_signal(signal.SIGKILL)
        said = [each.communicate(timeout=PATIENCE)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [0, -signal.SIGKILL], said
    assert "gathered 8 of 8" in said[0]
    wanted = {str(problem) for problem in sweep_ranks.problems(8)}
    finished, lost = searched(tmp_path, 1)
    others = searched(tmp_path, 0)
    assert sorted(others) == sorted(wanted - {finished})  # each once, and what was lost
    assert lost in others
    assert {row.problem for row in Winners(tmp_path / "0.sqlite3").rows()} == wanted


def searched(folder: Path, rank: int) -> list[str]:
    """The problems that a process has begun."""
    log = folder / f"{rank}.log"
    return log.read_text().splitlines() if log.exists() else []
