"""The command line of the emulator, and the workloads behind it."""

import json
import re

import pytest
import torch

from cutegemm.emulator.__main__ import main
from cutegemm.emulator.workload import Workload, build, parse_shape
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue

pytest.importorskip("llvmlite")
LEGACY = ["--backend", "legacy", "--dtype", "fp32", "--majors", "tt", "--config", "block_tile"]


def test_a_run_prints_its_result_and_the_profile(capsys):
    assert main([*LEGACY, "--shape", "33x40x20", "--seed", "5"]) == 0
    text = capsys.readouterr().out
    for part in (
        "right: largest error",
        "33x40x20",
        "integer",
        "synchronization",
        "coalescing",
        "conflicts by PTX line",
    ):
        assert part in text


def test_a_cute_kernel_runs_through_its_own_host_code(capsys):
    assert main(["--shape", "72x40x136", "--config", "sm80/64x64x32/w32x32/s3/g8", "--lines", "3"]) == 0
    text = capsys.readouterr().out
    assert "(2, 1, 1), (128, 1, 1), 24576 B" in text
    assert "async copy" in text
    assert "cp.async" in text


@pytest.mark.parametrize(
    ("config", "size", "loaded", "stored"),
    [
        # 16 tiles of 64x64, each of 4 k tiles; multicast loads what a cluster shares once.
        (
            "sm90/64x64x64/coop1/c1x1/s4/row",
            256,
            ("bulk load", 16 * 4 * 2 * 64 * 64 * 2),
            ("bulk store", 256 * 256 * 2),
        ),
        ("sm90/64x64x64/coop1/c2x2/s4/row", 256, ("bulk load", 16 * 4 * 64 * 64 * 2), ("bulk store", 256 * 256 * 2)),
        # The ring's stages behind the only k tile are filled with zeros, which no memory gives.
        ("sm80/64x64x64/w32x32/s3/g8", 64, ("cp.async", 2 * 64 * 64 * 2), ("global write", 64 * 64 * 2)),
    ],
)
@pytest.mark.product(keep=1)
def test_bytes_and_intensity_are_those_of_the_tiles(config, size, loaded, stored, capsys):
    assert main(["--shape", str(size), "--config", config]) == 0
    text = capsys.readouterr().out
    for kind, count in (loaded, stored):
        assert f"\n{kind} {count:,} B\n" in re.sub(" {2,}", " ", text)
    assert f"arithmetic intensity  {2 * size**3 / (loaded[1] + stored[1]):.1f} flop/B requested" in text


def test_lines_that_are_discarded_are_no_traffic(capsys):
    assert main(["--shape", "256", "--config", "sm90/64x64x64/coop1/c1x1/s4/row/k2", "--lines", "0"]) == 0
    assert not re.search(r"discard\.global.*%$", capsys.readouterr().out, re.MULTILINE)


def test_json_and_the_dumped_ptx_agree_with_the_tables(capsys, tmp_path):
    dump = tmp_path / "kernel.ptx"
    assert main([*LEGACY, "--shape", "16", "--json", "--dump-ptx", str(dump)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert 0 < found["error_of_bound"] <= 1
    (report,) = found["reports"]
    assert report["ctas"] == 1
    assert report["instructions"]["float"] >= 16 * 16 * 16 / 32
    assert report["bytes"]["global write"] == 16 * 16 * 4
    assert main(["--ptx", str(dump)]) == 0
    text = capsys.readouterr().out
    assert "block_tile" in text
    assert "bar.sync" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "16", "--seed", "9" * 20], "--seed: got '9"),
        (["--shape", "16", "--seed", "-1"], "--seed: got '-1', accepted is a number of at least 0"),
        ([*LEGACY, "--shape", "16", "--dump-ptx", "."], "--dump-ptx: "),
        (["--shape", "12x"], "shape: got '12x'"),
        (["--shape", "16", "--config", "nonsense"], "config"),
        (["--shape", "16", "--arch", "sm_70"], "sm_70"),
        (
            ["--shape", "16", "--precision", "tf32", "--dtype", "fp16", "--config", "simt/64x64x8/w32x32/s3/g8"],
            "precision",
        ),
        (["--ptx", "/does/not/exist.ptx"], "exist.ptx"),
        (["--shape", "100000"], "--shape: got '100000', whose matrices take 55.9 GiB; accepted are 4"),
        (["--shape", "0"], "--shape: got '0'; M and N are at least 1"),
        (["--shape", "16x0x16"], "--shape: got '16x0x16'"),
        (["--shape", "16", "--batch", "0"], "--batch: got 0, accepted is 1 or more"),
        (["--shape", "16", "--lines", "-3"], "--lines: got -3, accepted is 0 or more"),
    ],
)
def test_a_bad_argument_is_named_with_status_2(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", [".visible .entry k(.param .u64 a) { this is not PTX; }", "no kernel", ""])
def test_a_ptx_file_that_is_none_is_refused(text, tmp_path, capsys):
    wrong = tmp_path / "wrong.ptx"
    wrong.write_text(text)
    assert main(["--ptx", str(wrong)]) == 2
    assert "wrong.ptx" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--config", "sm90/64x16x32/coop1/c1x1/s2/row"],
        ["--config", "sm90/64x16x32/coop1/c1x1/s2/row", "--out-dtype", "int8"],
        ["--arch", "sm_80", "--config", "sm80/32x32x64/w16x16/s2", "--out-dtype", "bf16"],
    ],
)
@pytest.mark.product(keep=1)
def test_products_of_int8_run(options, capsys):
    assert main(["--dtype", "int8", "--shape", "40x24x48", *options]) == 0
    assert "right" in capsys.readouterr().out


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    options = ("backend", "dtype", "shape", "majors", "config", "arch", "seed", "ptx", "json", "lines", "no-checks")
    assert all(f"--{name}" in text for name in options)


@pytest.mark.parametrize(("text", "shape"), [("7", (7, 7, 7)), ("1X2x3", (1, 2, 3))])
def test_shapes(text, shape):
    assert parse_shape(text) == shape


def test_a_wrong_kernel_is_told_by_the_reference():
    problem = Problem.of(16, 16, 16, "fp32", majors="tt")
    work = Workload.of(problem, build("legacy", problem, arch.get("sm_80"), "block_tile"))
    assert work.run(seed=1)[0].ok
    broken = work.kernel.ptx.replace("fma.rn.f32", "fma.rz.f32")
    assert work.run(ptx=broken)[0].ok, "another rounding of the products stays within the bound"
    broken = work.kernel.ptx.replace("sub.", "add.").replace("mul.f32", "add.f32")
    assert not work.run(ptx=broken)[0].ok


def test_a_workload_reads_c_and_the_bias_of_its_epilogue():
    epilogue = Epilogue("fp16", "fp16", activation="relu")
    problem = Problem.of(24, 40, 16, "fp16", batch=2, epilogue=epilogue)
    work = Workload.of(problem, build("cute", problem, arch.get("sm_80")), alpha=0.75)
    assert (work.beta, set(work.tensors)) == (0.5, {"a", "b", "c", "d", "bias"})
    verdict, reports = work.run(seed=3)
    assert verdict.ok, verdict.message
    assert len(reports) == 1
    work.tensors["c"].fill_(1e4)
    assert not work.run(seed=3)[0].ok, "the kernel reads the C of the workload, not a copy"
    assert torch.isfinite(work.tensors["d"]).all()
