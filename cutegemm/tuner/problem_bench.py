"""A problem on one GPU, for a sweep: checks candidates against the reference, and times them in turns.

Normal inputs are drawn, as many sets as pass three times the L2 cache, and the float64 reference is computed once. A
check runs a candidate on outputs poisoned with NaN between guard bands, and compares every element with the error
bound of `cutegemm.problem.reference`. A timing replays one CUDA graph a candidate, in turns (`cutegemm.tuner.timing`).
`grouped_bench` is the same for products in groups.

A problem with an epilogue program has its operands drawn too, numbers and scales of blocks of K among them. Every
result is compared with the bound that follows from the program (`cutegemm.problem.program.bound`). Where a result may
be NaN, a candidate runs a second time on outputs poisoned with finite numbers: what it left in place both times it has
not written. A program whose results nobody can check with these operands is refused.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from cutegemm import backend as backends
from cutegemm.backend import Kernel
from cutegemm.choice import spills
from cutegemm.cute import workspace
from cutegemm.hardware.arch import Arch
from cutegemm.problem import ITEMSIZE, Matrix, Problem, reference, torch_dtype
from cutegemm.problem.dtypes import TYPES
from cutegemm.problem.problem import result_matrix
from cutegemm.problem.program.bound import Bounds, bounds, check
from cutegemm.run.arguments import Addresses, BoundLaunch, Operands, Scalars
from cutegemm.run.reductions import Reductions
from cutegemm.tuner.child import Fatal
from cutegemm.tuner.poison import OTHER, Guarded, holding
from cutegemm.tuner.spread import Seconds, order_of_round
from cutegemm.tuner.timer import TORCH
from cutegemm.tuner.timing import ROUND_SECONDS, Lane, capture_stream, pause, rotation

INT8_SPREAD = 40.0
"""Standard deviation of int8 operands, about that of quantized ones."""
LOADING_SECONDS = 0.005
"""A first launch that takes longer may have spent it on loading the module."""
MOST_KEPT = 16
"""Candidates whose kernels and graphs are kept; the least recently used go first."""
CHECKED = 0.25
"""The least share of a result's elements that its bound must restrict. Of log(acc) it restricts half."""
Key = tuple[str, str]
Given: TypeAlias = "torch.Tensor | float | int"
"""An operand of a program."""


class Bench:
    """One problem on the current CUDA device (on the CPU, in tests, nothing can be timed).

    Args:
        sets: of inputs; by default as many as pass three times the L2 cache.

    Raises ValueError for a program whose results cannot be checked.
    """

    def __init__(
        self, problem: Problem, arch: Arch, seed: int | None = None, device: str = "cuda", sets: int | None = None
    ) -> None:
        self.problem, self.arch, self._device = problem, arch, device
        self._generator = torch.Generator(device=device)
        self.seed = self._generator.seed() if seed is None else self._generator.manual_seed(seed).initial_seed()
        p, epilogue = problem, problem.epilogue
        # With a program, B is scaled so that accumulators are about 1, where a wrong function shows. The scale is a
        # power of two, which leaves the operands' digits as they are.
        scale = 2.0 ** -round(math.log2(p.k or 1) / 2) if epilogue.custom is not None and ITEMSIZE[p.dtype] > 1 else 1.0
        a, b = self._draw(p.a, p.dtype), self._draw(p.b, p.b_dtype or p.dtype, scale)
        sets = rotation(p.min_bytes, arch.l2_bytes) if sets is None else sets
        self._inputs = [(a, b)] + [(_copy(a, p.a), _copy(b, p.b)) for _ in range(sets - 1)]
        self._c = self._draw(p.c, epilogue.c_dtype) if p.c is not None and epilogue.c_dtype else None
        self._bias = None
        if epilogue.bias_dtype:
            length = p.n if epilogue.bias_axis == "n" else p.m
            self._bias = self._normal(length, epilogue.bias_dtype == "fp64").to(torch_dtype(epilogue.bias_dtype))
        self._beta = 0.5 if self._c is not None else 0.0
        # The program's operands for each input set: those of the first set, and copies of them.
        self._given = [drawn := self._draw_given(), *(self._copied(drawn) for _ in range(sets - 1))]
        inputs = epilogue.custom.inputs if epilogue.custom is not None else ()
        self._scales = {
            given.scales[0]: each for given, each in zip(inputs, drawn, strict=True)
            if given.scales and isinstance(each, torch.Tensor)
        }  # fmt: skip
        self._memory = [Guarded(_span(p.d, p.batch), torch_dtype(p.out_dtype), device)]
        self._d = _view(self._memory[0].inner, p.d, p.batch)
        self._results = [self._d, *self._more_results()]
        self._partials: dict[Key, list[Guarded]] = {}
        self._calls: OrderedDict[Key, list[Any]] = OrderedDict()
        self._lanes: dict[Key, Lane] = {}
        self._out: torch.Tensor | None = None
        self._bounds: tuple[Bounds, ...] = ()
        self._twice = False
        self._prepare()

    def _prepare(self) -> None:
        """What the first input set must give."""
        p, epilogue, (a, b) = self.problem, self.problem.epilogue, self._inputs[0]
        if epilogue.custom is not None:
            scales = {f"scale_{name}": scale for name, scale in self._scales.items()}
            acc, _, error = reference.accumulators(a, b, p.precision, **scales)
            self._expect(bounds(epilogue.custom, acc, error, self._given[0]))
            return
        bias = self._bias if self._bias is None or epilogue.bias_axis == "n" else self._bias[:, None]
        self._want = reference.expected(
            a, b, self._c, beta=self._beta, bias=bias, activation=epilogue.activation, out_dtype=self._d.dtype,
            precision=p.precision,
        )  # fmt: skip
        self._low, self._high = self._want.value - self._want.bound, self._want.value + self._want.bound

    def _expect(self, wanted: tuple[Bounds, ...]) -> None:
        """Takes what the results may be. Raises ValueError where that says nothing about most of one."""
        for number, each in enumerate(wanted):
            free = ~each.real | ((each.lo == -math.inf) & (each.hi == math.inf))
            if (known := 1 - float(free.double().mean())) < CHECKED:
                raise ValueError(
                    f"epilogue: with normal operands only {known:.0%} of result {number} can be checked, so that no "
                    f"kernel of it is timed: {self.problem.epilogue.custom}"
                )
        self._bounds = wanted
        self._twice = any(bool(each.nan.any()) for each in wanted) or not all(
            each.is_floating_point() for each in self._results
        )

    def check(self, backend: str, config: str) -> tuple[str, float]:
        """The verdict, and about how long one launch took."""
        for again in (True, False):
            try:
                return self._check((backend, config))
            except torch.OutOfMemoryError as why:
                self._forget(0)
                torch.cuda.empty_cache()
                if not again:
                    return f"failed to run: {why}", math.inf
            except Exception as why:
                if self._device == "cuda":
                    survive(why)
                self._calls.pop((backend, config), None)
                self._partials.pop((backend, config), None)
                return f"failed to run: {why}", math.inf
        raise AssertionError("unreachable")

    def _check(self, key: Key) -> tuple[str, float]:
        call = self._bound(key)[0]
        verdict, took, left = self._poisoned(key, call)
        if verdict == "ok" and self._twice:
            verdict, took, again = self._poisoned(key, call, OTHER)
            count = sum(int((one & other).sum()) for one, other in zip(left, again, strict=True))
            if verdict == "ok" and count:
                verdict = f"wrong: it left {count} elements as they were (seed {self.seed})"
        elif verdict == "ok" and took > LOADING_SECONDS:
            took = self._once(call)  # the first launch loads the module
        if verdict != "ok" and self._device == "cuda":
            workspace.default.clear()
        return verdict, took

    def _poisoned(self, key: Key, call: Any, byte: int | None = None) -> tuple[str, float, list[torch.Tensor]]:
        """(verdict, seconds) of one launch on poisoned memory; where two are needed, which elements are poison still,
        of every result and of every partial one.
        """
        partials = self._partials.get(key, [])
        for each in (*self._memory, *partials):
            each.poison(byte)
        took = self._once(call)
        verdict = self._verdict()
        if verdict == "ok" and not all(each.intact for each in partials):
            verdict = f"wrong: it wrote outside a partial result (seed {self.seed})"
        left = []
        if self._twice:
            results = zip(self._results, self._memory, strict=True)
            left = [holding(result, memory.byte) for result, memory in results]
            left += [holding(each.inner, each.byte) for each in partials]
        return verdict, took, left

    def _once(self, call: Any) -> float:
        """Seconds of one launch, the host's part included. On the stream on which lanes warm up and are captured."""
        if self._device != "cuda":
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        stream = capture_stream(torch.cuda.current_device())
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def time(self, keys: Sequence[Key], rounds: int, block_seconds: float) -> dict[Key, Seconds]:
        """Seconds a call: the median over rounds in which each has one block, after a warm-up. Rounds follow the orders
        of `spread.order_of_round`. Blocks of one replay have the pause of `timing.pause` before them.
        """
        rest = 0.0 if block_seconds else pause(self.problem.flops)
        wanted: list[Key] = [TORCH, *keys]
        lanes = {key: self._lane(key) for key in wanted}
        samples: dict[Key, list[float]] = {key: [] for key in wanted}
        if block_seconds:
            lanes[TORCH].block(block_seconds)  # brings the card to its power limit
        else:
            for lane in lanes.values():
                lane.block()
        for number in range(rounds):
            for key in order_of_round(wanted, number):
                time.sleep(rest)
                samples[key].append(lanes[key].block(block_seconds))
        return {key: Seconds([us * 1e-6 for us in values]) for key, values in samples.items()}

    def _verdict(self) -> str:
        for number, memory in enumerate(self._memory):
            if not memory.intact:
                return f"wrong: it wrote outside {f'result {number}' if number else 'D'} (seed {self.seed})"
        if self._bounds:
            return self._verdict_of_program()
        # The same bound in one pass; what does not pass gets a diagnosis.
        # torch compares no number of fp8 with one of another type.
        found = self._d.float() if TYPES[self.problem.out_dtype].family == "fp8" else self._d
        if bool(((found >= self._low) & (found <= self._high)).all()):
            return "ok"
        verdict = reference.check(self._d, self._want)
        return "ok" if verdict else f"wrong: {verdict.message} (seed {self.seed})"

    def _verdict_of_program(self) -> str:
        for number, (result, wanted) in enumerate(zip(self._results, self._bounds, strict=True)):
            verdict = check(result, wanted)
            if not verdict:
                name = f"result {number}: " if len(self._results) > 1 else ""
                return f"wrong: {name}{verdict.message} (seed {self.seed})"
        return "ok"

    def _lane(self, key: Key) -> Lane:
        calls = self._torch() if key == TORCH else self._bound(key)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(calls, ROUND_SECONDS)
        return lane

    def _forget(self, kept: int) -> None:
        """Lets go of the candidates used longest ago, until `kept` are left."""
        while len(self._calls) > kept:
            key, _ = self._calls.popitem(last=False)
            self._lanes.pop(key, None)
            self._partials.pop(key, None)

    def _bound(self, key: Key) -> list[Any]:
        """One launch per input set, on the current stream."""
        found = self._calls.get(key)
        if found is not None:
            self._calls.move_to_end(key)
            return found
        self._forget(MOST_KEPT - 1)
        found = self._calls[key] = self._launches(key)
        return found

    def _launches(self, key: Key) -> list[Any]:
        """The calls of a candidate."""
        backend = backends.get(key[0])
        config = backend.parse(key[1])
        kernel = backend.build(self.problem.signature, config, self.arch)
        if count := spills.spilled(self.problem, kernel, config, backend, self.arch):
            raise spills.refusal(self.problem, config, count)
        partials: list[Guarded] = []

        def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            partials.append(Guarded(math.prod(shape), dtype, device))
            return partials[-1].inner.view(shape)

        reductions = Reductions(self.problem, config)
        written = reductions.partials(self._results, empty)
        self._partials[key] = partials
        run = self._launcher(kernel, written)
        c, bias = (0 if t is None else t.data_ptr() for t in (self._c, self._bias))
        d, *more = (each.data_ptr() for each in written)
        numbers = (*Scalars(beta=self._beta), *(each for each in self._given[0] if not isinstance(each, torch.Tensor)))
        on_cuda, results = self._device == "cuda", self._results

        def call(operands: Addresses) -> None:  # no `self`: a reference cycle would keep the bench's CUDA graphs
            run(operands, numbers, torch.cuda.current_stream().cuda_stream if on_cuda else 0)
            reductions.finish(written, results)

        found = []
        for (a, b), given in zip(self._inputs, self._given, strict=True):
            tensors = [each.data_ptr() for each in given if isinstance(each, torch.Tensor)]
            found.append(partial(call, (*Operands(a.data_ptr(), b.data_ptr(), c, bias, d), *tensors, *more)))
        return found

    def _launcher(self, kernel: Kernel, written: Sequence[torch.Tensor]) -> BoundLaunch:
        """What launches a kernel. written: the tensors that it writes, in the order of the program's results."""
        return kernel.bind(self.problem)

    def _torch(self) -> list[Any]:
        """The product alone by cuBLAS, in the operands' dtype."""
        p = self.problem
        if ITEMSIZE[p.dtype] == 1:
            return self._torch_of_bytes()
        torch.backends.cuda.matmul.allow_tf32 = p.precision == "tf32"
        if self._out is None:
            self._out = torch.empty((p.batch, p.m, p.n), dtype=torch_dtype(p.dtype), device=self._device)
        out = self._out
        if p.batch > 1:
            return [partial(torch.bmm, a, b, out=out) for a, b in self._inputs]
        return [partial(torch.mm, a[0], b[0], out=out[0]) for a, b in self._inputs]

    def _torch_of_bytes(self) -> list[Any]:
        """The same of fp8 and int8, matrix by matrix, with the problem's scales of blocks. What cuBLAS does not take is
        multiplied in bfloat16.
        """
        p, one = self.problem, torch.ones((), device=self._device)
        scale_a, scale_b = (self._scales.get(name, one) for name in "ab")
        # cuBLAS wants the scales of a column of blocks together.
        scale_a, scale_b = (each if each.dim() == 0 else each[0].t().contiguous().t() for each in (scale_a, scale_b))
        fast = p.precision == "fast"

        def scaled(a: torch.Tensor, b: torch.Tensor) -> None:
            for x, y in zip(a, b, strict=True):
                if p.dtype == "int8":
                    torch._int_mm(x, y)
                else:
                    torch._scaled_mm(x, y, scale_a, scale_b, out_dtype=torch_dtype(p.out_dtype), use_fast_accum=fast)

        try:
            scaled(*self._inputs[0])
        except (RuntimeError, ValueError):
            return [partial(torch.matmul, a.bfloat16(), b.bfloat16()) for a, b in self._inputs[:1]]
        return [partial(scaled, a, b) for a, b in self._inputs]

    def _draw(self, matrix: Matrix, dtype: str, scale: float = 1.0) -> torch.Tensor:
        flat = self._normal(_span(matrix, self.problem.batch), double=dtype == "fp64").mul_(scale)
        if dtype == "int8":
            flat = flat.mul_(INT8_SPREAD).round_().clamp_(-128, 127)
        return _view(flat.to(torch_dtype(dtype)), matrix, self.problem.batch)

    def _draw_given(self) -> list[Given]:
        """The operands of the problem's program. Integers are 1 to the larger extent of D: they may be indices, and
        something may be divided by them.
        """
        p = self.problem
        lying, found = iter(p.operands), list[Given]()
        for given in p.epilogue.custom.inputs if p.epilogue.custom is not None else ():
            if given.by_value:
                drawn = self._integers(1) if given.dtype == "int32" else self._normal(1).sigmoid() + 0.5
                found.append(drawn.item())
                continue
            lies, count = next(lying), p.batch if given.batched else 1
            span = _span(lies, count)
            flat = self._integers(span) if given.dtype == "int32" else self._normal(span)
            flat = flat.exp() if given.scales else flat
            found.append(_view(flat.to(torch_dtype(given.dtype)), lies, count))
        return found

    def _copied(self, drawn: Sequence[Given]) -> list[Given]:
        """The same operands elsewhere in memory."""
        lying = iter(self.problem.operands)
        return [_copy(each, next(lying)) if isinstance(each, torch.Tensor) else each for each in drawn]

    def _more_results(self) -> list[torch.Tensor]:
        """Memory for the results behind D, each between guard bands."""
        p = self.problem
        lying, found = iter(p.outputs), list[torch.Tensor]()
        for output in p.epilogue.custom.outputs[1:] if p.epilogue.custom is not None else ():
            rows, columns = output.extents(p.m, p.columns)
            lies = result_matrix(rows, columns, p.batch, str(output.dtype)) if output.reduce else next(lying)
            memory = Guarded(_span(lies, p.batch), torch_dtype(str(output.dtype)), self._device)
            self._memory.append(memory)
            found.append(_view(memory.inner, lies, p.batch))
        return found

    def _integers(self, count: int) -> torch.Tensor:
        most = max(self.problem.m, self.problem.columns)
        return torch.randint(1, most + 1, (count,), device=self._device, generator=self._generator, dtype=torch.int32)

    def _normal(self, count: int, double: bool = False) -> torch.Tensor:
        """Normal numbers in fp32, or of all digits that fp64 has."""
        drawn_as = torch.float64 if double else torch.float32
        return torch.randn(count, device=self._device, generator=self._generator, dtype=drawn_as)


def _span(matrix: Matrix, batch: int) -> int:
    """Elements from the first to the last that the matrices reach."""
    if not (matrix.rows and matrix.cols and batch):
        return 0
    ends = (matrix.rows - 1) * matrix.stride_row + (matrix.cols - 1) * matrix.stride_col
    return ends + (batch - 1) * matrix.stride_batch + 1


def _view(flat: torch.Tensor, matrix: Matrix, batch: int) -> torch.Tensor:
    strides = (matrix.stride_batch, matrix.stride_row, matrix.stride_col)
    return flat.as_strided((batch, matrix.rows, matrix.cols), strides)


def _copy(tensor: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    batch = tensor.shape[0]
    return _view(tensor.as_strided((_span(matrix, batch),), (1,)).clone(), matrix, batch)


def survive(why: Exception) -> None:
    """Raises Fatal when the error has ruined the CUDA context."""
    try:
        torch.cuda.synchronize()
    except Exception:
        raise Fatal(str(why)) from why
