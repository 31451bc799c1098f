"""Launch capture of nvcc host code: registration, launches, clears and refusals, in order and byte by byte."""

import ctypes
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from cutegemm.emulator.entries import CaptureError
from cutegemm.emulator.launch import Launch, Memset
from cutegemm.emulator.nvcc_capture import NvccObject
from cutegemm.hardware import arch

pytest.importorskip("llvmlite")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the path")
pytestmark = needs_nvcc

POINTER, INT = ctypes.c_void_p, ctypes.c_int
FUNCTIONS = ["gemm_run", "device_facts", "ask_for_the_unknown"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The object's bytes and its PTX."""
    folder = tmp_path_factory.mktemp("nvcc")
    source, target = Path(__file__).with_name("capture_gemm.cu"), folder / "gemm.o"
    command = ["nvcc", "-std=c++17", "-O2", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_80,code=compute_80"]
    command += ["--keep", "--keep-dir", str(folder), "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target.read_bytes(), (folder / "capture_gemm.ptx").read_text()


@pytest.fixture(scope="module")
def library(built):
    image, ptx = built
    return NvccObject(image, FUNCTIONS, ptx)


def run(library, m, n, k, splits=1, factor=1):
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    partial = torch.empty(splits, m, n)
    pointers = [POINTER(t.data_ptr()) for t in (a, b, c, partial)]
    numbers = [INT(v) for v in (m, n, k, splits, factor)]
    status, operations = library.capture("gemm_run", *pointers, *numbers, POINTER(None))
    return (a, b, c, partial), status, operations


def test_a_clear_and_two_launches_in_order(library):
    (a, b, c, partial), status, operations = run(library, 5, 130, 70, splits=3, factor=2)
    assert status == 0
    clear, main, reduction = operations
    assert clear == Memset(partial.data_ptr(), 255, 3 * 5 * 130 * 4)
    assert isinstance(main, Launch)
    assert (main.grid, main.block, main.dynamic_smem) == ((3, 5, 3), (64, 1, 1), 24 * 4)
    assert struct.unpack("<QQQiii", main.params) == (a.data_ptr(), b.data_ptr(), partial.data_ptr(), 5, 130, 70)
    assert (reduction.grid, reduction.block) == ((6, 1, 1), (128, 1, 1))
    assert struct.unpack("<QQiib", reduction.params) == (partial.data_ptr(), c.data_ptr(), 650, 3, 2)
    assert "reduce" in reduction.kernel


def test_shared_memory_above_the_default_must_be_asked_for(library):
    _, status, operations = run(library, 1, 1, 20000)
    assert status == 0
    assert operations[1].dynamic_smem == 80000
    with pytest.raises(CaptureError, match=r"dynamic shared memory for .*gemm"):
        run(library, 1, 1, 100_000)


def test_an_empty_grid_is_refused(library):
    with pytest.raises(CaptureError, match=r"returned 9.*cudaErrorInvalidConfiguration"):
        run(library, 1, 0, 4)
    assert run(library, 1, 1, 4)[1] == 0, "the error must not stick"


@pytest.mark.parametrize(("name", "limit"), [("sm_80", 163), ("sm_90", 227)])
def test_the_device_answers_as_the_architecture_table(built, name, limit):
    image, ptx = built
    target = arch.get(name)
    library = NvccObject(image, FUNCTIONS, ptx, arch=target)
    facts = (INT * 5)()
    assert library.capture("device_facts", ctypes.cast(facts, POINTER)) == (0, [])
    assert list(facts) == [target.sm_count, target.capability[0], limit * 1024, 4 if limit == 163 else 6, 1]


def test_an_unknown_question_is_named(library):
    with pytest.raises(CaptureError, match="cudaDeviceAttr 33"):
        library.capture("ask_for_the_unknown")


def test_captures_of_threads_do_not_mix(library):
    wrong = []

    def work(n):
        for _ in range(50):
            (_, _, c, partial), status, (clear, main, reduction) = run(library, n, n, n)
            seen = (status, clear.address, main.grid, struct.unpack_from("<QQ", reduction.params))
            if seen != (0, partial.data_ptr(), (1, n, 1), (partial.data_ptr(), c.data_ptr())):
                wrong.append(seen)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_missing_function_is_named(built):
    image, ptx = built
    with pytest.raises(CaptureError, match="no C function gemm_runs"):
        NvccObject(image, ["gemm_runs"], ptx)
