"""Stand-ins for the providers and the timer of `tuning.bench`: they multiply on the CPU, and times are invented."""

from __future__ import annotations

from cutegemm.tuner.timing import Timing
from tests.tuning_fakes import H200
from tuning import bench, suites
from tuning.bench_basis import NotServed, Prepared


class Fake:
    """Multiplies on the CPU. wrong: spoils one element. refuses: the reason for serving nothing."""

    def __init__(self, name: str, wrong: bool = False, refuses: str = "", config: str = "") -> None:
        self.name, self._wrong, self._refuses, self._config = name, wrong, refuses, config
        self.calls = 0

    def kernels(self, problem, arch):
        return []

    def prepare(self, problem, arch, inputs, out):
        if self._refuses:
            raise NotServed(self._refuses)

        def call(a, b):
            self.calls += 1
            out.copy_(a.float() @ b.float())
            if self._wrong:
                out[-1, -1] += 100

        return Prepared([lambda a=a, b=b: call(a, b) for a, b in inputs], self._config, "cute")


def timer(times):
    """A timer that knows the microseconds of each provider, and remembers whom it was asked to time."""

    def timed(calls, flops, rounds):
        timed.asked.append(list(calls))
        for runs in calls.values():
            runs[0]()
        return {name: Timing(times[name], times[name] * 0.9, times[name] * 1.2, rounds) for name in calls}

    timed.asked = []
    return timed


def cases(shapes, majors="tn", **options):
    return bench.cases([suites.Laid(shape, majors) for shape in shapes], **options)


def results(shapes=((64, 48, 32),), providers=None, times=None, **options):
    providers = providers or [Fake("torch"), Fake("ours", config="sm90/some")]
    clock = timer(times or {"torch": 4.0, "ours": 2.0})
    found, whole = bench.run(cases(shapes), providers, H200, device="cpu", timer=clock, **options)
    return found, whole, clock
