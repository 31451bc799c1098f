"""What a shape costs that `gemm` meets for the first time, and when what it remembers is chosen anew."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cutegemm
from cutegemm import winners
from cutegemm.choice import plan
from cutegemm.problem import Problem
from cutegemm.run import call as call_module
from cutegemm.run import environment, kernel_store, runner
from cutegemm.run.environment import variable
from cutegemm.winners import Measurement, Winners, reader
from cutegemm.winners.fingerprint import fingerprint
from tests.fake_backend import uncompiled
from tests.tuning_fakes import LIGHT
from tests.waiting import wait_until
from tuning import host_cost

MEMO = call_module.memo
WINNER = "sm80/64x64x32/w32x32/s5/g8"


@pytest.fixture
def built(tmp_path, monkeypatch) -> list[str]:
    """An empty store of a planned H200; kernels that are only named, and what has been built of them."""
    monkeypatch.setenv("CUTEGEMM_ARCH", "H200")
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUTEGEMM_WINNERS", "CUTEGEMM_TUNE"):
        monkeypatch.delenv(name, raising=False)
    names: list[str] = []

    def build(signature, config, arch):
        names.append(str(config))
        return SimpleNamespace(config=config)

    found = {name: uncompiled(runner.backends.get(name), build) for name in runner.backends.WITH_KERNELS}
    monkeypatch.setattr(runner.backends, "get", found.__getitem__)
    monkeypatch.setattr(runner, "_emulated_core", lambda plan: lambda *of: ran.append(str(plan.choice.config)))
    ran.clear()
    MEMO.clear()
    yield names
    MEMO.clear()


ran: list[str] = []
"""The configurations of the kernels launched."""


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16).t()


def measured(m: int, n: int, k: int, config: str = WINNER) -> Measurement:
    return Measurement(
        "H200", 132, str(Problem.of(m, n, k, "bf16")), "cute", config, fingerprint("cute", config), 1e-9, "ok"
    )


def explained(capsys, *operands: torch.Tensor) -> str:
    capsys.readouterr()
    cutegemm.explain(*operands, backend="cute")
    return re.search(r"^configuration +(\S+)$", capsys.readouterr().out, re.MULTILINE)[1]


def launched(*operands: torch.Tensor) -> str:
    cutegemm.gemm(*operands, backend="cute")
    return ran[-1]


def settle(store: Winners) -> None:
    """Waits until the time stamp of the store's file says whether it has changed."""
    changed = store.path.stat().st_mtime_ns
    wait_until(lambda: time.time_ns() - changed > 2 * winners.reader._Reader.SETTLED_NS)


def test_a_new_shape_of_a_loaded_kernel_opens_nothing(built, monkeypatch):
    store = Winners()
    store.record(measured(64, 64, 64))
    settle(store)
    config = "sm80/64x64x32/w32x32/s5/g8"
    cutegemm.prepare(*operands(256, 256, 256), backend="cute")
    cutegemm.prepare(*operands(256, 256, 256), backend="cute", config=config)
    already = len(built)
    opened: list[object] = []
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *of, **more: opened.append(of) or connect(*of, **more))
    monkeypatch.setattr(kernel_store, "_verified", lambda *of: opened.append(of))
    for m in range(264, 512, 8):
        cutegemm.prepare(*operands(m, 256, 256), backend="cute", config=config)
    assert len(built) == already
    for m in range(264, 512, 8):
        cutegemm.prepare(*operands(m, 256, 256), backend="cute")
    assert len(built) == len(set(built))
    assert opened == []


def test_kernels_are_kept_apart_by_all_that_they_depend_on(built, monkeypatch, tmp_path):
    first, config = operands(64, 64, 64), "sm80/64x64x32/w32x32/s5/g8"
    cutegemm.prepare(*first, backend="cute", config=config)
    cutegemm.prepare(*operands(64, 64, 60), backend="cute", config=config)  # another signature
    cutegemm.prepare(*first, backend="cute", config="sm80/64x64x32/w32x32/s4/g8")
    monkeypatch.setenv("CUTEGEMM_ARCH", "A100")
    cutegemm.prepare(*first, backend="cute", config=config)
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path / "other"))
    cutegemm.prepare(*first, backend="cute", config=config)
    assert len(built) == 5
    request = SimpleNamespace(problem=Problem.of(64, 64, 64), device=torch.device("cuda", 0))
    choice = plan.Choice("cute", runner.backends.get("cute").parse(config), "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for index in (0, 1, 0, 1):
        request.device = torch.device("cuda", index)
        runner.Call(request, "cute", None)._kernel(choice, plan.emulated_arch(), request.problem.signature)
    assert len(built) == 7


def test_a_loaded_kernel_serves_during_capture(built, monkeypatch):
    request = SimpleNamespace(problem=Problem.of(64, 64, 64), device=torch.device("cuda", 0))
    call = runner.Call(request, "cute", None)
    choice = plan.Choice("cute", runner.backends.get("cute").parse(WINNER), "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(cutegemm.GemmError, match="prepare"):
        call._kernel(choice, plan.emulated_arch(), request.problem.signature)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = call._kernel(choice, plan.emulated_arch(), request.problem.signature)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert call._kernel(choice, plan.emulated_arch(), request.problem.signature) is kernel


def test_explain_and_gemm_agree_when_winners_are_switched_off(built, capsys, monkeypatch):
    store, call = Winners(), operands(128, 128, 128)
    store.record(measured(128, 128, 128))
    settle(store)
    assert explained(capsys, *call) == launched(*call) == WINNER
    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    assert launched(*call) == WINNER  # the documented rule: a remembered call reads no environment
    other = explained(capsys, *call)
    assert other != WINNER
    assert launched(*call) == other
    monkeypatch.delenv("CUTEGEMM_WINNERS")
    cutegemm.prepare(*operands(136, 128, 128), backend="cute")  # a call that is not remembered notices it too
    assert launched(*call) == WINNER == explained(capsys, *call)


def test_explain_and_gemm_agree_after_the_sweep_of_another_process(built, capsys):
    store, call = Winners(), operands(128, 128, 128)
    store.record(measured(64, 64, 64))
    settle(store)
    before = launched(*call)
    assert explained(capsys, *call) == before != WINNER
    write = (
        f"{LIGHT}from cutegemm.winners import Measurement, Winners; "
        "Winners().record(Measurement('H200', 132, sys.argv[1], 'cute', sys.argv[2], sys.argv[3], 1e-9, 'ok'))"
    )
    row = measured(128, 128, 128)
    subprocess.run([sys.executable, "-c", write, row.problem, row.config, row.fingerprint], check=True, env=os.environ)
    assert launched(*call) == before
    assert explained(capsys, *call) == WINNER
    assert launched(*call) == WINNER


def test_winners_nearby_that_another_process_measures_count_at_once(built):
    store = Winners()
    store.record(measured(64, 64, 64))
    settle(store)
    cutegemm.prepare(*operands(1024, 1024, 1024), backend="cute")
    near = "sm90/128x128x64/pp/c2x1/s4/serp8/pdl"
    store.record(measured(2048, 1024, 1024, near))
    choice = plan.choose(Problem.of(2048, 1024, 1032, "bf16"), plan.emulated_arch(), "cute")
    assert (str(choice.config), "winner at 2048x1024x1024 nearby" in choice.why) == (near, True)


def test_a_late_wish_to_tune_drops_what_was_chosen_without(built, monkeypatch):
    call = operands(128, 128, 128)
    cutegemm.gemm(*call, backend="cute")
    key = next(iter(MEMO._plans._entries))
    assert MEMO.get(key) is not None
    monkeypatch.setenv("CUTEGEMM_TUNE", "1")
    cutegemm.prepare(*operands(136, 128, 128), backend="cute")
    assert MEMO.get(key) is None
    assert len(MEMO._plans._entries) == 1


def test_nothing_is_forgotten_while_nothing_changes_or_a_graph_is_captured(built, monkeypatch):
    call = operands(128, 128, 128)
    cutegemm.gemm(*call, backend="cute")
    key = next(iter(MEMO._plans._entries))
    run = MEMO.get(key)
    cutegemm.explain(*call, backend="cute")
    cutegemm.prepare(*operands(136, 128, 128), backend="cute")
    assert MEMO.get(key) is run
    monkeypatch.setenv("CUTEGEMM_WINNERS", "off")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cutegemm.prepare(*operands(144, 128, 128), backend="cute")
    assert MEMO.get(key) is run


def test_explain_checks_what_gemm_checks_of_a_remembered_call(built):
    a, b = operands(64, 64, 64)
    cutegemm.gemm(a, b, out=torch.empty(64, 64, dtype=torch.bfloat16), backend="cute")
    with pytest.raises(ValueError, match="out"):
        cutegemm.explain(a, b, out=a, backend="cute")


def test_the_memo_gives_up_old_calls_little_by_little():
    memo = plan.PlanMemo(limit=256)
    for number in range(600):
        memo.put(number, -number - 1, None)
        kept = [known for known in range(number + 1) if memo.get(known) is not None]
        assert min(number + 1, 253) <= len(kept) <= 256
        assert min(number + 1, 252) <= len(kept) + (number >= 0) <= 257
        assert kept == sorted(kept)[-len(kept) :]
        assert memo.get(number) == -number - 1


def test_a_call_that_is_put_again_takes_no_place():
    memo = plan.PlanMemo(limit=2)
    memo.put("a", 1)
    memo.put("b", 2)
    memo.put("b", 3)
    assert (memo.get("a"), memo.get("b")) == (1, 3)


def test_the_command_prints_what_new_shapes_cost(built, capsys, monkeypatch):
    monkeypatch.delenv("CUTEGEMM_ARCH")
    assert host_cost.main(["--new-shapes", "5", "--rounds", "2"]) == 0
    said = capsys.readouterr()
    figures = re.search(r"takes (\d+\.\d) us .* in the median of 5, (\d+\.\d) at most \((.*)\)", said.out)
    assert 0 < float(figures[1]) <= float(figures[2])
    assert said.err == "prepared 5 of 5\n"  # no terminal: a line at the end
    if not torch.cuda.is_available():
        assert figures[3] == "without a GPU: up to the launch"
    assert "CUTEGEMM_ARCH" not in os.environ
    for wrong in (["--new-shapes", "0"], ["--new-shapes", "1", "--rounds", "0"]):
        with pytest.raises(SystemExit):
            host_cost.main(wrong)


def test_the_command_says_how_far_it_is_on_a_terminal(built, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    host_cost.new_shapes(3, 1, "H200")
    said = capsys.readouterr().err
    assert "prepared 1 of 3" in said
    assert said.endswith("prepared 3 of 3\n")


def test_a_new_shape_looks_at_the_store_and_the_environment_once(built, monkeypatch):
    cutegemm.prepare(*operands(256, 256, 256), backend="cute")
    call, looked = operands(264, 256, 256), []
    stamp = Winners.stamp
    monkeypatch.setattr(Winners, "stamp", lambda self: looked.append("store") or stamp(self))
    monkeypatch.setattr(reader._Reader, "LOOK_NS", 0)  # the call before may be less than that ago
    for module in (environment, reader, runner):
        monkeypatch.setattr(module, "variable", lambda name: looked.append(name) or variable(name))
    cutegemm.prepare(*call, backend="cute")
    assert [looked.count(one) for one in ("store", "CUTEGEMM_WINNERS", "CUTEGEMM_TUNE")] == [1, 1, 1]


def test_a_variable_is_read_as_the_environment_has_it_now(monkeypatch):
    monkeypatch.delenv("CUTEGEMM_TUNE", raising=False)
    assert variable("CUTEGEMM_TUNE") is None
    for value in ("", "1", "\u00fc"):
        monkeypatch.setenv("CUTEGEMM_TUNE", value)
        assert variable("CUTEGEMM_TUNE") == value
    monkeypatch.delenv("CUTEGEMM_TUNE")
    assert variable("CUTEGEMM_TUNE") is None
    monkeypatch.setattr(os, "environ", {"CUTEGEMM_TUNE": "2"})  # another Python's, without a dictionary behind it
    assert (variable("CUTEGEMM_TUNE"), variable("HOME")) == ("2", None)


def test_a_signature_goes_to_another_process_without_what_is_remembered_of_it():
    """Texts have other hashes there."""
    signature = Problem.of(64, 64, 64, "bf16").signature
    assert (hash(signature), str(signature)) == (hash(pickle.loads(pickle.dumps(signature))), str(signature))
    program = (
        f"{LIGHT}import pickle; from cutegemm.problem import Problem; found = pickle.load(sys.stdin.buffer); "
        "print({Problem.of(64, 64, 64, 'bf16').signature: 1}.get(found), found)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(signature), capture_output=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.stdout.decode().split(" ", 1) == ["1", f"{signature}\n"]


def test_a_new_shape_reads_no_file(built):
    """Which took 800 to 1100 us. What a new shape takes otherwise is told by `tuning.host_cost --new-shapes`: it is no
    bound for a test, because a busy machine takes three times as long."""
    assert len(host_cost.new_shapes(12, 2, "H200")) == 12  # reads what is not read yet
    with opened() as files:
        took = host_cost.new_shapes(12, 2, "H200")
    assert files == []
    assert took == sorted(took)
    assert took[0] > 0
    with opened() as files:
        Path(__file__).read_text()
    assert files == [__file__]


def _watch(event, given):
    if event in {"open", "sqlite3.connect"} and threading.current_thread() is threading.main_thread():
        watching[-1].append(str(given[0]))


@contextlib.contextmanager
def opened():
    """The files and stores that this thread opens meanwhile."""
    watching.append(files := [])
    if len(watching) == 1:
        sys.addaudithook(_watch)
    try:
        yield files
    finally:
        watching.append([])


watching: list[list[str]] = []
"""An audit hook cannot be taken back: there is one, and the last of these gets what it sees."""
