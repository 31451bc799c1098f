"""Several GPUs: what is asked of the driver for a tensor's device is asked while that device is the current one.

The driver is a fake that writes down the current device at each call.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from cutegemm.choice import plan as planning
from cutegemm.choice.plan import Choice, Plan
from cutegemm.hardware import arch
from cutegemm.problem import request
from cutegemm.run import runner
from cutegemm.run.runner import Call
from legacy_cuda import kernel as legacy_kernel
from legacy_cuda.backend import BACKEND as LEGACY
from tests.fake_backend import FakeBackend

H200 = arch.get("H200")


class Driver:
    """A CUDA driver with a current device; `calls`: (what was asked, the device that it concerned)."""

    def __init__(self) -> None:
        self.current = 0
        self.calls: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def device(self, index: int):
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def note(self, what: str) -> None:
        self.calls.append((what, self.current))


@pytest.fixture
def driver(monkeypatch) -> Driver:
    bindings = pytest.importorskip("cuda.bindings.driver")
    fake = Driver()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.note("capturing") or False)
    monkeypatch.setattr(arch.Arch, "of_device", staticmethod(lambda index=None: H200))

    def set_attribute(attribute, value, function, device):
        fake.calls.append((f"{value} B of shared memory", device))
        return (0,)

    def launch(function, *arguments):
        fake.calls.append((f"launch on stream {arguments[7]}", fake.current))
        return (0,)

    monkeypatch.setattr(bindings, "cuLibraryLoadData", lambda *arguments: (0, "library"))
    monkeypatch.setattr(bindings, "cuLibraryGetKernel", lambda library, name: (0, 7))
    monkeypatch.setattr(bindings, "cuCtxGetDevice", lambda: (0, fake.current))
    monkeypatch.setattr(bindings, "cuKernelSetAttribute", set_attribute)
    monkeypatch.setattr(bindings, "cuLaunchKernel", launch)
    monkeypatch.setattr(legacy_kernel, "compiled", lambda *of: type("C", (), {"cubin": b"", "symbol": "kernel"})())
    return fake


def call_on(index: int, backend: str = "auto", config: str | None = None) -> Call:
    """A call of fp32 tensors on CUDA device `index`, which need not exist."""
    a, b = torch.empty(256, 64), torch.empty(64, 256)
    described = request.describe(a, b, None, 1.0, 0.0, None, None, None, None, None)
    return Call(described._replace(device=torch.device("cuda", index)), backend, config)


def run_core(call: Call, plan: Plan) -> None:
    a, b, d = torch.empty(256, 64), torch.empty(64, 256), torch.empty(256, 256)
    call.runner(plan)(a, b, None, 1.0, 0.0, None, d)


def test_legacy_gets_its_shared_memory_on_the_device_of_the_tensors(driver):
    config = LEGACY.parse("double_buffer_shared/bm256/bn128/bk32/tm16/tn8")
    call = call_on(1)
    problem = call.request.problem
    assert config.dynamic_smem(problem.signature) > H200.smem_static_limit
    kernel = legacy_kernel.LegacyKernel(problem.signature, config, H200)
    opt_in = f"{config.dynamic_smem(problem.signature)} B of shared memory"
    prepared: set[int] = set()
    for index in (1, 0, 1):
        driver.calls.clear()
        run_core(call_on(index), Plan(problem, Choice("legacy", config, ""), H200, kernel))
        asked = [] if index in prepared else [(opt_in, index)]
        assert driver.calls == [*asked, (f"launch on stream {100 + index}", index)]
        prepared.add(index)
    assert driver.current == 0


class Recorder(FakeBackend):
    """A kernel and its backend that write down the current device."""

    name = "recorder"

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def build(self, signature, config, arch):
        self._driver.note("build")
        return self

    def bind(self, problem):
        self._driver.note("bind")
        return lambda *arguments: self._driver.note(f"launch on stream {arguments[-1]}")


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_is_chosen_built_bound_and_launched_on_the_device_of_the_tensors(driver, index, monkeypatch):
    """Whatever the backend: resident clusters, workspaces and attributes are those of the current device."""

    def choose(problem, arch, backend, config, known):
        driver.note("choose")
        return Choice("recorder", "the only one", "")

    monkeypatch.setattr(planning, "choose", choose)
    monkeypatch.setattr(runner.backends, "get", lambda name: Recorder(driver))
    call = call_on(index)
    run_core(call, call.plan())
    assert driver.calls == [
        ("choose", index), ("capturing", index), ("build", index), ("bind", index),
        (f"launch on stream {100 + index}", index),
    ]  # fmt: skip
    assert driver.current == 0
