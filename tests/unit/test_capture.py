"""Launch capture of CuTe DSL objects: what the real host code asks for, byte by byte."""

import gc
import importlib.util
import struct
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

from cutegemm.emulator.capture import HostObject
from cutegemm.emulator.entries import CaptureError, ptx_arch, ptx_entries
from cutegemm.emulator.host_linker import ObjectFile
from cutegemm.emulator.launch import Launch, Memset

pytest.importorskip("llvmlite")


def _exported(compiled, folder, name):
    path = folder / f"{name}.o"
    compiled.export_to_c(object_file_path=str(path), function_name=name)
    return path, compiled.__ptx__


def _module_beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the compiler leaves its PTX in the current directory
        patch.setenv("CUTE_DSL_ARCH", "sm_90a")
        capture_kernels = _module_beside("capture_kernels")
        return {
            "axpy": _exported(capture_kernels.compiled_axpy(), folder, "axpy"),
            "describe": _exported(capture_kernels.compiled_describe(), folder, "describe"),
        }


@pytest.fixture(scope="module")
def axpy(kernels):
    path, ptx = kernels["axpy"]
    return HostObject.load(path, "axpy", ptx)


def test_two_launches_in_order_with_every_parameter_byte(axpy):
    x, y = torch.randn(300), torch.randn(300)
    first, second = axpy.capture(x, y, 2.5)
    assert (first.grid, first.block, first.cluster, first.dynamic_smem) == ((3, 1, 1), (128, 1, 1), (1, 1, 1), 0)
    assert (second.grid, second.block, second.dynamic_smem) == ((5, 1, 1), (64, 1, 1), 1024)
    assert not first.programmatic
    assert second.programmatic
    assert "axpy" in first.kernel
    assert "double" in second.kernel
    words = struct.unpack_from("<Qi4xQi4xf", first.params)
    assert words == (x.data_ptr(), 300, y.data_ptr(), 300, 2.5)
    assert struct.unpack_from("<Qi4xi", second.params) == (y.data_ptr(), 300, 300)


def test_parameters_follow_the_declared_layout(axpy, kernels):
    entries = ptx_entries(kernels["axpy"][1])
    for launch in axpy.capture(torch.zeros(8), torch.zeros(8), 1.0):
        assert len(launch.params) == entries[launch.kernel].param_bytes
        assert entries[launch.kernel].required_block in (None, launch.block)


def test_the_tma_descriptor_is_encoded_by_the_host_code(kernels):
    path, ptx = kernels["describe"]
    source = torch.zeros(96, 72, dtype=torch.float16)
    (launch,) = HostObject.load(path, "describe", ptx).capture(source)
    assert (launch.grid, launch.cluster) == ((4, 3, 1), (2, 1, 1))
    assert launch.params[:8] == struct.pack("<Q", source.data_ptr())
    inner, outer = struct.unpack_from("<II", launch.params, 32)
    assert (inner + 1, outer + 1) == (72, 96)
    assert (launch.params[55] + 1, launch.params[56] + 1) == (32, 64)
    assert struct.unpack_from("<I", launch.params, 12)[0] * 16 == 72 * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda x: (x,), "Expects 3 parameters"),
        (lambda x: (x, x[:5], 1.0), "expected to match x.shape"),
        (lambda x: (x.half(), x, 1.0), "expected dtype=float32"),
        (lambda x: (x[::2], x[::2], 1.0), "expected to be 1"),
        (lambda x: (x, None, 1.0), "expected Tensor"),
        (lambda x: (x[:0], x[:0], 1.0), "grid axes go from 1"),
    ],
)
def test_a_refusal_says_why(axpy, arguments, said):
    with pytest.raises(CaptureError, match=said):
        axpy.capture(*arguments(torch.zeros(10)))
    assert len(axpy.capture(torch.zeros(10), torch.zeros(10), 1.0)) == 2, "a refusal must leave nothing behind"


@pytest.mark.parametrize(
    ("argument", "named"),
    [("text", "str"), (torch.zeros(3, device="meta"), "meta"), (torch.zeros(3, dtype=torch.complex64), "complex64")],
)
def test_an_argument_of_another_type_is_named(axpy, argument, named):
    with pytest.raises(TypeError, match=f"argument 1.*{named}"):
        axpy.capture(torch.zeros(3), argument, 1.0)


def test_captures_of_threads_do_not_mix(axpy):
    tensors = [(torch.zeros(n), torch.zeros(n)) for n in range(1, 9)]
    wrong = []

    def work(x, y):
        for _ in range(100):
            first, second = axpy.capture(x, y, 1.0)
            seen = struct.unpack_from("<Qi4xQi4x", first.params) + struct.unpack_from("<Q", second.params)
            if seen != (x.data_ptr(), len(x), y.data_ptr(), len(y), y.data_ptr()):
                wrong.append(seen)

    threads = [threading.Thread(target=work, args=pair) for pair in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_call_leaves_no_memory_behind(axpy):
    x, y = torch.zeros(100), torch.zeros(100)

    def calls(count):
        for _ in range(count):
            axpy.capture(x, y, 1.0)
        gc.collect()

    calls(50)
    tracemalloc.start()
    try:
        calls(10)
        before = tracemalloc.get_traced_memory()[0]
        calls(500)
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


def test_an_object_can_be_unloaded_and_linked_again(kernels):
    path, ptx = kernels["axpy"]
    for _ in range(5):
        assert len(HostObject.load(path, "axpy", ptx).capture(torch.zeros(3), torch.zeros(3), 1.0)) == 2
        gc.collect()


def test_an_object_without_the_function_names_those_it_has(kernels):
    path, ptx = kernels["axpy"]
    with pytest.raises(CaptureError, match=r"no TVM-FFI function 'gemm'; it has axpy"):
        HostObject.load(path, "gemm", ptx)


def test_a_kernel_missing_from_the_ptx_is_named(kernels):
    host = HostObject.load(kernels["axpy"][0], "axpy", kernels["describe"][1])
    with pytest.raises(CaptureError, match=r"which the PTX lacks"):
        host.capture(torch.zeros(3), torch.zeros(3), 1.0)


@pytest.mark.parametrize(
    "image", [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF\x02\x01" + b"\0" * 10 + b"\1\0" + b"\xff" * 60]
)
def test_a_damaged_object_is_refused(image):
    with pytest.raises(CaptureError):
        ObjectFile(image)


def test_a_truncated_object_is_refused(kernels):
    path, ptx = kernels["axpy"]
    image = path.read_bytes()
    for length in (64, 200, len(image) // 2, len(image) - 1):
        with pytest.raises(CaptureError):
            HostObject(image[:length], "axpy", ptx)


HEADER = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry first(
    .param .u64 .ptr .global .align 16 first_param_0,  // a pointer
    .param .u8 first_param_1,
    .param .align 64 .b8 first_param_2[128],
    .param .f64 first_param_3
)
.maxntid 256, 1, 1
.reqnctapercluster 2
{
    .shared .align 16 .b8 tile[4096];
    .shared .f32 row[2][8];
    ret;
}
.entry second()
.reqntid 64
{ ret; }
.entry third { ret; }
"""


def test_entry_headers():
    first, second, third = ptx_entries(HEADER).values()
    assert first.params == ((0, 8), (8, 1), (64, 128), (192, 8))
    assert first.param_bytes == 200
    assert (first.required_block, first.required_cluster) == (None, (2, 1, 1))
    assert first.static_smem == 4096 + 64
    assert (second.params, second.required_block, second.param_bytes) == ((), (64, 1, 1), 0)
    assert third.name == "third"
    assert ptx_arch(HEADER).capability == (9, 0)
    with pytest.raises(CaptureError, match="target"):
        ptx_arch("")
    with pytest.raises(CaptureError, match="texref"):
        ptx_entries(".entry k(.param .texref t) { ret; }")


def test_launch_records_check_themselves():
    assert Launch("k", (4, 1, 1), (32, 1, 1), (2, 1, 1)).ctas == 4
    with pytest.raises(ValueError, match="cluster"):
        Launch("k", (3, 1, 1), (32, 1, 1), (2, 1, 1))
    with pytest.raises(ValueError, match="grid"):
        Launch("k", (0, 1, 1), (32, 1, 1))
    with pytest.raises(ValueError, match="dynamic_smem"):
        Launch("k", (1, 1, 1), (32, 1, 1), dynamic_smem=-1)
    with pytest.raises(ValueError, match="memset"):
        Memset(0, 256, 4)


def test_without_llvmlite_the_error_names_what_to_install(kernels, monkeypatch):
    path, ptx = kernels["axpy"]
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(CaptureError, match=r"pip install 'cutegemm\[emulator\]'"):
        HostObject.load(path, "axpy", ptx)
