"""The fuzzer finds what it is there to find, repeats what it found, and survives what it runs."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import time

import pytest
import torch

import cutegemm
from cutegemm.hardware import arch as arch_table
from tests import fuzz, fuzz_groups, fuzz_kernels, fuzz_programs, fuzz_scaled
from tests.fuzz_draw import CPU, CUDA, Pair, draw, resolve
from tests.fuzz_kernels import Slot
from tests.fuzz_spec import EXACT, GUARD, Layout, Spec

H200 = arch_table.get("H200")
SPEC = Spec(
    seed=5,
    device="cpu",
    a=Layout("fp32", (7, 9), (12, 1), 1),
    b=Layout("fp32", (9, 11), (1, 9)),
    c=Layout("fp16", (7, 1), (1, 1)),
    bias=Layout("bf16", (11,), (2,), 3),
    out=Layout("fp32", (7, 11), (16, 1), 2),
    beta=0.5,
    activation="silu",
    backend="torch",
)


def test_a_right_problem_passes_and_its_program_repeats_it():
    assert 0 < SPEC.check() <= 1
    exec(SPEC.snippet(), {})
    special = dataclasses.replace(SPEC, specials=(("a", (0, 3), float("inf")), ("c", (2, 0), float("nan"))))
    exec(special.snippet(), {})
    assert dataclasses.replace(SPEC, out=None).check() <= 1
    assert dataclasses.replace(SPEC, c=None, c_is_out=True).check() <= 1
    assert dataclasses.replace(SPEC, beta=0.0).check() <= 1


def wrong_element(d, storage, arguments):
    d[3, 4] *= 1 + 2.0**-10


def unwritten(d, storage, arguments):
    d[6, 10] = torch.frombuffer(bytearray([SPEC.poison] * 4), dtype=torch.float32)[0]


def in_the_padding(d, storage, arguments):
    storage[GUARD + 2 + 11] = 0


def before_it(d, storage, arguments):
    storage[GUARD + 1] = 1


def behind_it(d, storage, arguments):
    storage[GUARD + 2 + 6 * 16 + 11] = 1


def far_behind_it(d, storage, arguments):
    storage[-1] = 1


def into_a(d, storage, arguments):
    arguments[0][0, 0] += 1


def into_the_bias_gaps(d, storage, arguments):
    arguments[1].as_strided((1,), (1,), arguments[1].storage_offset() + 1).fill_(0)


BREAKS = {
    wrong_element: "outside the bound", unwritten: "outside the bound", in_the_padding: "wrote around out",
    before_it: "wrote around out", behind_it: "wrote around out", far_behind_it: "wrote around out",
    into_a: "wrote to a", into_the_bias_gaps: "wrote to bias",
}  # fmt: skip


@pytest.mark.parametrize("broken", BREAKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("poison", [0xFF, 0x5A])
def test_it_finds(broken, poison, monkeypatch):
    real = cutegemm.gemm

    def gemm(a, b, c=None, **options):
        d = real(a, b, c, **options)
        out = options["out"]
        storage = out.as_strided((out.untyped_storage().nbytes() // 4,), (1,), 0)
        broken(d, storage, (a, options["bias"]))
        return d

    monkeypatch.setattr(cutegemm, "gemm", gemm)
    with pytest.raises(AssertionError, match=BREAKS[broken]):
        dataclasses.replace(SPEC, poison=poison).check()


@pytest.mark.parametrize("seed", [4, 5])
def test_it_finds_a_sum_of_integers_that_is_not_exact(seed, monkeypatch):
    """A last bit that the bound lets pass."""
    spec = dataclasses.replace(SPEC, seed=seed, values=EXACT, beta=-1.0, activation="relu")
    assert spec.check() <= 1
    assert dataclasses.replace(spec, c=None, c_is_out=True, alpha=-1.0).check() <= 1
    real = cutegemm.gemm

    def gemm(*operands, **options):
        d = real(*operands, **options)
        d[3, 4] = torch.nextafter(d[3, 4], torch.tensor(float("inf")))
        return d

    monkeypatch.setattr(cutegemm, "gemm", gemm)
    assert dataclasses.replace(spec, values="integers").check() <= 1
    with pytest.raises(AssertionError, match=r"1 of 77 sums of integers are not exact; the first at \(3, 4\)"):
        spec.check()


def test_it_finds_bits_that_change_from_run_to_run(monkeypatch):
    real, calls = cutegemm.gemm, []

    def gemm(*operands, **options):
        d = real(*operands, **options)
        calls.append(1)
        if len(calls) == 2:
            d[2, 2] = torch.nextafter(d[2, 2], torch.tensor(float("inf")))
        return d

    monkeypatch.setattr(cutegemm, "gemm", gemm)
    with pytest.raises(AssertionError, match=r"another run gave other bits: 1 elements, the first at \(2, 2\)"):
        SPEC.check()
    calls.clear()
    SPEC.check(repeat=False)


def test_it_finds_a_result_that_is_not_out(monkeypatch):
    real = cutegemm.gemm
    monkeypatch.setattr(cutegemm, "gemm", lambda *operands, **options: real(*operands, **options).clone())
    with pytest.raises(AssertionError, match="did not return out"):
        SPEC.check()


@pytest.mark.parametrize(("limits", "arch"), [(CUDA, "H200"), (CPU, "sm_90"), (CUDA, "A100")])
@pytest.mark.product(keep=1)
def test_draws_are_what_their_kernel_serves_and_repeat(limits, arch):
    arch = arch_table.get(arch)
    kinds = [kind for kind in fuzz_kernels.SHARES if kind not in ("sm90", "cutlass2x") or arch.capability == (9, 0)]
    slots = fuzz_kernels.choose(3, 16, limits, arch, kinds)
    assert slots == fuzz_kernels.choose(3, 16, limits, arch, kinds)
    assert {slot.kind for slot in slots} == set(kinds)
    run = fuzz.Run(3, limits.device, slots, arch)
    for number in range(25):
        spec, pair, kind = run.problem(number)
        assert (spec, pair, kind) == run.problem(number)
        assert resolve(spec, arch) == pair
        m, k = spec.a.shape[-2:]
        assert m * k * spec.b.shape[-1] <= limits.products
        assert spec.out is None or not spec.out.overlaps


@pytest.mark.slow
def test_the_whole_space_is_drawn():
    """Of a thousand problems some have each property that the fuzzer is to cover."""
    kinds = ("sm90", "sm80", "simt", "legacy", "torch")  # the others take what these take
    slots = fuzz_kernels.choose(1, 80, CUDA, H200, kinds)
    assert len({pair for slot in slots for pair in slot.pairs}) <= 100
    run = fuzz.Run(1, "cuda", slots, H200)
    specs = [run.problem(number)[0] for number in range(1000)]
    layouts = [layout for spec in specs for layout in (spec.a, spec.b)]

    def some(*found):
        assert any(found)

    for size in (0, 1, 127, 128, 129):
        some(*(size in layout.shape[-2:] for layout in layouts))
    some(*(0 in layout.strides[-2:] for layout in layouts))
    some(*(len(layout.shape) == 3 and layout.strides[0] == 0 and layout.shape[0] > 1 for layout in layouts))
    some(*(layout.overlaps for layout in layouts))
    some(*(1 not in layout.strides[-2:] for layout in layouts))
    some(*(len(s.a.shape) == 3 and len(s.b.shape) == 2 for s in specs))
    some(*(len(s.a.shape) == 3 and s.a.shape[0] == 0 for s in specs))
    some(*(s.c_is_out for s in specs))
    some(*(s.out is None for s in specs))
    some(*(s.out is not None and s.out.strides[-2] == 1 for s in specs))
    some(*(s.out is not None and 1 not in s.out.strides[-2:] for s in specs))
    some(*(s.c is not None and s.beta == 0 for s in specs))
    some(*(s.c is not None and len(s.c.shape) < 2 for s in specs))
    some(*(bool(s.specials) for s in specs))
    some(*(s.alpha == 0 for s in specs))
    exact = [s for s in specs if s.values == EXACT]
    assert 0.05 < len(exact) / len(specs) < 0.4
    some(*(s.a.shape[-1] > 1000 for s in exact))
    some(*(s.c is not None or s.c_is_out for s in exact))
    assert all({abs(s.alpha), abs(s.beta)} <= {0.0, 1.0} and not s.specials for s in exact)
    for name in ("majors", "order", "dtype", "out_dtype", "precision", "activation", "c", "c_dtype", "bias"):
        assert len({getattr(slot.template, name) for slot in slots}) > 1
    for align in (2, 4, 8, 16):
        for place in range(3):
            assert any(slot.template.aligns[place] == align for slot in slots)


@dataclasses.dataclass
class Deadly(fuzz.Run):
    """Some of whose problems end the process that runs them, or never end."""

    def problem(self, number):
        if multiprocessing.parent_process() is not None:
            if number == 3:
                os._exit(9)
            if number == 5:
                time.sleep(1000)
            if number == 6:
                raise ValueError("number 6 is refused")
        return SPEC, Pair("torch", None, "None"), "torch"


def test_a_crash_and_a_hang_cost_one_problem_each(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "HANG_S", 4.0)
    run = Deadly(1, "cpu", [], H200, "--seed 1")
    tally = fuzz.Tally()
    assert fuzz._drive(run, 8, 2, frozenset(), None, tally)
    said = capsys.readouterr().out
    assert tally.right == 5, said
    assert len(tally.failures) == 3
    assert "the process died (exit code 9)" in said
    assert "no answer for 4 s" in said
    assert "number 6 is refused" in said
    assert "again: python -m tests.fuzz --seed 1 --only 3" in said
    assert SPEC.snippet() in said


def test_kernels_that_do_not_compile_are_told(monkeypatch):
    slot = fuzz_kernels.choose(1, 3, CPU, H200, ("legacy",))[0]
    (pair,) = slot.pairs
    bad = Pair("legacy", pair.signature, "naive/bm0")
    slots = [slot, Slot("legacy", slot.template, frozenset((bad,)))]
    failures = fuzz_kernels.compile_all(slots, H200, 1)
    assert list(failures) == [bad]
    assert "every parameter must be at least 1" in failures[bad]


def test_the_command(capsys):
    arguments = ["--device", "cpu", "--kinds", "torch", "--kernels", "4", "--count", "8", "--seed", "2"]
    assert fuzz.main(arguments) == 0
    said = capsys.readouterr().out
    assert "8 of 8 problems" in said
    assert "right: 8; wrong: 0" in said
    assert fuzz.main([*arguments, "--only", "3"]) == 0
    assert "problem 3 (torch)" in capsys.readouterr().out


def test_a_failure_is_shown_counted_by_kernel_and_reported(monkeypatch, capsys, tmp_path):
    """A kernel that does not compile fails the run; others run. Of many failures only the first are shown in full."""
    slot = fuzz_kernels.choose(1, 3, CPU, H200, ("legacy",))[0]
    (pair,) = slot.pairs
    bad = Slot("legacy", slot.template, frozenset((Pair("legacy", pair.signature, "naive/bm0"),)))
    monkeypatch.setattr(fuzz_kernels, "choose", lambda *arguments: [slot, bad])
    report = tmp_path / "report.txt"
    options = ["--device", "cpu", "--count", "0", "--jobs", "1", "--seed", "1", "--report", str(report)]
    assert fuzz.main(options) == 1
    assert "NOT COMPILED legacy naive/bm0" in capsys.readouterr().out
    assert "every parameter must be at least 1" in report.read_text()
    with report.open("w") as file:
        tally = fuzz.Tally(report=file)
        for number in range(7):
            tally.fail(f"WRONG {number}", f"details of {number}", "kernel")
    said = capsys.readouterr().out
    assert "details of 4" in said
    assert "details of 5" not in said
    assert "WRONG 6" in said
    assert "details of 6" in report.read_text()
    assert tally.kernels["kernel"] == 7


def test_bad_options(capsys):
    with pytest.raises(SystemExit):
        fuzz.main(["--kinds", "cublas"])
    assert "--kinds: got 'cublas', accepted are sm90," in capsys.readouterr().err


@pytest.mark.parametrize("fuzzer", [fuzz, fuzz_groups, fuzz_programs, fuzz_scaled])
def test_without_a_gpu_a_fuzzer_of_a_gpu_says_so(fuzzer, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        fuzzer.main(["--device", "cuda"])
    assert "--device cuda: torch sees no CUDA device" in capsys.readouterr().err


def test_a_template_that_cannot_be_drawn_gives_none():
    slot = fuzz_kernels.choose(1, 3, CPU, H200, ("legacy",))[0]
    assert draw(slot.template, random.Random(1), CPU, H200, frozenset()) is None


@pytest.mark.parametrize("fuzzer", [fuzz, fuzz_groups, fuzz_programs, fuzz_scaled], ids=lambda each: each.__name__)
@pytest.mark.parametrize("option", [("--count", "-1"), ("--seed", "-1"), ("--seed", "9" * 20), ("--seed", "one")])
def test_a_count_or_seed_that_is_none_is_refused_at_once(fuzzer, option, capsys):
    """A negative count compiled all kernels and ran nothing; a large seed ended in a traceback."""
    with pytest.raises(SystemExit) as ended:
        fuzzer.main(option)
    assert ended.value.code == 2
    name, value = option
    said = f"argument {name}: got '{value}', accepted is a whole number of at least 0 and below 2^63"
    assert said in capsys.readouterr().err
