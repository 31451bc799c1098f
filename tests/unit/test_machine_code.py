"""The digest of machine code, and the restamping of rows whose machine code stayed the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from cutegemm.hardware.cubin import code_digest
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse
from cutegemm.winners import Measurement
from cutegemm.winners import table as winners_table
from cutegemm.winners.fingerprint import fingerprint, is_fresh
from tests.unit.conftest import SHIPPED
from tuning import machine_code, winners

ROOT = SHIPPED.parents[1]
CONFIG = "simt/32x32x16/w16x32/s2/g1"
PROBLEM = Problem.of(64, 64, 64, "fp32")
REQUEST = ("H200", "cute", CONFIG, str(PROBLEM))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A checkout of the same sources, for a test to change."""
    folder = tmp_path_factory.mktemp("earlier")
    for name in ("cutegemm", "tuning", "legacy_cuda"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.svg"))
    return folder


def rewrite(folder, file: str, before: str, after: str) -> None:
    path = folder / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def row(**changes) -> Measurement:
    known = {"gpu": "H200", "sm_count": 132, "problem": str(PROBLEM), "backend": "cute", "config": CONFIG}
    known |= {"fingerprint": fingerprint("cute", CONFIG), "seconds": 1e-6, "verdict": "ok"}
    return Measurement(**{**known, **changes})


def test_any_problem_that_a_row_names_has_machine_code():
    """Rows of groups, of odd operands and of epilogues: only the fit of the cost model leaves these out."""
    groups = Problem.of(512, 256, 64, "bf16", batch=4, work="ragged_m")
    answer = machine_code.answer("H200", "cute", "sm90/64x16x64/coop1/c1x1/s4/row/swap", str(groups))
    assert answer.keys() == {"fingerprint", "code"}
    program = simplified(parse("def epilogue(gate: halves[0], up: halves[1]) -> fp32: return silu(gate) * up"))
    gated = Problem.of(64, 64, 64, "fp32", epilogue=Epilogue(custom=program))
    codes = [machine_code.answer("H200", "cute", CONFIG, str(each))["code"] for each in (PROBLEM, gated)]
    assert codes[0] != codes[1]
    assert "error" in machine_code.answer("H200", "cute", "sm90/64x16x64/coop1/c1x1/s4/row/swap", "512 rows")


def test_digest_of_a_damaged_cubin_is_refused():
    with pytest.raises(ValueError, match="no 64-bit ELF"):
        code_digest(b"no cubin")


@pytest.mark.slow  # five processes, three of which compile
def test_rows_of_the_same_machine_code_are_restamped(earlier, tmp_path, capsys):
    file = "cutegemm/cute/simt/kernel.py"
    rewrite(earlier, file, "\nLANES_M", "\nUNUSED = 0\nLANES_M")
    (before,) = machine_code.answers(earlier, [REQUEST])
    today = machine_code.answer(*REQUEST)
    assert before["fingerprint"] != today["fingerprint"]
    assert before["code"] == today["code"]

    table = tmp_path / "table.json"
    stale = row(fingerprint=before["fingerprint"])
    unknown = row(fingerprint="of other sources", seconds=2e-6)
    table.write_text(winners_table.dump([stale, unknown, row(seconds=3e-6)]))
    assert winners.main(["restamp", str(table), "--before", str(earlier)]) == 0
    assert "1 of 3 rows restamped" in capsys.readouterr().out
    found = winners_table.load(table.read_text())
    assert [is_fresh(each) for each in found] == [True, False, True]
    assert replace(found[0], origin="own") == row()

    rewrite(earlier, file, "\nUNUSED = 0", "")
    rewrite(
        earlier,
        "cutegemm/cute/warps/config.py",
        "threads(self) -> int:\n",
        "threads(self) -> int:\n        return 512\n",
    )
    (other,) = machine_code.answers(earlier, [REQUEST])
    assert other.get("code") != today["code"]
    table.write_text(winners_table.dump([row(fingerprint=other.get("fingerprint", "x"))]))
    assert winners.main(["restamp", str(table), "--before", str(earlier)]) == 0
    assert "0 of 1 rows restamped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkout_without_the_tool_is_an_error(tmp_path, capsys):
    table = tmp_path / "table.json"
    table.write_text(winners_table.dump([row(backend="torch", config="")]))  # nothing to compile
    assert winners.main(["restamp", str(table), "--before", str(tmp_path)]) == 2
    assert "expected a checkout of the sources" in capsys.readouterr().err


def test_a_selection_of_no_row_is_an_error(tmp_path, capsys):
    table = tmp_path / "table.json"
    table.write_text(winners_table.dump([row()]))
    assert winners.main(["restamp", str(table), "--before", str(tmp_path), "--shape", "1x1x1"]) == 2
    assert "no row of it is of that GPU, backend and shape" in capsys.readouterr().err


def test_a_request_that_cannot_be_compiled_is_answered(tmp_path):
    lines = "".join(
        json.dumps(each) + "\n" for each in [("H200", "cute", "sm90/x", str(PROBLEM)), ("H200", "torch", "", "")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "tuning.machine_code"], input=lines, text=True, capture_output=True, check=True, cwd=ROOT
    )
    first, *found = map(json.loads, done.stdout.splitlines())
    assert first == {"sources": str(ROOT)}
    assert ["error" in each for each in found] == [True, True]


def test_a_wrong_folder_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    asked = []
    said = machine_code._said
    monkeypatch.setattr(machine_code, "_said", lambda folder, lines: asked.append(lines) or said(folder, lines))
    with pytest.raises(ValueError, match="expected a checkout of the sources"):
        machine_code.answers(tmp_path, [REQUEST])
    assert asked == [""]


def test_what_is_no_request_has_an_answer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", ["garbage\n", "[1]\n", "3\n"])
    assert machine_code.main() == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert [each["error"][:5] for each in answers] == ["got '"] * 3
    assert "garbage" in answers[0]["error"]
