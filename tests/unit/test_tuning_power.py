"""`tuning.power`: what NVML says is read and shown; NVML is a stand-in here, and no GPU is needed."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tuning import power
from tuning.power import Meter, Sample, Steady

UUID = "GPU-4f1e"


class Nvml:
    """Answers as NVML does, with these statuses by the function's name."""

    def __init__(self, mhz: int = 1455, milliwatts: int = 701_250, reasons: int = 0x4, **statuses: int) -> None:
        self.mhz, self.milliwatts, self.reasons, self.statuses = mhz, milliwatts, reasons, statuses
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return self.statuses.get("init", 0)

    def nvmlDeviceGetHandleByUUID(self, uuid, device) -> int:
        self.asked.append(uuid)
        return self.statuses.get("handle", 0)

    def nvmlDeviceGetClockInfo(self, device, kind, mhz) -> int:
        assert kind == 1
        mhz._obj.value = self.mhz
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device, reasons) -> int:
        reasons._obj.value = self.reasons
        return 0

    def nvmlDeviceGetFieldValues(self, device, count, field) -> int:
        assert (count, field._obj.field) == (1, 186)
        field._obj.value, field._obj.status = self.milliwatts, self.statuses.get("power", 0)
        return 0


def test_a_sample():
    library = Nvml()
    assert Meter(UUID, library).sample() == Sample(1455, 701.25, 0x4)
    assert library.asked == [UUID.encode()]


def test_a_field_lies_as_nvml_has_it():
    offsets = [getattr(power._Field, name).offset for name, *_ in power._Field._fields_]
    assert offsets == [0, 4, 8, 16, 24, 28, 32]
    assert ctypes.sizeof(power._Field) == 40


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({"init": 9}, "nvmlInit_v2 of NVML failed with status 9"),
        ({"handle": 6}, "nvmlDeviceGetHandleByUUID of NVML failed with status 6"),
        ({"power": 3}, "does not know the power at an instant on this GPU: status 3"),
    ],
)
def test_what_nvml_refuses(statuses, said):
    with pytest.raises(RuntimeError, match=said):
        Meter(UUID, Nvml(**statuses)).sample()


def test_a_machine_without_the_driver(monkeypatch):
    monkeypatch.setattr(power, "LIBRARY", "libnvidia-ml-of-no-machine.so.1")
    with pytest.raises(RuntimeError, match=r"comes with NVIDIA's driver, could not be loaded: .*of-no-machine"):
        Meter(UUID)


def test_means_energy_and_cycles():
    found = Steady.of(1500.0, [Sample(1400, 690, 0x4), Sample(1500, 710, 0x1)])
    assert found == Steady(1500.0, 1450, 700, 0x5)
    assert found.joules == pytest.approx(1.05)
    assert found.kilocycles == pytest.approx(2175)
    with pytest.raises(RuntimeError, match="give it more --seconds"):
        Steady.of(1500.0, [])


class Event:
    """As of CUDA, of a GPU that takes `SECONDS` for a replay; the clock below is the time."""

    SECONDS, now, busy_until = 0.002, 0.0, 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = max(Event.now, Event.busy_until)

    def query(self) -> bool:
        return Event.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3

    @classmethod
    def replay(cls) -> None:
        """The host takes a tenth of the time, until a hundred replays wait."""
        cls.now = max(cls.now + cls.SECONDS / 10, cls.busy_until - 100 * cls.SECONDS)
        cls.busy_until = max(cls.now, cls.busy_until) + cls.SECONDS

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls.now += seconds


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_a_round_is_sampled_all_the_while(seconds, monkeypatch):
    monkeypatch.setattr(power.time, "monotonic", lambda: Event.now)
    monkeypatch.setattr(power.time, "sleep", Event.sleep)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    asked: list[float] = []

    class Asked(Meter):
        def sample(self) -> Sample:
            asked.append(Event.now)
            Event.now += 1e-4
            return super().sample()

    begun = Event.now = Event.busy_until
    found = power.steady(power.Graph(Event.replay, 4, Event.SECONDS / 4), seconds, Asked(UUID, Nvml()))
    assert found.us == pytest.approx(Event.SECONDS / 4 * 1e6, rel=0.02)
    assert begun + power.WARM_UP <= asked[0] < begun + power.WARM_UP + 0.02
    assert len(asked) > 0.7 * seconds / (power.PAUSE + 1e-3)
    assert max(later - earlier for earlier, later in itertools.pairwise(asked)) < 3 * power.PAUSE


def test_a_table_shows_the_median_round():
    rounds = [Steady(us, 1000, 500, 0x4) for us in (30.0, 10.0, 20.0)]
    shown = power.table("64x64x64", {"torch": rounds, "cutegemm": [Steady(8.0, 1980, 300, 0x0)]})
    heading, _, torch, ours = shown.splitlines()
    assert heading.split()[:2] == ["64x64x64", "us"]
    assert torch.split() == ["torch", "20.0", "10..30", "1000", "500", "0.0100", "20", "power", "cap"]
    assert ours.split() == ["cutegemm", "8.0", "8..8", "1980", "300", "0.0024", "16"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name what to run"),
        (["--shapes", "64", "--seconds", "0"], "--seconds: got '0'"),
        (["--entries", "8x8"], "--entries: got '8x8'"),
        (["--shapes", "64", "--config", "sm90/what"], "--config: got 'sm90/what'"),
    ],
)
def test_what_is_not_known(arguments, said, capsys):
    with pytest.raises(SystemExit):
        power.main(arguments)
    assert said in capsys.readouterr().err


def test_without_a_gpu(capsys):
    assert power.main(["--shapes", "64"]) == 2
    assert "measures a GPU, and torch sees none here" in capsys.readouterr().err
