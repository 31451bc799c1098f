"""Captured launches run in the emulator with right results: several launches a call, clears, nvcc and CUTLASS 2.x."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from cutegemm.emulator import Checks, EmulationError
from cutegemm.emulator.bridge import emulate
from cutegemm.emulator.capture import HostObject
from cutegemm.emulator.errors import OutOfBounds, ReadOnlyWrite
from cutegemm.emulator.launch import Launch, Memset
from cutegemm.emulator.nvcc_capture import NvccObject
from cutegemm.problem import reference

pytest.importorskip("llvmlite")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the path")
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
UNIT = Path(__file__).parent.parent / "unit"


@pytest.fixture(scope="module")
def axpy(tmp_path_factory):
    """(host object, PTX) of y = 2 (alpha x + y), in two launches."""
    folder = tmp_path_factory.mktemp("axpy")
    spec = importlib.util.spec_from_file_location("capture_kernels", UNIT / "capture_kernels.py")
    kernels = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CUTE_DSL_ARCH", "sm_80")
        spec.loader.exec_module(kernels)
        compiled = kernels.compiled_axpy()
    compiled.export_to_c(object_file_path=str(folder / "axpy.o"), function_name="axpy")
    return HostObject.load(folder / "axpy.o", "axpy", compiled.__ptx__), compiled.__ptx__


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_two_launches_run_in_order(axpy, n):
    host, ptx = axpy
    x, y = torch.randn(n), torch.randn(n)
    want = 2 * (1.5 * x + y)
    reports = emulate(ptx, host.capture(x, y, 1.5), {"x": x, "y": y}, outputs={"y"}, seed=n)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
    assert [report.ctas for report in reports] == [-(-n // 128), -(-n // 64)]


def test_a_view_has_the_bounds_of_its_elements(axpy):
    host, ptx = axpy
    storage = torch.zeros(200)
    whole, part = storage[:150], storage[:100]
    launches = host.capture(whole, whole, 1.0)
    with pytest.raises(OutOfBounds, match="'y'"):
        emulate(ptx, launches, {"y": part})
    with pytest.raises(ReadOnlyWrite):
        emulate(ptx, launches, {"y": whole}, outputs=set())
    with pytest.raises(EmulationError, match="nothing is mapped"):
        emulate(ptx, launches, {})
    with pytest.raises(ValueError, match="outputs: z"):
        emulate(ptx, launches, {"y": whole}, outputs={"z"})


def test_clears_are_checked_and_done():
    tensor = torch.zeros(8)
    clear = Memset(tensor[2:].data_ptr(), 0xFF, 8)
    ptx = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }"
    assert emulate(ptx, [clear], {"t": tensor}) == []
    assert tensor.isnan().tolist() == [False, False, True, True, False, False, False, False]
    with pytest.raises(OutOfBounds):
        emulate(ptx, [Memset(tensor[2:].data_ptr(), 0, 100)], {"t": tensor})


def nvcc(source: Path, folder: Path, *options: str) -> tuple[NvccObject, str]:
    """The linked object of a file with a function gemm_run, and its PTX."""
    command = ["nvcc", "-std=c++17", "-O2", "-DNDEBUG", "--keep", "--keep-dir", str(folder), "-Xcompiler", "-fPIC"]
    command += ["-gencode", "arch=compute_80,code=compute_80", *options, "-c", str(source), "-o", f"{folder}/gemm.o"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    ptx = (folder / f"{source.stem}.ptx").read_text()
    return NvccObject.load(folder / "gemm.o", ["gemm_run"], ptx), ptx


@needs_nvcc
def test_a_split_gemm_of_nvcc(tmp_path):
    library, ptx = nvcc(UNIT / "capture_gemm.cu", tmp_path)
    m, n, k, splits = 5, 70, 50, 3
    a, b, c, partial = torch.randn(m, k), torch.randn(k, n), torch.full((m, n), torch.nan), torch.empty(splits, m, n)
    pointers = [POINTER(t.data_ptr()) for t in (a, b, c, partial)]
    numbers = [INT(value) for value in (m, n, k, splits, 1)]
    status, operations = library.capture("gemm_run", *pointers, *numbers, POINTER(None))
    assert status == 0
    tensors = {"a": a, "b": b, "c": c, "partial": partial}
    emulate(ptx, operations, tensors, outputs={"c", "partial"})
    verdict = reference.check(c, reference.expected(a, b, alpha=2.0))  # the kernel scales by its constant table
    assert verdict.ok, verdict.message


@pytest.fixture(scope="module")
def cutlass(tmp_path_factory):
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or shutil.which("nvcc") is None:
        pytest.skip("needs nvcc and the headers of nvidia-cutlass")
    headers = Path(spec.origin).parent / "source" / "include"
    options = ["--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden", f"-I{headers}"]
    source = Path(__file__).with_name("cutlass2x_gemm.cu")
    try:
        return nvcc(source, tmp_path_factory.mktemp("cutlass"), *options)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"nvcc: {error.stderr}")


@pytest.mark.slow  # test_cutlass2x.py runs such launches too, from our own build
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(100, 72, 200), (1, 8, 8)])
def test_a_cutlass_gemm(cutlass, m, n, k, splits):
    a, b, c = torch.randn(m, k).half(), torch.randn(n, k).half(), torch.randn(m, n).half()
    d = torch.full((m, n), torch.nan).half()
    workspace = torch.full((64,), -1, dtype=torch.int32)
    pointers = [POINTER(t.data_ptr()) for t in (a, b, c, d)]
    numbers = [INT(m), INT(n), INT(k), FLOAT(1.5), FLOAT(0.5), INT(splits)]
    where = POINTER(workspace.data_ptr() if splits > 1 else None)
    library, ptx = cutlass
    status, operations = library.capture("gemm_run", *pointers, *numbers, where, POINTER(None))
    assert status == 0
    assert [type(operation) for operation in operations] == [Memset, Launch][splits == 1 :]
    tensors = {"a": a, "b": b, "c": c, "d": d, "workspace": workspace}
    # Its loop skips the copy of rows beyond M and N and multiplies what the stage held: those outputs are not stored.
    checks = Checks(uninitialized=False)
    emulate(ptx, operations, tensors, outputs={"d", "workspace"}, checks=checks)
    want = reference.expected(a, b.T, c, alpha=1.5, beta=0.5)
    # A split adds to the fp16 output of the one before: its rounding, of a value that is at most the sum of magnitudes.
    magnitude = 1.5 * (a.double().abs() @ b.T.double().abs()) + 0.5 * c.double().abs()
    bound = want.bound + (splits - 1) * 2.0**-11 * (magnitude + want.bound)
    verdict = reference.check(d, reference.Expected(want.value, bound, want.out_dtype))
    assert verdict.ok, verdict.message
