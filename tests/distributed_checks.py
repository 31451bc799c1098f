"""What two processes check together of cutegemm and torch.distributed: with gloo on the CPU, with NCCL on two GPUs.

`run(device)` starts the processes once and returns what each check said: an empty text, or its traceback. The reference
is the same model of torch.nn.Linear with the same weights, in one process, in the checks themselves.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp

from tests import forked

WORLD = 2
LIMIT_S = {"cpu": 120.0, "cuda": 900.0}
"""All checks of one start end in this time, or the processes are killed. On GPUs they compile kernels."""

Check = Callable[["Setting"], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class Setting:
    """What a check needs: the mesh of all processes, the device, and how far results may lie apart."""

    def __init__(self, device: str, rank: int) -> None:
        from torch.distributed.tensor import init_device_mesh

        self.device, self.rank = device, rank
        self.mesh = init_device_mesh(device, (WORLD,))
        # Integers: sums are exact in fp32 whatever their order.
        self.generator = torch.Generator().manual_seed(7)

    def integers(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=self.generator).to(self.device, dtype)

    def model(self, bias: bool = True) -> torch.nn.Module:
        torch.manual_seed(3)
        return Block(bias).to(self.device)


class Block(torch.nn.Module):
    """A normalization, a linear layer, an activation and another linear layer."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 24, bias), torch.nn.Linear(24, 16, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on all ranks. Halves are gathered as a dimension of their own: torch 2.11 cannot, as they are."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor):
        return tensor
    own, *others = tensor.placements
    if others or not hasattr(own, "split_factor"):
        return tensor.full_tensor()
    parts = tensor.to_local().unflatten(own.dim, (own.split_factor, -1))
    found = DTensor.from_local(parts, tensor.device_mesh, [Shard(own.dim + 1)], run_check=False)
    return found.full_tensor().flatten(own.dim, own.dim + 1)


def same_training(model: torch.nn.Module, ours: Any, plain: torch.nn.Module, x: torch.Tensor, share: float = 1) -> None:
    """Results and gradients of `model` for `ours` are those of `plain` for x, times `share`."""
    want = plain(x)
    want.square().sum().backward()
    got = whole(model(ours))
    if share == 1:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(whole(parameter.grad), share * other.grad, rtol=1e-4, atol=1e-4, msg=name)


def replaced(model: torch.nn.Module) -> torch.nn.Module:
    from cutegemm.nn import Linear, replace_linears

    found = replace_linears(copy.deepcopy(model))
    assert sum(isinstance(each, Linear) for each in found.modules()) == 2
    return found


@check
def products_of_every_placement(setting: Setting) -> None:
    """Every pair of placements of A and B with every kind of epilogue, and gradients; the same placements come again
    with other options, which must not get what DTensor remembers of the first.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    import cutegemm

    a, b = setting.integers(6, 8), setting.integers(8, 10)
    bias, c = setting.integers(10), setting.integers(6, 10)
    epilogues: list[dict[str, Any]] = [
        {}, {"bias": bias}, {"bias": bias, "activation": "relu"}, {"c": c, "beta": 2.0}, {"c": c, "bias": bias},
        {"alpha": 3.0, "out_dtype": torch.bfloat16}, {"c": c[:1], "beta": 1.0, "activation": "relu"},
    ]  # fmt: skip
    placements = (Replicate(), Shard(0), Shard(1))
    expected = {
        (Shard(0), Replicate()): Shard(0), (Replicate(), Shard(1)): Shard(1), (Replicate(), Replicate()): Replicate()
    }  # fmt: skip
    for (of_a, of_b), options in itertools.product(itertools.product(placements, repeat=2), epilogues):
        given = {
            name: distribute_tensor(each, setting.mesh, [Replicate()]) if isinstance(each, torch.Tensor) else each
            for name, each in options.items()
        }
        ours = [distribute_tensor(t, setting.mesh, [p]).requires_grad_() for t, p in ((a, of_a), (b, of_b))]
        plain = [each.clone().requires_grad_() for each in (a, b)]
        got, want = cutegemm.gemm(*ours, **given), cutegemm.gemm(*plain, **options)
        if (of_a, of_b) in expected:
            assert got.placements == (expected[of_a, of_b],)
        if (of_a, of_b) == (Shard(1), Shard(0)):
            assert (got.placements == (Partial(),)) == ("activation" not in options)
        assert got.dtype == want.dtype
        assert torch.equal(got.full_tensor(), want)
        weights = setting.integers(6, 10, dtype=want.dtype)
        (got.full_tensor() * weights).sum().backward()
        (want * weights).sum().backward()
        for mine, theirs in zip(ours, plain, strict=True):
            assert torch.equal(mine.grad.full_tensor(), theirs.grad)


@check
def batches(setting: Setting) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import cutegemm

    a, b, c = setting.integers(4, 6, 8), setting.integers(4, 8, 10), setting.integers(4, 1, 10)
    for of_a, of_b in itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=2):
        for right, of_right in ((b, of_b), (b[0].contiguous(), Replicate())):
            left, over = (distribute_tensor(t, setting.mesh, [p]) for t, p in ((a, of_a), (right, of_right)))
            added = distribute_tensor(c, setting.mesh, [Shard(0)])
            got = cutegemm.gemm(left, over, added, beta=1.0)
            assert torch.equal(got.full_tensor(), cutegemm.gemm(a, right, c, beta=1.0))


@check
def tokens_in_unequal_parts(setting: Setting) -> None:
    """Leading dimensions that DTensor's own reshape refuses to merge: 3 and 5 do not divide among two ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    import cutegemm

    weight = setting.integers(4, 8)
    wide = setting.integers(12, 8)  # gate and up of a SwiGLU
    layer = cutegemm.nn.SwiGLU(8, 6, 4).to(setting.device)

    def placed(tensor: torch.Tensor, placement: Any) -> Any:
        return distribute_tensor(tensor, setting.mesh, [placement]).detach().requires_grad_()

    def mlp(x: Any, weight: Any) -> Any:
        of_down = layer.down_weight if weight is wide else down
        return torch.func.functional_call(layer, {"gate_up_weight": weight, "down_weight": of_down}, (x,))

    down = distribute_tensor(layer.down_weight.detach(), setting.mesh, [Replicate()])
    for shape, dim in itertools.product(((3, 5, 8), (2, 3, 5, 8), (3, 2, 5, 8)), range(3)):
        x = setting.integers(*shape)
        for function, own in ((cutegemm.linear, weight), (mlp, wide)):
            ours, theirs = (placed(x, Shard(dim)), placed(own, Shard(1))), (x.clone().requires_grad_(), own)
            got = function(*ours)
            torch.testing.assert_close(got.full_tensor(), function(*theirs))
            got.sum().backward()
            function(*theirs).sum().backward()
            torch.testing.assert_close(ours[0].grad.full_tensor(), theirs[0].grad)
    # A sum that is still to be made: 15 and 18 rows can be scattered to two ranks, but not as three times five or six.
    gelu = partial(cutegemm.linear, activation="gelu")
    for shape in ((3, 5, 8), (3, 6, 8), (1, 6, 8), (2, 3, 5, 8)):
        x = setting.integers(*shape)
        for function, own, of_own in itertools.product((cutegemm.linear, gelu), (weight,), (Replicate(), Shard(1))):
            part = DTensor.from_local(x / 2, setting.mesh, [Partial()]).detach().requires_grad_()
            theirs = x.clone().requires_grad_()
            got = function(part, distribute_tensor(own, setting.mesh, [of_own]))
            torch.testing.assert_close(got.full_tensor(), function(theirs, own))
            got.full_tensor().sum().backward()
            function(theirs, own).sum().backward()
            torch.testing.assert_close(part.grad.full_tensor(), theirs.grad)
        part = DTensor.from_local(x / 2, setting.mesh, [Partial()])
        torch.testing.assert_close(
            mlp(part, distribute_tensor(wide, setting.mesh, [Shard(1)])).full_tensor(), mlp(x, wide)
        )
    quantized = cutegemm.nn.Fp8Linear(8, 4, False, dtype="int8").to(setting.device)  # drawn alike on all ranks
    parts = {name: distribute_tensor(each, setting.mesh, [Replicate()]) for name, each in quantized.named_buffers()}
    for shape, dim in itertools.product(((3, 5, 8), (2, 3, 5, 8)), range(2)):
        x = setting.integers(*shape)
        with torch.no_grad():
            part = distribute_tensor(x, setting.mesh, [Shard(dim)])
            got = torch.func.functional_call(quantized, parts, (part,))
            assert torch.equal(got.full_tensor(), quantized(x))
            by_operator = torch.ops.cutegemm.quantized_linear(part, parts["weight"], parts["weight_scale"])
            assert torch.equal(by_operator.full_tensor(), quantized(x))
    gated = cutegemm.nn.Fp8SwiGLU(8, 6, 4, dtype="int8").to(setting.device)
    parts = {name: distribute_tensor(each, setting.mesh, [Replicate()]) for name, each in gated.named_buffers()}
    x = setting.integers(3, 5, 8)
    with torch.no_grad():
        part = distribute_tensor(x, setting.mesh, [Shard(0)])
        assert torch.equal(torch.func.functional_call(gated, parts, (part,)).full_tensor(), gated(x))
        assert torch.equal(torch.ops.cutegemm.quantized_mlp(part, *parts.values()).full_tensor(), gated(x))
        gated = cutegemm.nn.Fp8SwiGLU(16, 128, 4, dtype="int8", scaling="blocks").to(setting.device)
        parts = {name: distribute_tensor(each, setting.mesh, [Replicate()]) for name, each in gated.named_buffers()}
        x = setting.integers(2 * 96 + 1, 16)
        part = distribute_tensor(x, setting.mesh, [Shard(0)])
        with mock.patch("cutegemm.mlp_operator._serves", return_value=True):
            found = torch.ops.cutegemm.quantized_mlp(part, *parts.values(), "blocks").full_tensor()
        assert torch.equal(found, gated.down(gated.gate_up(x)))
    a, b = setting.integers(3, 6, 8), setting.integers(8, 10)
    for of_a, of_b in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
        left, right = placed(a, of_a), placed(b, of_b)
        cutegemm.gemm(left, right).full_tensor().sum().backward()  # one matrix for the whole batch
        assert torch.equal(right.grad.full_tensor(), a.sum((0, 1))[:, None].expand(8, 10))
        left, right = placed(b.t().contiguous(), of_b), placed(a.mT.contiguous(), of_a)
        cutegemm.gemm(left, right).full_tensor().sum().backward()
        assert torch.equal(left.grad.full_tensor(), a.sum((0, 1)).expand(10, 8))


@check
def tensor_parallel(setting: Setting) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x = torch.randn((2, 6, 16), generator=setting.generator).to(setting.device)
    for bias in (True, False):
        plain = setting.model(bias)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(replaced(plain), setting.mesh, plan)
        assert model.up.weight.to_local().shape == (24 // WORLD, 16)
        same_training(model, x, plain, x)


@check
def sequence_parallel(setting: Setting) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    x = torch.randn((2, 6, 16), generator=setting.generator).to(setting.device)
    plain = setting.model()
    plan = {
        "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }  # fmt: skip
    model = parallelize_module(replaced(plain), setting.mesh, plan)
    same_training(model, distribute_tensor(x, setting.mesh, [Shard(1)]), plain, x)


@check
def fully_sharded(setting: Setting) -> None:
    """FSDP2: each process has half of the batch; gradients are means over the processes."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn((4, 6, 16), generator=setting.generator).to(setting.device)
    plain = setting.model()
    model = replaced(plain)
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=setting.mesh)
    own = x[2 * setting.rank : 2 * setting.rank + 2]
    same_training(model, own, plain, x, share=1 / WORLD)


@check
def fully_sharded_and_tensor_parallel(setting: Setting) -> None:
    """A mesh of two dimensions, one for each: parameters are DTensors within FSDP's."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x = torch.randn((2, 6, 16), generator=setting.generator).to(setting.device)
    plain = setting.model()
    mesh = init_device_mesh(setting.device, (1, WORLD), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(replaced(plain), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    same_training(model, x, plain, x)


@check
def compiled_tensor_parallel(setting: Setting) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x = torch.randn((2, 6, 16), generator=setting.generator).to(setting.device)
    plain = setting.model()
    model = parallelize_module(replaced(plain), setting.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    same_training(torch.compile(model, backend="aot_eager", fullgraph=True), x, plain, x)


@check
def what_is_refused(setting: Setting) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    import cutegemm

    a, b = (distribute_tensor(setting.integers(8, 8), setting.mesh, [Shard(0)]) for _ in range(2))
    with refused(ValueError, "out: got one in a call with DTensors"):
        cutegemm.gemm(a, b, out=a.clone())
    with refused(ValueError, "b: got shape"):
        cutegemm.gemm(a, distribute_tensor(setting.integers(4, 8), setting.mesh, [Shard(0)]))
    plain, w, line = setting.integers(8, 8), a.clone().requires_grad_(), setting.integers(8)
    calls: dict[str, Callable[[], Any]] = {
        "b": lambda: cutegemm.gemm(a, plain),
        "a": lambda: cutegemm.gemm(plain, w),
        "c": lambda: cutegemm.gemm(a, b, plain, beta=1.0),
        "bias": lambda: cutegemm.gemm(a, b, bias=line),
        "x": lambda: cutegemm.linear(plain, w),
        "weight": lambda: cutegemm.linear(a, plain, line),
    }
    for name, call in calls.items():
        with refused(ValueError, f"{name}: got a Tensor in a call of "):
            call()
    with refused(ValueError, "bias: got a FakeTensor in a call of torch.ops.cutegemm.gemm"):
        torch.compile(cutegemm.gemm, backend="aot_eager")(a, b, bias=line)
    with refused(ValueError, "out: got one in a call with DTensors"):
        cutegemm.gemm(a, plain, out=plain.clone())
    with implicit_replication():
        torch.testing.assert_close(cutegemm.gemm(a, plain).full_tensor(), a.full_tensor() @ plain)


@contextmanager
def refused(kind: type[Exception], text: str) -> Iterator[None]:
    """As pytest.raises, or a RuntimeError into which DTensor puts what a fake says."""
    with pytest.raises((kind, RuntimeError), match=re.escape(text)):
        yield


def _work(rank: int, device: str, folder: str) -> None:
    import torch.distributed as dist

    import cutegemm  # noqa: F401  the rules must come later than this

    assert "torch.distributed.tensor" not in sys.modules
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
        timeout=datetime.timedelta(seconds=LIMIT_S[device] / 4),
    )  # fmt: skip
    setting = Setting(device, rank)
    for name, function in CHECKS.items():
        started, text = time.monotonic(), ""
        try:
            function(setting)
        except Exception:
            text = traceback.format_exc()
        Path(folder, f"{name}.{rank}.said").write_text(text)
        took = time.monotonic() - started
        print(f"{name}: {'failed' if text else 'right'}, {took:.1f} s", file=sys.stderr, flush=True)
        dist.barrier()
    dist.destroy_process_group()


def run(device: str) -> dict[str, str]:
    """What each check said: tracebacks of both processes, or nothing; of one that the time did not suffice for, so."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        forked.context()
        processes = mp.start_processes(_work, (device, folder), WORLD, join=False, start_method="forkserver")
        try:
            while time.monotonic() - started < LIMIT_S[device] and not processes.join(timeout=1.0):
                pass
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as why:
            print(why, file=sys.stderr)  # one waited too long for the other; what they said until then stands
        finally:
            for each in processes.processes:
                each.kill()
        late = f"did not end in the {LIMIT_S[device]:.0f} s that all checks have"
        said = {name: [Path(folder, f"{name}.{rank}.said") for rank in range(WORLD)] for name in CHECKS}
        return {
            name: "\n".join(filter(None, (each.read_text() if each.exists() else late for each in files)))
            for name, files in said.items()
        }


from tests import distributed_models, distributed_operators  # noqa: E402, F401  their checks are run as well
