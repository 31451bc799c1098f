"""What the benchmark makes of times: ratios, table, summary, files, plots, samples for the fit of the cost model."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from cutegemm.problem import Problem
from tests.bench_fakes import Fake, results
from tests.tuning_fakes import H200
from tuning import bench_report, calibrate
from tuning.bench_report import Result


def test_summary_is_the_geometric_mean():
    rows = [Result("p", n, n, n, "ours", "ok", us=1.0, ratio=ratio) for n, ratio in ((8, 0.5), (16, 2.0), (32, 1.0))]
    text = bench_report.summary([Result("p", 8, 8, 8, "torch", "ok", us=1.0, ratio=1.0), *rows])
    assert "1.000 (geometric mean of 3), 0.500 (8x8x8) to 2.000" in text
    assert text.splitlines()[-1] == "  below 1: 8x8x8 0.500"
    assert bench_report.short_text([("one", 1.2), ("two", 1.1)], 1.5) == "  below 1.5: two 1.100, one 1.200"
    assert bench_report.short_text([("one", 1.5)], 1.5) == ""


def test_ratios_are_to_whom_is_named():
    providers = [Fake("torch-blocks"), Fake("torch"), Fake("ours")]
    found, _, _ = results(providers=providers, times={"torch-blocks": 6.0, "torch": 3.0, "ours": 2.0})
    assert [r.ratio for r in found] == [1.0, 2.0, 3.0]
    assert "ours: ratio to torch-blocks 3.000" in bench_report.summary(found)
    refused = [Fake("torch", refuses="no"), Fake("ours")]
    found, _, _ = results(providers=refused)
    assert (found[1].us, found[1].ratio) == (2.0, None)  # not a ratio to somebody else
    assert "ours: no times" in bench_report.summary(found)
    assert bench_report.table(found).splitlines()[3].split()[6:7] == ["-"]


def test_files(tmp_path):
    found, _, _ = results(shapes=((64, 48, 32), (8, 8, 8)))
    there, sheet = tmp_path / "out.json", tmp_path / "out.csv"
    bench_report.write(found, {"before": "idle"}, {"dtype": "bf16"}, json_path=str(there), csv_path=str(sheet))
    assert bench_report.read(there) == found
    assert json.loads(there.read_text())["header"] == {"before": "idle"}
    rows = list(csv.DictReader(sheet.open()))
    assert [row["provider"] for row in rows] == ["torch", "ours"] * 2
    assert float(rows[1]["ratio"]) == 2.0
    there.write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"not the JSON of tuning\.bench"):
        bench_report.read(there)


def test_calibration_reads_the_json(tmp_path):
    config = "sm80/128x128x32/w64x64/s4/g8"
    found, _, _ = results(providers=[Fake("torch"), Fake("ours", config=config)])
    bench_report.write(found, {}, {}, json_path=str(tmp_path / "out.json"))
    (sample,) = calibrate.read(tmp_path / "out.json", H200)
    assert (sample.problem, sample.config, sample.seconds) == (Problem.of(64, 48, 32), config, pytest.approx(2e-6))


def test_times_with_packing_are_no_times_of_a_kernel(tmp_path):
    config = "sm80/128x128x32/w64x64/s4/g8"
    found, _, _ = results(providers=[Fake("torch"), Fake("ours", config=config)])
    packed = replace(found[1], before="pack b")
    bench_report.write([found[1], packed], {}, {}, json_path=str(tmp_path / "out.json"))
    assert len(calibrate.read(tmp_path / "out.json", H200)) == 1


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from tuning.plot import plot_bench

    found, _, _ = results(shapes=((64, 48, 32), (8, 8, 8)))
    plot_bench(found, H200, tmp_path / "out.png", title="bf16")
    assert (tmp_path / "out.png").stat().st_size > 5000
    refused = [Result("p", 1, 1, 1, "ours", "not served: no")]
    with pytest.raises(ValueError, match="nothing was timed"):
        plot_bench(refused, H200, tmp_path / "none.png")


def test_a_plot_from_the_json(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from tuning import plot

    found, _, _ = results()
    there, image = tmp_path / "out.json", tmp_path / "out.png"
    header = {"before": "NVIDIA H200, driver 1", "arch": "H200"}
    bench_report.write(found, header, {"dtype": "bf16", "majors": "tn"}, json_path=str(there))
    assert plot.main([str(there), str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    there.write_text("{}")
    assert plot.main([str(there), str(image)]) == 2
    assert "not the JSON of tuning.bench" in capsys.readouterr().err


def test_monitor_takes_the_busier_half():
    monitor = bench_report.Monitor(False)
    assert monitor.typical() == (None, None)
    monitor._samples += [(1980, 100), (1400, 690), (1410, 680), (1980, 90)]
    assert monitor.typical() == (1405, 685)
