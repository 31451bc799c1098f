"""The list of a launch's arguments: every value reaches the argument of its name."""

import types

import pytest
import torch

from cutegemm.cute import BACKEND, FAMILIES, workspace
from cutegemm.cute.compile import CuteKernel
from cutegemm.hardware import arch as arch_table
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.run import arguments, runner
from cutegemm.run.arguments import Operands, Pointer, Scalars

H200 = arch_table.get("H200")
EPILOGUE = Epilogue("fp32", "fp16", "n", None)
PLAIN, STAYING, SPLIT = "sm80/64x64x32/w32x32/s3/g4", "sm90/128x128x64/coop2/c1x1/s4/g8", (
    "sm90/128x128x64/coop2/c1x1/s4/g8/k4"
)  # fmt: skip
OPERANDS, SCALARS = Operands(a=160, b=320, c=480, bias=640, d=805), Scalars(alpha=0.5, beta=-2.0)


def launched(config: str, problem: Problem, monkeypatch) -> dict[str, float]:
    """What the host entry gets from a bound launch, by the names that the kernel reads."""
    kernel = CuteKernel(problem.signature, BACKEND.parse(config), H200, None)
    seen: list[tuple] = []
    monkeypatch.setattr(kernel, "_load", lambda: lambda *values: seen.append(values))
    monkeypatch.setattr(workspace.default, "take", lambda words, parts, stream: (None, 10 * words + parts + stream))
    kernel.bind(problem)(OPERANDS, SCALARS, 77)
    names = [argument.name for argument in arguments.host(problem.signature, kernel.config.extra_arguments)]
    return dict(zip(names, *seen, strict=True))


@pytest.mark.parametrize("config", [PLAIN, STAYING, SPLIT])
def test_a_launch_gives_each_argument_the_value_of_its_name(config, monkeypatch):
    problem = Problem.of(200, 104, 1024, "bf16", majors="nt", batch=3, epilogue=EPILOGUE)
    got = launched(config, problem, monkeypatch)
    extra = {"early": 1}  # 24 CTAs leave most of the GPU free
    if config != PLAIN:
        words, parts = BACKEND.parse(config).workspace_bytes(problem, H200)
        assert bool(words) == (config == SPLIT)
        splits = 4 if config == SPLIT else 1
        extra = {"clusters": 2 * 3 * splits, "workspace": 10 * words + parts + 77 if words else 0}
    assert got == {
        **OPERANDS._asdict(), **SCALARS._asdict(), **extra, "stream": 77,
        "m": 200, "n": 104, "k": 1024, "batch": 3, "lda": 200, "ldb": 104, "ldd": 104,
        "a_batch": 200 * 1024, "b_batch": 1024 * 104, "d_batch": 200 * 104,
        "c_row": 104, "c_col": 1, "c_batch": 200 * 104,
    }  # fmt: skip


@pytest.mark.parametrize("config", [PLAIN, STAYING])
def test_without_k_the_operands_are_aligned_addresses_that_exist(config, monkeypatch):
    got = launched(config, Problem.of(64, 64, 0, "bf16", epilogue=EPILOGUE), monkeypatch)
    assert [got[name] for name in Operands._fields] == [800, 800, 480, 640, 805]


@pytest.mark.parametrize("config", [PLAIN, STAYING, SPLIT])
def test_a_capture_passes_what_a_launch_passes(config, monkeypatch):
    problem = Problem.of(200, 104, 1024, "bf16", majors="nt", batch=3, epilogue=EPILOGUE)
    wanted = launched(config, problem, monkeypatch)
    kernel = CuteKernel(problem.signature, BACKEND.parse(config), H200, None)
    kernel._host = types.SimpleNamespace(capture=lambda *values: [values])
    captured = kernel.capture(problem, OPERANDS, SCALARS)
    got = dict(zip(wanted, *captured, strict=True))
    wanted["stream"] = 0
    if config == SPLIT:
        wanted["workspace"] = captured.scratch["workspace"].data_ptr()
    assert got == wanted


def test_a_call_hands_tensors_on_in_the_order_of_the_list(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 7, raising=False)
    seen: list[tuple] = []
    tensors = {name: torch.empty(3) for name in Operands._fields}
    a, b, c, bias, d = tensors.values()
    for swapped in (False, True):
        asked = types.SimpleNamespace(device=types.SimpleNamespace(index=7), swapped=swapped)
        core = runner._cuda_core(lambda *values: seen.append(values), asked)
        core(a, b, c, 0.5, -2.0, bias, d)
        core(a, b, None, 1.0, 0.0, None, d)
        wanted = Operands(*(tensor.data_ptr() for tensor in tensors.values()))
        if swapped:
            wanted = wanted._replace(a=wanted.b, b=wanted.a)
        assert seen == [(wanted, SCALARS, 77), (wanted._replace(c=0, bias=0), Scalars(), 77)]
        seen.clear()


def test_types_follow_from_the_signature():
    def pointers(problem):
        return {name: kind for name, kind in arguments.host(problem.signature, ()) if isinstance(kind, Pointer)}

    plain = pointers(Problem.of(8, 8, 4, "fp16", majors="nn", out_dtype="fp32"))
    assert tuple(plain) == Operands._fields
    assert plain["a"] == Pointer("fp16", 16)
    assert plain["b"] == Pointer("fp16", 8)
    assert plain["d"] == Pointer("fp32", 16)
    # Absent: a null pointer to what D holds, of which nothing more than whole elements is promised.
    assert plain["c"] == plain["bias"] == Pointer("fp32", 4)
    full = pointers(Problem.of(8, 6, 4, "bf16", epilogue=Epilogue("fp32", "fp16", "n", None)))
    assert full["c"] == Pointer("fp32", 8)
    assert full["bias"] == Pointer("fp16", 2)


def test_a_kernel_takes_the_hosts_arguments_without_some_and_with_what_the_host_computed():
    names = [argument.name for argument in arguments.host(Problem.of(8, 8, 8).signature, ("clusters", "workspace"))]
    host = arguments.named(names, range(len(names)))
    left_out = ("a", "stream", "batch")
    device = arguments.device(host, host_only=left_out, tiles_n=-2, tiles_m=-1)
    assert set(device._fields) == set(names) - set(left_out) | {"tiles_m", "tiles_n"}
    assert (device.tiles_m, device.tiles_n, device.workspace, device.d) == (-1, -2, host.workspace, host.d)
    # The order does not follow from that of the call: it decides the machine code.
    assert device == arguments.device(host, host_only=left_out[::-1], tiles_m=-1, tiles_n=-2)
    assert device._fields.index("k") < device._fields.index("tiles_m") < device._fields.index("clusters")
    with pytest.raises(ValueError, match="no tiles_k;"):
        arguments.device(host, host_only=(), tiles_k=1)
    with pytest.raises(ValueError, match="no lda2;"):
        arguments.device(host, host_only=("lda2",))
    with pytest.raises(TypeError):
        arguments.named(names, range(len(names) - 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_gives_a_value_for_each_extra_argument(family):
    signature = Problem.of(64, 64, 64, "fp32" if family == "simt" else "bf16").signature
    for text in FAMILIES[family].candidates(signature)[:3]:
        config = BACKEND.parse(text)
        given = config.launch_arguments(Problem.of(64, 64, 64), H200)
        assert tuple(given) == tuple(name for name in config.extra_arguments if name != arguments.WORKSPACE)
