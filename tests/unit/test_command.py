"""The console command: it names every tool, and each tool answers --help."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest

from cutegemm.native import build
from cutegemm.winners import Measurement, Winners
from tests.unit.conftest import SHIPPED
from tuning import command, explain, precision

ROOT = SHIPPED.parents[1]


def test_help_names_every_tool(capsys):
    for arguments in ([], ["--help"]):
        assert command.main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in command.TOOLS)


def test_an_unknown_tool_is_refused_with_the_names(capsys):
    assert command.main(["swep"]) == 2
    shown = capsys.readouterr().err
    assert "'swep'" in shown
    assert "sweep" in shown


@pytest.mark.parametrize("name", sorted(command.TOOLS))
def test_each_tool_answers_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([name, "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage:" in shown
    module = command.TOOLS[name][0].removesuffix(".__main__")
    assert f"`cutegemm {name}` is the same command as `python -m {module}`" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["precision", "--emulate", "--sizes", "16", "--config", "foo"], "error: config: got 'foo', accepted"),
        (["precision", "--emulate", "--sizes", "16", "--config", "simt/64x64x8/w32x32/s3/g8"], "cannot serve"),
        (["host-cost", "--new-shapes", "2", "--arch", "foo"], "error: --arch: 'foo' is not in the table"),
        (["host-cost", "--choice", "2", "--arch", "foo"], "error: --arch: 'foo' is not in the table"),
        (["host-cost", "--choice", "0"], "argument --choice: got '0', expected a whole number of at least 1"),
        (["host-cost", "--stub", "--calls", "0"], "argument --calls: got '0', expected"),
        (["blocks", "--layers", "0"], "argument --layers: got '0', expected"),
        *(
            ([name, "--rounds", given], f"argument --rounds: got '{given}', expected a whole number of at least 1")
            for name in ("bench", "blocks", "fused", "grouped", "host-cost", "mlp", "moe", "published", "quantize")
            for given in ("0", "-1", "x")
        ),
    ],
)
def test_a_bad_argument_is_named_with_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("clean", 2)])
def test_the_build_of_the_extension_takes_no_arguments(argument, status, monkeypatch):
    monkeypatch.setattr(build, "library", lambda: pytest.fail("it compiles"))
    with pytest.raises(SystemExit) as stopped:
        build.main([argument])
    assert stopped.value.code == status


@pytest.mark.parametrize("arguments", [["winners", "list"], ["sweep", "--shapes", "64"]])
def test_a_file_that_is_no_store_is_left_alone(arguments, tmp_path, capsys):
    """A table that `winners export` wrote was moved aside as a damaged store."""
    table = tmp_path / "table.json"
    table.write_text("{}")
    with pytest.raises(SystemExit):
        command.main([*arguments, "--store", str(table)])
    assert "which is no winners store" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]
    assert command.main(["winners", "list", "--no-shipped", "--store", str(tmp_path / "new")]) == 0


def test_a_list_does_nothing_to_the_terminal(tmp_path, capsys):
    store = Winners(tmp_path / "w.sqlite3")
    problem = "64x64x64 bf16->bf16/ieee/ak16/bk16/c0/d16/alpha*acc"
    store.record(Measurement("H200", 132, problem, "cute", "sm80/x", "f", None, "wrong: \x1b[31m\n"))
    assert command.main(["winners", "list", "--all", "--no-shipped", "--store", str(store.path)]) == 0
    said = capsys.readouterr().out
    assert "wrong: ?[31m?" in said
    assert "\x1b" not in said


def test_the_installed_script_is_this_command():
    found = re.search(r'^cutegemm = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    assert getattr(importlib.import_module(found[1]), found[2]) is command.main


def test_tools_with_a_command_line_are_all_named():
    lines = {
        path.stem
        for path in (ROOT / "tuning").glob("*.py")
        if "cli.parser(" in path.read_text() and "__main__" in path.read_text()
    }
    assert len(lines) > 10
    assert {f"tuning.{name}" for name in lines} <= {module for module, _ in command.TOOLS.values()}


def test_explain_shows_row_major_fp8_as_gemm_runs_it(capsys):
    assert explain.main(["--shapes", "256", "--gpu", "H200", "--dtype", "e4m3", "--majors", "tt"]) == 0
    printed = capsys.readouterr().out
    assert "backend        cute" in printed
    assert "configuration  sm90/" in printed
    assert "copied first: tt is shown as tn" in printed


def test_explain_takes_terms_as_gemm_does(capsys):
    assert explain.main(["--shapes", "64", "--dtype", "e4m3", "--bias", "--c"]) == 0
    assert "beta*C[bf16]+bias_n[bf16]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--activation", "relu"], "out_dtype: got torch.int32 (the default of int8) with c, bias or an activation"),
        (["--bias"], "out_dtype: got torch.int32"),
        (["--bias", "--out-dtype", "int8"], "bias: got torch.int8, accepted are torch.float16"),
        (["--c", "--out-dtype", "e4m3"], "c: got torch.float8_e4m3fn, accepted are torch.float16"),
    ],
)
def test_explain_refuses_what_gemm_refuses(given, why, capsys):
    assert explain.main(["--shapes", "64", "--dtype", "int8", *given]) == 2
    assert why in capsys.readouterr().err


def test_explain_takes_float64_where_gemm_does(capsys):
    assert explain.main(["--shapes", "64", "--dtype", "fp64", "--out-dtype", "fp64", "--c"]) == 0
    assert "fp64 -> fp64" in capsys.readouterr().out
    assert explain.main(["--shapes", "64", "--dtype", "bf16", "--out-dtype", "fp64"]) == 2
    assert "out_dtype: got torch.float64 with operands of torch.bfloat16" in capsys.readouterr().err


def test_the_page_on_tuning_shows_what_explain_says(capsys):
    shown = (SHIPPED.parents[1] / "docs" / "tuning.md").read_text().split("```\n")[1].splitlines()
    assert explain.main(["--shapes", "2048x1536x2048", "--gpu", "H200"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == 3
    assert [" ".join(line.split()) for line in shown] == [
        line for line in said if line.split()[0] in {"backend", "configuration", "estimate"}
    ]


@pytest.mark.parametrize("tool", ["exhaustive", "untuned"])
def test_a_file_that_is_no_store_is_refused_by_what_judges_too(tool, tmp_path, capsys):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"tuning.{tool}").main(["--store", str(notes)])
    assert stop.value.code == 2
    assert "which is no winners store" in capsys.readouterr().err
    assert notes.read_text() == "mine"


def test_precision_emulates_small_sizes_alone(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(precision, "emulated", lambda kind, *size, config: asked.append(size[:3]) or [])
    monkeypatch.setattr(precision, "table", lambda points: "")
    assert precision.main(["--emulate", "--inputs", "normal"]) == 0
    assert asked == list(precision.SMALL)
    with pytest.raises(SystemExit):
        precision.main(["--emulate", "--sizes", "64", "1024"])
    assert "--sizes: got 1024x1024x1024; the emulator takes up to" in capsys.readouterr().err


def test_explain_without_a_gpu(capsys):
    assert explain.main(["--shapes", "4096x4096x64,128", "--bias", "--activation", "gelu", "--gpu", "H200"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("problem ") == 2
    for text in ("M=4096 N=4096 K=64", "gelu(", "sm90/", "estimate", "bound"):
        assert text in shown
    assert explain.main(["--shapes", "64", "--gpu", "H200", "--config", "sm90/nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert explain.main(["--shapes", "64", "--gpu", "no such"]) == 2
    assert "explain: --gpu: got 'no such', accepted are A100," in capsys.readouterr().err


def test_whoever_reads_may_stop():
    """As `cutegemm winners list | head -1` does."""
    code = "import sys; from tuning import command; sys.exit(command.main(['winners', 'list']))"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | head -1', shell=True, capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.product(keep=1)
def test_a_pipe_of_a_tool_that_breaks(read, monkeypatch, tmp_path):
    """It ends the command quietly only where it is the one that the command writes to."""
    (tmp_path / "tool_that_breaks.py").write_text("def main(arguments):\n    raise BrokenPipeError\n")
    code = "import sys; from tuning import command; command.TOOLS['x'] = 'tool_that_breaks', ''; "
    code += "sys.exit(command.main(['x']))"
    reader = "cat" if read else "exec <&-"
    done = subprocess.run(
        f'(sleep 0.3; {sys.executable} -c "{code}"; echo $? >&2) | {reader}',
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert done.stderr.strip().endswith("BrokenPipeError\n1") if read else done.stderr == "1\n"


HELP = """
import contextlib, importlib, io
from tuning import command
for name, (module, _) in command.TOOLS.items():
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    assert "usage: " in said.getvalue(), name
"""


def test_tools_need_no_docstrings():
    subprocess.run([sys.executable, "-OO", "-c", HELP], cwd=ROOT, check=True)


@pytest.mark.parametrize(("given", "status", "said"), [
    ("winners list >&-", 0, ""),
    ("winners import - <&-", 2, "python -m tuning.winners import: standard input: it is closed\n"),
])  # fmt: skip
@pytest.mark.product(keep=1)
def test_standard_streams_may_be_closed(given, status, said, tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m tuning.command {given}", shell=True, cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "CUTEGEMM_CACHE_DIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, said)


def test_explain_writes_nothing_that_it_needs(tmp_path):
    """Without a folder that can be written Python computes the cost model, as it does without a C compiler."""
    code = "import tempfile; tempfile.tempdir = '/proc'; from tuning import command; "
    code += "print(command.main(['explain', '--shapes', '2048x1536x2048', '--gpu', 'H200']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "CUTEGEMM_CACHE_DIR": "/proc/x"},
    )  # fmt: skip
    assert done.stdout.endswith("0\n"), done.stdout + done.stderr


def test_a_ladder_by_name(capsys):
    with pytest.raises(SystemExit):
        command.main(["ladder", "hopper", "--ladder", "16bit"])
    assert "--ladder: got 16bit beside hopper; name one" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["ladder", "32bit"])
    assert "invalid choice: '32bit'" in capsys.readouterr().err
