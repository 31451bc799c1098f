"""Kernels without machine code: a launch is written down, and computed by torch from the addresses that it was given.

Python's launches and those of the C++ part come to the same function, in the convention of the real launchers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

import cutegemm
from cutegemm import torch_grouped
from cutegemm.cute import compile as compiler
from cutegemm.cute.combine import config as combine
from cutegemm.cute.combine import kernel as combine_kernel
from cutegemm.cute.quantize import kernel as quantize
from cutegemm.cute.quantize.config import Tile
from cutegemm.cute.routing import config as sorting
from cutegemm.cute.routing import kernel as sort_kernel
from cutegemm.cute.standalone import StandaloneKernel
from cutegemm.emulator.capture import _Any
from cutegemm.problem import packing, reference, torch_dtype
from cutegemm.problem.program.evaluate import evaluate
from cutegemm.problem.program.graph import ROW_BLOCKS, SCALE_K, Node, Output, Program
from cutegemm.problem.quantization import NAMED, scale_of, values_of
from cutegemm.pytorch import combining
from cutegemm.run import arguments, routing
from tuning import host_stub

_FLOAT = 3
LEAST_ADDRESS = 1 << 22
"""No address of memory is below this, also in a Python that lies at a fixed place (Debian's). All sizes and strides of
these tests are."""
PLAIN = Program((), (Node("acc"),), (Output(0),))
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Any), ctypes.c_int32, ctypes.POINTER(_Any))


class Launched(NamedTuple):
    """A launch: what passed the arguments, and the arguments, integers and floats as they came."""

    by: str
    arguments: tuple[Any, ...]


launched: list[Launched] = []
refuse_next: list[int] = []
"""Codes that the next launches return, without doing anything."""
_made: list[Any] = []  # addresses of callbacks stay valid


class TorchKernel(StandaloneKernel):
    """See the module docstring."""

    def __init__(self, signature: Any, config: Any, arch: Any) -> None:
        super().__init__(signature, config, arch, None)  # type: ignore[arg-type]
        callback = _PROTOTYPE(self._launch)
        _made.append(callback)
        self._address = host_stub.address_of(callback)
        self._by = "C++"
        function = compiler.function_at(self._address)

        def from_python(*values: Any) -> None:
            self._by = "Python"
            try:
                function(*values)
            finally:
                self._by = "C++"

        self._function = from_python

    def _launch(self, _self: Any, values: Any, count: int, _result: Any) -> int:
        given = [values[i].value.real if values[i].type_index == _FLOAT else values[i].value.integer
                 for i in range(count)]  # fmt: skip
        launched.append(Launched(self._by, tuple(given)))
        if refuse_next:
            return refuse_next.pop()
        alone = {
            Tile: (quantize, self._quantize), sorting.Tile: (sort_kernel, self._sort),
            combine.Tile: (combine_kernel, self._add_up),
        }.get(type(self.config))  # fmt: skip
        if alone:
            names = [*alone[0].POINTERS, "stream", *(name for name, _ in alone[0].NUMBERS)]
        else:
            names = [each.name for each in arguments.host(self.signature, self.config.extra_arguments)]
        assert len(names) == count
        compute = alone[1] if alone else self._compute if self.signature.work == "dense" else self._compute_groups
        with torch.no_grad():
            compute(dict(zip(names, given, strict=True)))
        return 0

    def _add_up(self, given: dict[str, Any]) -> None:
        s: Any = self.signature
        dtype, tokens, top_k = torch_dtype(s.dtype), given["tokens"], given["top_k"]
        if s.does == "clear":
            shape, pitch = (tokens, given["vectors"] * s.bytes // dtype.itemsize), given["made_pitch"]
            made = _at(given["made"], dtype, shape, (pitch * s.bytes // dtype.itemsize, 1))
            made[max(_at(given["row_of"], torch.int32, (top_k,), (1,)).tolist()) :] = 0
            return
        columns, pitch, to_made = (
            given[name] * s.bytes // dtype.itemsize for name in ("vectors", "given_pitch", "made_pitch")
        )
        rows = _at(given["given"], dtype, (given["rows"], columns), (pitch, 1))
        row_of = _at(given["row_of"], torch.int32, (tokens * top_k,), (1,))
        count = tokens * top_k if s.does == "spread" else tokens
        made = _at(given["made"], dtype, (count, columns), (to_made, 1))
        with torch.autocast("cpu", enabled=False):
            if s.does == "spread":
                made[row_of.long()] = rows.repeat_interleave(top_k, 0)
            elif s.does == "gather":
                made.copy_(packing.in_order(rows, row_of))
            else:
                made.copy_(combining.by_torch(rows, row_of, top_k))

    def _sort(self, given: dict[str, Any]) -> None:
        s: Any = self.signature
        if s.does == "count":  # the launch behind it counts again
            return
        shape = given["slots"] // given["top_k"], given["top_k"]
        index, weight = torch_dtype(s.index) if s.index == "int32" else torch.int64, torch_dtype(s.weight)
        experts = _at(given["experts"], index, shape, (given["e_token"], given["e_choice"]))
        weights = _at(given["weights"], weight, shape, (given["w_token"], given["w_choice"]))
        for name, each in zip(
            sort_kernel.POINTERS[2:], routing.by_torch(experts, weights, given["groups"]), strict=False
        ):
            _at(given[name], each.dtype, tuple(each.shape), each.stride()).copy_(each)

    def _compute_others(self, given: dict[str, Any]) -> None:
        """Groups of columns and of K, and masked ones, without a program."""
        s, (m, n, k, groups) = self.signature, (given[name] for name in ("m", "n", "k", "batch"))
        dtype, work, stacked = torch_dtype(s.dtype), s.work, {"a": groups, "b": groups, "d": groups}
        stacked |= {"ragged_n": {"b": 1, "d": 1}, "ragged_k": {"a": 1, "b": 1}, "masked": {}}[work]
        a = _matrix(given["a"], dtype, stacked["a"], m, k, given["a_batch"], s.a_major == "k", given["lda"])
        b = _matrix(given["b"], dtype, stacked["b"], k, n, given["b_batch"], s.b_major == "n", given["ldb"])
        d = _matrix(given["d"], torch_dtype(s.out_dtype), stacked["d"], m, n, given["d_batch"], True, given["ldd"])
        a, b, d = (each if stacked[name] > 1 else each[0] for name, each in (("a", a), ("b", b), ("d", d)))
        sizes = _at(given["counts" if work == "masked" else "ends"], torch.int32, (groups,), (1,))
        found = torch_grouped.accumulators(work, a, b, sizes, PLAIN, ())
        torch_grouped.written_alone(work, (sizes,), d, found.to(d.dtype))

    def _compute_groups(self, given: dict[str, Any]) -> None:
        """Groups of rows of A, which may be gathered, or of D, which may be scattered."""
        s, (m, n, k, groups) = self.signature, (given[name] for name in ("m", "n", "k", "batch"))
        dtype, out_dtype, work = torch_dtype(s.dtype), torch_dtype(s.out_dtype), s.work
        if work in ("ragged_n", "ragged_k", "masked"):
            self._compute_others(given)
            return
        if work != "ragged_m":
            index = _at(given["index"], torch.int32, (m,), (1,)).long()
        rows_a, rows_d = (given["index_rows"] if work == each else m for each in ("gathered_m", "scattered_m"))
        a = _matrix(given["a"], dtype, 1, rows_a, k, 0, s.a_major == "k", given["lda"])[0]
        b = _matrix(given["b"], dtype, groups, k, n, given["b_batch"], s.b_major == "n", given["ldb"])
        ends = [0, *_at(given["ends"], torch.int32, (groups,), (1,)).tolist()]
        a = a[index] if work == "gathered_m" else a
        of_a, of_b = self._block_scales(given, groups, m, n, k)
        z = torch.zeros(m, n)
        for group, (first, last) in enumerate(itertools.pairwise(ends)):
            z[first:last] = _sums(a[first:last], b[group], of_a[first:last], of_b[group])
        if s.epilogue.custom is not None:
            program = s.epilogue.custom
            whole = [self._operand(each, given, groups if each.batched else 1, m, n) for each in program.inputs]

            def of_group(number: int, first: int, last: int) -> list[Any]:
                return [
                    value if each.scales or not isinstance(value, torch.Tensor)
                    else value[number if each.batched else 0][slice(first, last) if each.m else slice(None)]
                    for each, value in zip(program.inputs, whole, strict=True)
                ]  # fmt: skip

            found = [
                evaluate(program, z[first:last], of_group(number, first, last), dtype=FP32)
                for number, (first, last) in enumerate(itertools.pairwise(ends))
            ]
            z, *more = (torch.cat(each) for each in zip(*found, strict=True))
            self._put_scales(given, more)
        columns = z.shape[1]
        d = _matrix(given["d"], out_dtype, 1, rows_d, columns, 0, True, given["ldd"])[0]
        d[index if work == "scattered_m" else slice(None)] = z.to(out_dtype)

    def _put_scales(self, given: dict[str, Any], more: Sequence[torch.Tensor]) -> None:
        """Writes what of the results behind the first is scales of blocks of D."""
        outputs = self.signature.epilogue.custom.outputs[1:]
        for number, (result, output) in enumerate(zip(more, outputs, strict=True), 1):
            if output.reduce == ROW_BLOCKS:
                _at(given[f"y{number}"], FP32, tuple(result.shape), result.contiguous().stride()).copy_(result)

    def _block_scales(
        self, given: dict[str, Any], groups: int, m: int, n: int, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of A, (M, blocks of K), and of B, (groups, blocks of K, N); ones where there are none."""
        blocks = max(-(-k // SCALE_K), 1)
        of_a, of_b = torch.ones(m, blocks), torch.ones(groups, blocks, n)
        custom = self.signature.epilogue.custom
        for each in custom.inputs if custom else ():
            if not each.scales:
                continue
            strides = (given.get(f"{each.name}_{axis}", 0) for axis in ("batch", "row", "col"))
            grain = int(each.scales[1:])
            extents = (1, m, blocks) if each.scales[0] == "a" else (groups, blocks, -(-n // grain))
            found = _at(given[each.name], FP32, extents, tuple(strides))
            if each.scales[0] == "a":
                of_a = found[0]
            else:
                of_b = found.repeat_interleave(grain, 2)[:, :, :n]
        return of_a, of_b

    def _quantize(self, given: dict[str, Any]) -> None:
        s: Any = self.signature
        matrices, rows, k = shape = tuple(given[name] for name in ("matrices", "rows", "k"))
        if s.does == "amax":  # the launch behind it finds the maxima again
            return
        x = _at(given["x"], torch_dtype(s.dtype), shape, (given["x_matrix"], given["x_row"], given["x_k"]))
        format = NAMED[s.values]
        if s.places:
            row_of = _at(given["p"], torch.int32, (rows * s.places,), (1,)).long()
            blocks = 1 if s.group.k == 0 else -(-k // s.group.k)
            scale = scale_of(x, format, s.group)
            values = _at(given["v"], format.dtype, (rows * s.places, k), (given["v_row"], 1))
            scales = _at(given["s"], FP32, (rows * s.places, blocks), (given["s_row"], given["s_k"]))
            values[row_of] = values_of(x, scale, format)[0].repeat_interleave(s.places, 0)
            scales[row_of] = scale[0].repeat_interleave(s.places, 0)
            return
        v = _at(given["v"], format.dtype, shape, (given["v_matrix"], given["v_row"], 1))
        along = s.group.rows or rows, s.group.k or k
        extents = matrices if s.group.rows else 1, -(-rows // along[0]), -(-k // along[1])
        strides = given["s_matrix"], given["s_row"], given["s_k"]
        scales = _at(given["s"], FP32, extents, strides)
        if s.does != "given":
            made = scale_of(x, format, s.group)
            scales.copy_(made.reshape(extents))
        v.copy_(values_of(x, scales, format))

    def _compute(self, given: dict[str, Any]) -> None:
        s, (m, n, k, batch) = self.signature, (given[name] for name in ("m", "n", "k", "batch"))
        dtype, out_dtype = torch_dtype(s.dtype), torch_dtype(s.out_dtype)
        a = _matrix(given["a"], dtype, batch, m, k, given["a_batch"], s.a_major == "k", given["lda"])
        b = _matrix(given["b"], dtype, batch, k, n, given["b_batch"], s.b_major == "n", given["ldb"])
        columns = n // 2 if s.epilogue.gating else n
        d = _matrix(given["d"], out_dtype, batch, m, columns, given["d_batch"], True, given["ldd"])
        of_a, of_b = self._block_scales(given, batch, m, n, k)  # no batch has scales of blocks here
        z = given["alpha"] * torch.stack([_sums(x, y, of_a, of_y) for x, y, of_y in zip(a, b, of_b, strict=True)])
        epilogue = s.epilogue
        if epilogue.custom is not None:
            operands = [self._operand(each, given, batch, m, n) for each in epilogue.custom.inputs]
            results = evaluate(epilogue.custom, z, operands, dtype=FP32)
            d.copy_(results[0] if d.dtype.is_floating_point else results[0].round().clamp(-128, 127))
            self._put_scales(given, results[1:])
            for number, (result, output) in enumerate(zip(results[1:], epilogue.custom.outputs[1:], strict=True), 1):
                if output.reduce is None:
                    at, dtype = given[f"y{number}"], torch_dtype(str(output.dtype))
                    strides = given[f"y{number}_batch"], True, given[f"y{number}_ld"]
                    _matrix(at, dtype, batch, m, columns, *strides).copy_(result)
            return
        if epilogue.c_dtype is not None:
            strides = given["c_batch"], given["c_row"], given["c_col"]
            z += given["beta"] * _at(given["c"], torch_dtype(epilogue.c_dtype), (batch, m, n), strides).float()
        if epilogue.bias_dtype is not None:
            extent, axis = (n, 0) if epilogue.bias_axis == "n" else (m, 1)
            bias = _at(given["bias"], torch_dtype(epilogue.bias_dtype), (extent,), (1,)).float()
            z += bias if axis == 0 else bias[:, None]
        d.copy_(reference.activate(z, epilogue.activation))

    def _operand(self, each: Any, given: dict[str, Any], batch: int, m: int, n: int) -> Any:
        """An operand of a program; of scales of blocks, which the program does not read, whatever lies there."""
        if each.by_value:
            return given[each.name]
        dtype = torch_dtype(each.dtype)
        columns = n // 2 if self.signature.epilogue.gating else n
        extents = batch if each.batched else 1, m if each.m else 1, columns if each.n else 1
        names = arguments.strides_of(each)
        if each.scales:
            return _at(given[each.name], dtype, (1, 1, 1), (0, 0, 0))
        strides = (0, 0, 1) if not names else tuple(given.get(f"{each.name}_{axis}", 0) for axis in _AXES)
        return _at(given[each.name], dtype, extents, strides)


_AXES = ("batch", "row", "col")


def _matrix(
    address: int, dtype: torch.dtype, batch: int, rows: int, columns: int, stride: int, row_major: bool, leading: int
) -> torch.Tensor:
    strides = (stride, leading, 1) if row_major else (stride, 1, leading)
    return _at(address, dtype, (batch, rows, columns), strides)


def _sums(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> torch.Tensor:
    """A @ B in fp32, with scales of blocks of K: of A, (M, blocks), and of B, (blocks, N)."""
    made = torch.zeros(len(a), b.shape[1])
    for block, part in enumerate(a.float().split(SCALE_K, 1)):
        made += part @ b.float()[SCALE_K * block :][:SCALE_K] * of_a[:, block, None] * of_b[block]
    return made


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The memory at an address as a tensor."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


@contextlib.contextmanager
def served(in_cpp: bool) -> Iterator[list[Launched]]:
    """While this is open, CPU tensors are served as CUDA's are, by such kernels; gives the list of launches."""
    launched.clear()
    with host_stub.on_cpu(TorchKernel, in_cpp=in_cpp):
        yield launched
    refuse_next.clear()


BF16, FP32 = torch.bfloat16, torch.float32


def numbers(*shape: int, dtype: torch.dtype = BF16, grad: bool = False, seed: int = 0) -> torch.Tensor:
    """Small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(dtype).requires_grad_(grad)


def flat(result: Any) -> list[Any]:
    """A result as a list of results."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def both(road: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """What a road gives when it is taken a third time: by Python alone, and by the C++ part."""
    found = []
    for in_cpp in (False, True):
        with served(in_cpp) as launched:
            for _ in range(3):
                launched.clear()
                result = flat(road())
            found.append([result, [(each.by, each.arguments) for each in launched]])
    return found[0], found[1]


def assert_launched_alike(road: Callable[[], Any]) -> list[str]:
    """A road taken by the C++ part gives what it gives by Python alone, by the same launches. Returns who made them."""
    (expected, by_python), (found, by_cpp) = both(road)
    assert {by for by, _ in by_python} == {"Python"}
    assert {by for by, _ in by_cpp} == {"C++"}
    for x, y in zip(expected, found, strict=True):
        assert (x.dtype, x.shape, x.stride(), x.requires_grad) == (y.dtype, y.shape, y.stride(), y.requires_grad)
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0, equal_nan=True)
        assert x.float().any()
    # All but the addresses, of which those of new tensors differ.
    for (_, one), (_, other) in zip(by_python, by_cpp, strict=True):
        assert [x for x in one if x < LEAST_ADDRESS] == [x for x in other if x < LEAST_ADDRESS]
    return [by for by, _ in by_cpp]


def assert_same_outcome(road: Callable[[], Any]) -> None:
    """A road gives the same results, or the same error, taken by Python alone and by the C++ part."""

    def outcome() -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return flat(road())
        except Exception as why:
            return [type(why), str(why)]

    (expected, _), (found, _) = both(outcome)
    for x, y in zip(expected, found, strict=True):
        if isinstance(x, torch.Tensor):
            assert (type(x), x.dtype, x.stride()) == (type(y), y.dtype, y.stride())
            assert torch.equal(x.float(), y.float())
        else:
            assert x == y


def assert_needs_no_python(road: Callable[[], Any], *functions: str) -> None:
    """Taken a third time, a road calls none of these functions: one call of the C++ part does it all."""
    with served(in_cpp=True) as launched, contextlib.ExitStack() as patches:
        expected = [flat(road()) for _ in range(2)][-1]
        count = len(launched)
        for name in functions:
            patches.enter_context(mock.patch(name, None))
        found = flat(road())
        assert len(launched) > count
        assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def launches_and_result(road: Callable[[], Any]) -> tuple[int, Any]:
    """Returns how many launches a road makes, as many in C++ as in Python, and its third result in C++."""
    count = len(assert_launched_alike(road))
    with served(in_cpp=True):
        return count, [road() for _ in range(3)][-1]


def assert_as_of_torch(found: torch.Tensor, want: torch.Tensor) -> None:
    """A quantized layer's result by the stand-ins is that by torch, but for a value rounded otherwise in between."""
    size = want.float().abs().max().item()
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.01 * size)
    assert size > 0.1


def assert_each_has_a_launch_of_its_own(calls: Sequence[Callable[[], Any]]) -> None:
    """Calls made one after the other, all from C++, give what each gives by Python alone."""
    with served(in_cpp=False):
        expected = [call() for call in calls]
    with served(in_cpp=True) as launched:
        for _ in range(3):
            launched.clear()
            found = [call() for call in calls]
        assert {each.by for each in launched} == {"C++"}
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def assert_compiled_to_one_operator(layer: torch.nn.Module, given: tuple[Any, ...], operator: Any) -> None:
    """Of torch.compile's graph this is the only operator of ours, which C++ launches; results stay what they are."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        with served(in_cpp=False) as launched:
            expected = layer(*given)
            count = len(launched)
            compiled = torch.compile(layer, backend=backend, fullgraph=True)
            assert torch.equal(compiled(*given), expected)
        with served(in_cpp=True) as launched:
            for _ in range(3):
                launched.clear()
                assert torch.equal(compiled(*given), expected)
            assert [each.by for each in launched] == ["C++"] * count
    (targets,) = graphs
    assert [getattr(each, "overloadpacket", each) for each in targets if "cutegemm" in str(each)] == [operator]


A, B = numbers(24, 40), numbers(40, 16)
W, BIAS, C = numbers(16, 40), numbers(16), numbers(24, 16)
OUT = torch.empty(24, 16, dtype=BF16)
DEEP = numbers(256, 16384), numbers(256, 16384).t()


def autocast(function: Callable[[], Any]) -> Any:
    """What a function gives under autocast to bf16."""
    with torch.autocast("cpu", dtype=BF16):
        return function()


def linear_module(activation: str | None = None, bias: bool = True) -> cutegemm.nn.Linear:
    """A layer with the weight W and the bias BIAS."""
    module = cutegemm.nn.Linear(40, 16, bias, dtype=BF16, activation=activation)
    with torch.no_grad():
        module.weight.copy_(W)
        if bias:
            module.bias.copy_(BIAS)
    return module
