"""The problems that the CUTLASS 2.x backend is checked with on a GPU, by name, and the build of all their kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from cutegemm.cutlass2x import BACKEND, Cutlass2xConfig, build_many, published
from cutegemm.hardware.arch import Arch
from cutegemm.problem import Problem, Signature
from tests.problems import MAJORS, Case

KINDS = (("fp16", None), ("bf16", None), ("fp32", None), ("fp32", "tf32"), ("fp32", "tf32x3"))
RAGGED = ((1, 8, 8), (257, 264, 136), (129, 520, 72), (640, 384, 1000))
SMALL = {
    ("fp16", None): "64x64x32/w32x32x32/s3/i16x8x16/id2",
    ("bf16", None): "64x64x32/w32x32x32/s3/i16x8x16/id2",
    ("fp32", None): "64x64x8/w32x32x8/s4/i1x1x1/id1",
    ("fp32", "tf32"): "64x64x16/w32x32x16/s4/i16x8x8/id1",
    ("fp32", "tf32x3"): "64x64x16/w32x32x16/s3/i16x8x8/id1",
}


@dataclass(frozen=True)
class Spec:
    """A problem as `Case.random` takes it, and the text of a configuration, or None for `BACKEND.default`'s."""

    shape: tuple[int, int, int]
    dtype: str
    config: str | None
    options: dict[str, Any] = field(default_factory=dict)

    def case(self, seed: int, device: str = "cuda") -> Case:
        return Case.random(*self.shape, self.dtype, seed=seed, device=device, **self.options)

    def run(self, seed: int) -> None:
        case = self.case(seed)
        case.run(backend="cutlass2x", config=self.kernel(Arch.of_device(case.a.device.index))[1])

    def kernel(self, arch: Arch) -> tuple[Signature, Cutlass2xConfig]:
        problem = self.case(0, "cpu").problem()
        config = BACKEND.parse(self.config) if self.config else BACKEND.default(problem, arch)
        return problem.signature, config


def specs(arch: Arch, sample: int = 5) -> dict[str, list[Spec]]:
    """Every group of problems; `sample` configurations a kind from the wider space."""
    groups: dict[str, list[Spec]] = {
        "published": [
            Spec(shape, dtype, str(config))
            for dtype in ("fp16", "bf16")
            for config in published()
            if config.why_invalid(Problem.of(8, 8, 8, dtype).signature, arch) is None
            for shape in RAGGED
        ],
        "space": [],
        "majors": [],
        "alignment": [],
        "epilogue": [],
        "batch": [],
        "split": [],
        "exact": [],
    }
    choose = random.Random(6)
    for dtype, precision in KINDS:
        options = {"precision": precision}
        problem = Problem.of(640, 384, 1000, dtype, precision=precision or "ieee")
        space = [c for c in BACKEND.configs(problem, arch) if c not in published()]
        for config in choose.sample(space, sample):
            groups["space"] += [Spec(shape, dtype, str(config), options) for shape in RAGGED[1:]]
        small = f"cutlass2x/{SMALL[dtype, precision]}"
        for majors in MAJORS:
            groups["majors"].append(Spec((136, 264, 200), dtype, small, {**options, "majors": majors}))
        groups["batch"].append(Spec((72, 136, 40), dtype, small, {**options, "batch": 5}))
        for shape in ((1, 1, 1), (7, 11, 13), (129, 257, 65), (300, 202, 102), (40, 24, 0)):
            groups["alignment"].append(Spec(shape, dtype, None, options))
        for pad, offset in ((8, 0), (4, 4), (2, 2), (1, 1)):
            groups["alignment"].append(Spec((136, 72, 48), dtype, None, {**options, "pad": pad, "offset": offset}))
        for activation in (None, "relu", "gelu", "silu"):
            epilogue = {**options, "activation": activation}
            groups["epilogue"].append(Spec((136, 264, 72), dtype, small, {**epilogue, "bias": True, "alpha": 0.75}))
        for out in (torch.float16, torch.bfloat16, torch.float32):
            groups["epilogue"].append(Spec((136, 264, 72), dtype, small, {**options, "out_dtype": out}))
        c = {**options, "c": True, "alpha": 0.75, "beta": -1.5}
        groups["epilogue"] += [Spec((136, 264, 72), dtype, small, c), Spec((33, 35, 37), dtype, None, c)]
        base = small.rsplit("/", 1)[0]
        for schedule in ("id1/k3", "id4/k8", "streamk", "h"):
            for shape in ((136, 264, 1032), (64, 64, 4096), (1032, 904, 72)):
                groups["split"].append(Spec(shape, dtype, f"{base}/{schedule}", {**options, "c": True, "beta": 0.5}))
        for schedule in ("id1", "id1/k3", "id4/k8", "streamk", "h"):
            for shape in ((136, 264, 4104), (72, 72, 50_000)):
                groups["exact"].append(
                    Spec(shape, dtype, f"{base}/{schedule}", {**options, "out_dtype": torch.float32})
                )
    return groups


def smallest(arch: Arch) -> list[Spec]:
    """A problem for every published configuration, and for every kind of kernel, as small as can be: for slow tools.

    Each has a whole tile, a ragged one, and a K that no tile divides and that comes round to the first stage again.
    """

    def shape(config: Cutlass2xConfig, slices: int = 1, tiles: int = 1) -> tuple[int, int, int]:
        bm, bn, bk = config.threadblock
        return bm + 8, tiles * bn - 8, slices * (config.stages + 1) * bk + bk // 2

    found = [
        Spec(shape(config), "fp16", str(config))
        for config in published()
        if config.why_invalid(Problem.of(8, 8, 8, "fp16").signature, arch) is None
    ]
    for dtype, precision in KINDS:
        options: dict[str, Any] = {"precision": precision}
        signature = Problem.of(512, 512, 512, dtype, precision=precision or "ieee").signature
        if dtype == "fp32":
            found += [
                Spec(shape(config), dtype, str(config), options) for config, _ in BACKEND.candidates(signature, arch)
            ]
        small = f"cutlass2x/{SMALL[dtype, precision]}"
        config = BACKEND.parse(small)
        other = torch.float16 if dtype == "fp32" else torch.float32
        kinds: list[dict[str, Any]] = [
            *({"majors": majors} for majors in MAJORS),
            {"batch": 2},
            {"out_dtype": other},
            {"c": True, "alpha": 0.75, "beta": -1.5},
            {"bias": True, "activation": "gelu"},
        ]
        found += [Spec(shape(config), dtype, small, {**options, **kind}) for kind in kinds]
        for odd in ((7, 11, 13), (33, 35, 101), (40, 24, 0)):
            found.append(Spec(odd, dtype, None, options))
        for elements in (4, 2, 1):
            found.append(Spec((72, 40, 200), dtype, None, {**options, "pad": elements, "offset": elements}))
        for schedule in ("id1/k3", "id4/k2", "streamk", "h"):
            scheduled = f"{small.rsplit('/', 1)[0]}/{schedule}"
            found.append(Spec(shape(config, 3, 2), dtype, scheduled, {**options, "c": True, "beta": 0.5}))
    return found


def build(groups: dict[str, list[Spec]], arch: Arch, jobs: int | None = None) -> int:
    """Compiles all the kernels together; returns how many there are."""
    pairs = dict.fromkeys(spec.kernel(arch) for group in groups.values() for spec in group)
    build_many(list(pairs), arch, jobs=jobs)
    return len(pairs)
