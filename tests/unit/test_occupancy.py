"""Occupancy, quantization and roofline against worked examples, and the reader of machine code."""

from __future__ import annotations

import pytest

from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.cubin import usage
from cutegemm.hardware.roofline import quantization, roofline
from cutegemm.problem import Problem
from tuning import occupancy as tool
from tuning.occupancy import main, occupancy, resources


def test_a6000_block_of_1024_threads_with_37_registers():
    # siboehm.com/articles/22/CUDA-MMM: one block per SM, 66 %; registers and threads both allow just one.
    got = occupancy(arch_table.get("A6000"), registers=37, smem=8192, threads=1024)
    assert (got.ctas, got.warps) == (1, 32)
    assert got.share == pytest.approx(2 / 3)
    assert got.limits == {"threads": 1, "registers": 1, "shared memory": 11, "CTAs": 16}
    assert got.limited_by == ("threads", "registers")


def test_h100_block_of_1024_threads_with_32_registers():
    got = occupancy(arch_table.get("H100 PCIe"), registers=32, smem=0, threads=1024)
    assert (got.ctas, got.share) == (2, 1.0)
    assert got.limited_by == ("threads", "registers")


def test_waves_of_the_h100_example():
    # 4096 x 4096 in tiles of 32 x 32 is 16384 blocks; 114 SMs of two blocks each run 228 at once.
    got = quantization(4096, 4096, 32, 32, in_flight=228)
    assert got.tiles == 16384
    assert got.waves == pytest.approx(71.86, abs=0.005)
    assert got.wave_share == pytest.approx(71.86 / 72, abs=1e-4)
    assert got.tile_share == 1.0


@pytest.mark.parametrize(
    ("name", "registers", "smem", "threads", "ctas", "limit"),
    [
        ("H200", 255, 33792, 128, 2, "registers"),  # 255 -> 8192 registers a warp, 8 warps, 2 CTAs of 4
        ("H200", 168, 0, 384, 1, "registers"),  # three warpgroups: 5376 a warp, 12 warps, 1 CTA of 12
        ("H200", 32, 100 * 1024, 128, 2, "shared memory"),  # 101 KiB with the system's share, of 228
        ("H200", 32, 227 * 1024, 128, 1, "shared memory"),
        ("A100", 32, 0, 32, 32, "CTAs"),
        ("A6000", 32, 0, 32, 16, "CTAs"),
        ("RTX 4090", 32, 0, 32, 24, "CTAs"),
        ("RTX 4090", 40, 49152, 256, 2, "shared memory"),
        ("A100", 64, 0, 96, 10, "registers"),  # 2048 a warp, 32 warps, 10 CTAs of 3
    ],
)
def test_limiting_resource(name, registers, smem, threads, ctas, limit):
    got = occupancy(arch_table.get(name), registers=registers, smem=smem, threads=threads)
    assert got.ctas == ctas
    assert limit in got.limited_by
    assert got.ctas == min(got.limits.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"registers": 256}, "registers: got 256"),
        ({"registers": 0}, "registers: got 0"),
        ({"threads": 1025}, "threads: got 1025"),
        ({"smem": 228 * 1024}, "smem: got 233472"),
        ({"registers": 128, "threads": 1024}, "more than 65536 a CTA"),
    ],
)
def test_impossible_launches_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        occupancy(arch_table.get("H200"), **{"registers": 32, "smem": 0, "threads": 128, **changes})


def test_more_of_a_resource_never_raises_occupancy():
    arch = arch_table.get("A100")
    counts = [occupancy(arch, registers=r, smem=0, threads=128).ctas for r in range(16, 256)]
    assert counts == sorted(counts, reverse=True)
    counts = [occupancy(arch, registers=16, smem=s, threads=128).ctas for s in range(0, arch.smem_per_cta, 512)]
    assert counts == sorted(counts, reverse=True)


def test_tile_quantization():
    got = quantization(130, 257, 128, 128, in_flight=4, batch=2)
    assert got.tiles == 12
    assert got.tile_share == pytest.approx(130 * 257 / (6 * 128 * 128))
    assert (got.waves, got.wave_share) == (3.0, 1.0)
    empty = quantization(0, 5, 128, 128, in_flight=4)
    assert (empty.tiles, empty.waves, empty.wave_share) == (0, 0.0, 1.0)
    with pytest.raises(ValueError, match="in_flight=0"):
        quantization(1, 1, 1, 1, in_flight=0)


def test_roofline():
    arch = arch_table.get("H200")
    big = roofline(Problem.of(8192, 8192, 8192, "bf16"), arch)
    assert big.limit == "arithmetic"
    assert big.bound_s == pytest.approx(2 * 8192**3 / 989.4e12)
    assert big.intensity == pytest.approx(2 * 8192**3 / (3 * 8192**2 * 2))
    assert big.share(2 * big.bound_s) == pytest.approx(0.5)
    thin = roofline(Problem.of(1, 8192, 8192, "fp32"), arch)
    assert thin.limit == "memory"
    assert thin.bound_s == pytest.approx((8192 + 8192**2 + 8192) * 4 / 4.8e12)
    tf32 = roofline(Problem.of(8192, 8192, 8192, "fp32", precision="tf32"), arch)
    assert tf32.flop_s == pytest.approx(2 * 8192**3 / 494.7e12)
    with pytest.raises(ValueError, match="positive"):
        big.share(0.0)


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_resources_of_a_compiled_rung(name):
    from legacy_cuda.backend import BACKEND
    from legacy_cuda.config import parse

    arch = arch_table.get(name)
    problem = Problem.of(64, 64, 64, "fp32", majors="tt")
    kernel = BACKEND.build(problem.signature, parse("block_tile"), arch)
    got = resources(kernel, problem)
    assert (got.smem, got.threads, got.stack) == (2 * 32 * 32 * 4, 1024, 0)
    assert 16 < got.registers <= 32, "__launch_bounds__ asks for two CTAs of 1024 threads"
    tiled = BACKEND.build(problem.signature, parse("async_copy"), arch)
    assert resources(tiled, problem).smem == 2 * 16 * (132 + 132) * 4


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\x01" + bytes(80), b"\x7fELF\x02" + bytes(3), b"\x7fELF\x02" + bytes(200)]
)
def test_what_is_no_cubin_is_refused(data):
    with pytest.raises(ValueError, match="cubin"):
        usage(data)


def test_command_line(capsys):
    arguments = "--registers 37 --smem 8192 --threads 1024 --arch A6000,H200 --tile 32x32 --shape 4096x4096x4096"
    assert tool.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert "threads, registers" in printed
    assert "66.7 %" in printed
    assert "16384" in printed


@pytest.mark.parametrize("arguments", ["--registers 37", "--shape 1x2", "--arch B3000", "--config no_such_rung"])
def test_command_line_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("backend", ["cute", "legacy"])
def test_an_empty_product_launches_nothing(backend, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(["--backend", backend, "--arch", "H200", "--dtype", "fp16", "--majors", "tn", "--shape", "0x64x64"])
    assert stop.value.code == 2
    assert "launches nothing" in capsys.readouterr().err


def test_products_of_float64_are_examined_too(capsys):
    arguments = ["--backend", "cute", "--dtype", "fp64", "--arch", "H200", "--shape", "512x512x512", "--majors", "tn"]
    assert tool.main(arguments) == 0
    assert "shared memory" in capsys.readouterr().out


def test_the_product_is_what_is_examined_and_parts_of_k_are_counted(capsys):
    """Not the launch that splits fp32 operands, which has more CTAs."""
    command = ["--backend", "cute", "--arch", "H200"]
    config = ["--config", "sm90/128x128x32/coop2/c1x1/s4/serp8/pdl"]
    assert (
        tool.main(
            [*command, *config, "--shape", "512x512x256", "--dtype", "fp32", "--precision", "bf16x6", "--majors", "tn"]
        )
        == 0
    )
    cells = capsys.readouterr().out.splitlines()[2].split()
    assert cells[3] == "384"
    assert int(cells[2]) > 100_000
    config = ["--config", "sm90/64x64x64/coop1/c1x1x2/s4/row/k3/pdl"]
    assert tool.main([*command, *config, "--shape", "64x128x4096", "--dtype", "bf16", "--majors", "tn"]) == 0
    assert "2 x 6 parts" in capsys.readouterr().out


def test_a_gpu_that_cannot_run_it_is_named_below_the_table(capsys):
    """The others have their rows; where no GPU can, it is an error."""
    assert main(["--registers", "128", "--threads", "256", "--smem", "200000", "--arch", "A100,H200"]) == 0
    said = capsys.readouterr().out
    assert "H200" in said.splitlines()[2]
    assert said.splitlines()[3] == "not on A100: smem: got 200000, A100 takes 0 to 166912"
    options = ["--backend", "cute", "--dtype", "e4m3", "--majors", "tn", "--arch"]
    assert main([*options, "A100,sm_90a"]) == 0
    assert "\nnot on A100: mma.sync multiplies fp8 from compute capability 8.9 on" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*options, "A100"])
    assert "error: A100: mma.sync multiplies fp8" in capsys.readouterr().err
