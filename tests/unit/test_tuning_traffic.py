"""The counters of `tuning.traffic`: what ncu writes is read, added up by product, and shown; no GPU is needed."""

from __future__ import annotations

import csv
import io
import json
import stat

import pytest

from tuning import traffic

CONFIG = "sm90/128x256x64/coop2/c1x2/s4/serp16/zig/streamk/pdl"
VALUES = {"nanoseconds": "2,000", "cycles": "1,000", "read": "3,000,000,000", "written": "250,000,000",
          "l2": "6,000,000,000", "crossed": "31,250,000", "to_sms": "12,000,000,000", "busy": "90.5"}  # fmt: skip


def written(names: list[str], kernels: list[str]) -> str:
    """The output of the child under ncu: a kernel after the other, each with its counters."""
    text = io.StringIO()
    text.write(f"==PROF== Connected\n{traffic.WAYS}{json.dumps(names)}\n==PROF== Disconnected\n")
    rows = csv.writer(text, quoting=csv.QUOTE_ALL)
    rows.writerow(("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"))
    for number, kernel in enumerate(kernels):
        for name, metric in traffic.METRICS.items():
            rows.writerow((number, kernel, metric, "", VALUES[name] if kernel != "idle" else "0"))
    return text.getvalue()


def test_kernels_are_added_up_by_way():
    text = written(["a", "b"], ["at::FillFunctor<int>", "one", "two", "at::FillFunctor<int>", "three", "idle"])
    (first, two), (second, one) = traffic.counted(text)
    assert (first, second) == ("a", "b")
    assert (two.kernels, two.nanoseconds, two.read, two.busy) == (2, 4000, 6e9, 90.5)
    assert (one.kernels, one.cycles, one.written, one.busy) == (2, 1000, 25e7, 90.5)  # weighted by cycles


def test_a_way_whose_kernels_are_missing():
    with pytest.raises(ValueError, match="counted 1 groups of kernels, the child launched 2"):
        traffic.counted(written(["a", "b"], ["at::FillFunctor<int>", "one"]))
    with pytest.raises(ValueError, match=r"no kernel was counted; it said .*ERR_NVGPUCTRPERM"):
        traffic.counted("==ERROR== ERR_NVGPUCTRPERM - no permission to read the counters")


def test_a_table_in_gigabytes():
    shown = traffic.table("8192x8192x8192", traffic.counted(written(["x"], ["FillFunctor", "one"])))
    heading, _, line = shown.splitlines()
    assert heading.split()[0] == "8192x8192x8192"
    assert line.split() == ["x", "1", "2.0", "1", "3.000", "0.250", "6.00", "1.00", "12.00", "90.5"]


def test_the_command_runs_itself_under_ncu(tmp_path, monkeypatch, capsys):
    names = [f"{product}\n{way}" for product in ("64x64x64", "8x512x4096x7168 even") for way in ("torch", CONFIG)]
    text = written(names, ["FillFunctor", "one"] * 4)
    (tmp_path / "said").write_text(text)
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/given\ncat {tmp_path}/said\n")
    ncu.chmod(ncu.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = ["--shapes", "64", "--entries", "8x512x4096x7168 even", "--config", CONFIG]
    assert traffic.main(asked) == 0
    shown = capsys.readouterr().out
    assert shown.count(CONFIG) == 2
    assert [line.split()[0] for line in shown.splitlines() if "kernels" in line] == ["64x64x64", "8x512x4096x7168"]
    given = (tmp_path / "given").read_text()
    assert "--clock-control none" in given
    assert given.strip().endswith(f"-m tuning.traffic --child {' '.join(asked)}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name what to run"),
        (["--entries", "8x8"], "--entries: got '8x8', accepted are 8x2x28672x4096 uniform"),
        (["--shapes", "64", "--config", "sm90/what"], "--config: got 'sm90/what'"),
        (["--shapes", "0"], "0"),
    ],
)
def test_what_is_not_known(arguments, said, capsys):
    with pytest.raises(SystemExit):
        traffic.main(arguments)
    assert said in capsys.readouterr().err


def test_without_ncu(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert traffic.main(["--shapes", "64"]) == 2
    assert "ncu (Nsight Compute) is not on the PATH" in capsys.readouterr().err
