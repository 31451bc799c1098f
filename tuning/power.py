"""Times products that are computed without a pause, with the GPU's clock, power and energy: `python -m tuning.power`.

Large products run at the card's power limit, where the clock falls until the power is what it may be, and a product
takes about its energy divided by that power (docs/grouped_measured.md#what-power-does). So of two kernels that take
equally many cycles the one that needs less energy is faster. `--zeros` times operands of zeros too, which need about
half the energy: the difference is what power costs.

Each way is a CUDA graph, of one call or of as many as take a millisecond, replayed for `--seconds`, in rounds of
alternating order, all on the same operands. NVIDIA's management library (NVML) is asked meanwhile, every few
milliseconds.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tabulate import tabulate

from cutegemm.tuner.timing import BLOCK_SECONDS, UNSETTLED
from tuning import cli, named_products

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK, INSTANT_POWER = 1, 186
"""NVML_CLOCK_SM, and NVML_FI_DEV_POWER_INSTANT, which nvmlDeviceGetPowerUsage averages over a second."""
REASONS = {0x4: "power cap", 0x8: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power brake"}
"""What NVML says holds the clock down."""
WARM_UP, PAUSE, SHORTEST = UNSETTLED * BLOCK_SECONDS, 0.004, 0.001
"""Seconds: of replays before a round counts, between two samples, and of a replay at least."""


class Sample(NamedTuple):
    """What NVML says at a time. reasons: bits of `REASONS` and others."""

    mhz: float
    watts: float
    reasons: int


class Steady(NamedTuple):
    """A round of a way: microseconds a call, and means of its samples."""

    us: float
    mhz: float
    watts: float
    reasons: int

    @property
    def joules(self) -> float:
        """A call's."""
        return self.watts * self.us / 1e6

    @property
    def kilocycles(self) -> float:
        """A call's, of each SM."""
        return self.mhz * self.us / 1e3

    @classmethod
    def of(cls, us: float, samples: list[Sample]) -> Steady:
        """Raises RuntimeError without a sample: then the round was too short."""
        if not samples:
            raise RuntimeError("the round was over before NVML was asked; give it more --seconds")
        reasons = 0
        for each in samples:
            reasons |= each.reasons
        count = len(samples)
        return cls(us, sum(each.mhz for each in samples) / count, sum(each.watts for each in samples) / count, reasons)


class _Field(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("time", ctypes.c_longlong), ("took", ctypes.c_longlong),
        ("kind", ctypes.c_int), ("status", ctypes.c_int), ("value", ctypes.c_ulonglong),
    )  # fmt: skip


class Meter:
    """Asks NVML about one GPU.

    Args:
        uuid: of the GPU, as NVML writes it, such as "GPU-4f1e...".
        library: NVML.

    Raises:
        RuntimeError: NVML is missing or does not answer; the text says which call failed.
    """

    def __init__(self, uuid: str, library: Any = None) -> None:
        try:
            self._nvml = library or ctypes.CDLL(LIBRARY)
        except OSError as why:
            raise RuntimeError(f"NVML, which comes with NVIDIA's driver, could not be loaded: {why}") from None
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))

    def _call(self, name: str, *given: Any) -> None:
        if status := getattr(self._nvml, name)(*given):
            raise RuntimeError(f"{name} of NVML failed with status {status}")

    def sample(self) -> Sample:
        """Clock, power and what holds the clock down, now."""
        mhz, reasons, power = ctypes.c_uint(), ctypes.c_ulonglong(), _Field(field=INSTANT_POWER)
        self._call("nvmlDeviceGetClockInfo", self._device, SM_CLOCK, ctypes.byref(mhz))
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(reasons))
        self._call("nvmlDeviceGetFieldValues", self._device, 1, ctypes.byref(power))
        if power.status:
            raise RuntimeError(f"NVML does not know the power at an instant on this GPU: status {power.status}")
        return Sample(mhz.value, (power.value & 0xFFFFFFFF) / 1e3, reasons.value)


class Graph(NamedTuple):
    """A way, captured: a replay makes so many calls, each of about so many seconds."""

    replay: Callable[[], object]
    calls: int
    seconds: float

    @classmethod
    def of(cls, call: Callable[[], object]) -> Graph:
        """As many calls as take about `SHORTEST`, so that the host can enqueue replays faster than they are done."""
        from tuning.blocks import captured, elapsed

        alone = captured(call)
        alone()  # the first replay of a graph takes longer
        seconds = max(elapsed(alone, 5) / 1e6, 1e-7)
        calls = max(1, round(SHORTEST / seconds))
        if calls == 1:
            return cls(alone, 1, seconds)

        def several() -> list[object]:
            return [call() for _ in range(calls)]

        made = captured(several)
        made()
        return cls(made, calls, max(elapsed(made, 3) / 1e6 / calls, 1e-7))


def steady(graph: Graph, seconds: float, meter: Meter) -> Steady:
    """A round: replays for about `WARM_UP` seconds, and for as many as are given, which count."""
    import torch

    warm, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: list[Sample] = []
    begun, each = time.monotonic(), graph.calls * graph.seconds
    for _ in range(max(1, round(WARM_UP / each))):
        graph.replay()
    warm.record()
    due, count = begun + WARM_UP, max(1, round(seconds / each))
    for _ in range(count):
        graph.replay()
        if time.monotonic() >= due and warm.query():
            samples.append(meter.sample())
            due = time.monotonic() + PAUSE
    end.record()
    while not end.query():
        if warm.query():
            samples.append(meter.sample())
        time.sleep(PAUSE)
    return Steady.of(warm.elapsed_time(end) * 1e3 / count / graph.calls, samples)


def table(product: str, found: Mapping[str, list[Steady]]) -> str:
    """The median round of each way, by time, with the times of all rounds."""
    rows = []
    for name, rounds in found.items():
        middle = sorted(rounds)[len(rounds) // 2]
        held = dict.fromkeys(text for bit, text in REASONS.items() if middle.reasons & bit)
        spread = f"{min(each.us for each in rounds):.0f}..{max(each.us for each in rounds):.0f}"
        rows.append(
            (name, middle.us, spread, middle.mhz, middle.watts, middle.joules, middle.kilocycles, ", ".join(held))
        )
    headers = (product, "us", "rounds", "MHz", "W", "J", "kilocycles", "held down by")
    return tabulate(rows, headers=headers, floatfmt=("", ".1f", "", ".0f", ".0f", ".4f", ".0f", ""))


def measure(
    ways: Mapping[str, Callable[[], object]], rounds: int, seconds: float, meter: Meter
) -> dict[str, list[Steady]]:
    """The rounds of each way, in alternating order."""
    from cutegemm.tuner.spread import order_of_round

    graphs = {name: Graph.of(call) for name, call in ways.items()}
    found: dict[str, list[Steady]] = {name: [] for name in graphs}
    for number in range(rounds):
        for name in order_of_round(list(graphs), number):
            found[name].append(steady(graphs[name], seconds, meter))
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 when every way was timed, 2 when none could be."""
    made = cli.parser("power", (__doc__ or "").split(":")[0] + ".")
    named_products.add_options(made)
    made.add_argument("--zeros", action="store_true", help="time operands of zeros too")
    made.add_argument(
        "--seconds", type=cli.seconds, default=BLOCK_SECONDS, help=f"of a round (default {BLOCK_SECONDS:g})"
    )
    made.add_argument("--rounds", type=cli.count, default=3, help="measured rounds (default 3)")
    options = made.parse_args(arguments)
    try:
        products = named_products.products(options)
    except ValueError as why:
        made.error(str(why))
    import torch

    from cutegemm.tuner import timing

    if not torch.cuda.is_available():
        print("tuning.power measures a GPU, and torch sees none here", file=sys.stderr)
        return 2
    print(timing.gpu_state())
    try:
        meter = Meter(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        for product in products:
            operands, ways = named_products.ways(product, options)
            print(table(product, measure(dict(ways), options.rounds, options.seconds, meter)), end="\n\n", flush=True)
            if options.zeros:
                for each in operands:
                    each.zero_()
                found = measure(dict(ways), options.rounds, options.seconds, meter)
                print(table(f"{product}, zeros", found), end="\n\n", flush=True)
    except RuntimeError as why:
        print(f"tuning.power: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
