"""Checks of `distributed_checks`: epilogue programs, products in groups, scaled products and quantization."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tests.distributed_checks import Setting, check, refused, whole


def placed(setting: Setting, tensor: Any, placement: Any, grad: bool = True) -> Any:
    """A DTensor of a tensor that every rank has; numbers stay numbers."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(tensor, torch.Tensor):
        return tensor
    found = distribute_tensor(tensor.detach(), setting.mesh, [placement])
    return found.requires_grad_() if grad and tensor.is_floating_point() else found


def close(got: torch.Tensor, want: torch.Tensor, share: float, what: Any) -> None:
    """Whether two tensors differ by at most a share of the largest number, each of what is said."""
    assert got.shape == want.shape, what
    torch.testing.assert_close(
        got, want, rtol=0, atol=share * float(want.abs().max()), msg=lambda text: f"{what} {text}"
    )  # fmt: skip


def same(setting: Setting, call: Any, tensors: Sequence[Any], placements: Sequence[Any], grad: bool = True) -> Any:
    """call(*tensors), whole and with DTensors: equal results and gradients. Returns the results' placements."""
    ours = [placed(setting, each, own, grad) for each, own in zip(tensors, placements, strict=True)]
    plain = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in tensors]
    plain = [
        each.requires_grad_() if grad and isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in plain
    ]
    got, want = call(*ours), call(*plain)
    got, want = ((each,) if isinstance(each, torch.Tensor) else each for each in (got, want))
    for mine, theirs in zip(got, want, strict=True):
        close(mine.full_tensor(), theirs.detach(), 1e-5, placements)
        assert mine.dtype == theirs.dtype
    if grad:
        for results in (got, want):
            sum((number + 1) * whole(each).float().sin().sum() for number, each in enumerate(results)).backward()
        for mine, theirs in zip(ours, plain, strict=True):
            if isinstance(mine, torch.Tensor) and theirs.grad is not None:
                close(mine.grad.full_tensor(), theirs.grad, 1e-4, placements)
    return [each.placements[0] for each in got]


@check
def programs_of_every_placement(setting: Setting) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    import cutegemm
    from cutegemm import ops

    def reduced(acc: Any, c: Any) -> Any:
        return acc + c, ops.row_sum(acc * c), ops.column_sum(acc)

    a, b, c = (torch.randn(*shape, generator=setting.generator) for shape in ((5, 7), (7, 12), (5, 12)))
    a, b, c = (each.to(setting.device) for each in (a, b, c))
    column, row = c[:, :1].contiguous(), c[0].contiguous()
    cases: list[tuple[Any, list[Any]]] = [
        (lambda acc, row, c: ops.gelu(acc + row) * c, [row, c]),
        (lambda acc, column, s: acc * column * s, [column, 0.5]),
        (reduced, [c]),
        (lambda acc: ops.where(ops.column() <= ops.row(), acc, ops.random(3)), []),
        (lambda acc, c: ops.partner(acc) + c, [c]),
        (ops.swiglu_pairs, []),
        (ops.swiglu, []),
    ]
    every = (Replicate(), Shard(0), Shard(1))
    for number, (program, operands) in enumerate(cases):

        def call(a: Any, b: Any, *operands: Any, program: Any = program) -> Any:
            return cutegemm.gemm(a, b, epilogue=program, operands=operands)

        for of_a, of_b in itertools.product(every, repeat=2):
            others = [Replicate() if Replicate() in (of_a, of_b) else Shard(0) for _ in operands]
            got = same(setting, call, [a, b, *operands], [of_a, of_b, *others])
            if (of_a, of_b) == (Shard(0), Replicate()):
                assert got[0] == Shard(0)
                assert len(got) == 1 or got == [Shard(0), Shard(0), Partial()]
            if (of_a, of_b) == (Replicate(), Shard(1)):
                assert got[0] == (Replicate() if program is ops.swiglu else Shard(1))
            if (of_a, of_b) == (Shard(1), Shard(0)):
                assert (got[0] == Partial()) == (number == 1)


@check
def halves_that_a_program_does_not_take_as_such(setting: Setting) -> None:
    """They are redistributed; torch 2.11 refuses to."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    import cutegemm
    from cutegemm import ops

    a, b = (torch.randn(*shape, generator=setting.generator).to(setting.device) for shape in ((5, 7), (7, 12)))
    placements = [Replicate(), _StridedShard(1, split_factor=2)]
    for program in (ops.swiglu_pairs, ops.gelu):

        def call(a: Any, b: Any, program: Any = program) -> Any:
            return cutegemm.gemm(a, b, epilogue=program)

        if torch.__version__ < (2, 12):
            with refused(ValueError, "_StridedShard(dim=1, sf=2),) is unable to be interpreted"):
                call(*(placed(setting, each, own) for each, own in zip((a, b), placements, strict=True)))
        else:
            same(setting, call, [a, b], placements)


@check
def layers_keep_how_tokens_are_sharded(setting: Setting) -> None:
    """(batch, tokens, features): sharded tokens were gathered, and every rank computed all of them."""
    from torch.distributed.tensor import Replicate, Shard

    import cutegemm

    weight, bias = setting.integers(6, 4), setting.integers(6)
    for shape, dim in (((2, 4, 4), 1), ((2, 3, 4), 1), ((4, 5, 4), 0), ((1, 1, 4, 4), 2)):
        for activation in (None, "silu"):
            placed_at = same(
                setting, lambda x, w, b, act=activation: cutegemm.linear(x, w, b, act),
                [setting.integers(*shape), weight, bias], [Shard(dim), Replicate(), Replicate()],
            )  # fmt: skip
            assert placed_at == [Shard(dim)], (shape, dim, placed_at)


@check
def gradients_that_are_placed_otherwise(setting: Setting) -> None:
    """What follows a product needs whole columns, so that the gradient of its sharded rows comes replicated."""
    from torch.distributed.tensor import Replicate, Shard

    import cutegemm
    from cutegemm import ops

    a, b = (torch.randn(*shape, generator=setting.generator).to(setting.device) for shape in ((5, 7), (7, 4)))

    def call(a: Any, b: Any) -> Any:
        return cutegemm.gemm(a, b, epilogue=ops.gelu).softmax(0)

    assert same(setting, call, [a, b], [Shard(0), Replicate()]) == [Replicate()]


@check
def gradients_that_can_be_viewed(setting: Setting) -> None:
    """Those of a bias for each group are cut out of a larger tensor."""
    from torch.distributed.tensor import Replicate

    import cutegemm

    ends = torch.tensor([2, 3, 6], dtype=torch.int32, device=setting.device)
    tensors = setting.integers(6, 4), setting.integers(3, 4, 8), ends, setting.integers(3, 1, 8)
    a, b, ends, bias = (placed(setting, each, Replicate()) for each in tensors)
    cutegemm.grouped_gemm(a, b, ends, epilogue=lambda acc, bias: acc + bias, operands=(bias,)).sum().backward()
    want = torch.tensor([2.0, 1.0, 3.0], device=setting.device).repeat_interleave(8)
    assert torch.equal(bias.grad.view(24).full_tensor(), want)


@check
def products_in_groups(setting: Setting) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    import cutegemm
    from cutegemm import ops

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=setting.generator).to(setting.device)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=setting.device)

    ends, counts, rows = numbers(2, 2, 6), numbers(3, 0, 4, 2), numbers(5, 0, 1, 1, 4, 2)
    bias, column = normal(3, 1, 8), normal(6, 1)
    whole_, halves = Replicate(), Shard(2)

    def plain(a: Any, b: Any, ends: Any) -> Any:
        return cutegemm.grouped_gemm(a, b, ends)

    def biased(a: Any, b: Any, ends: Any, bias: Any, column: Any) -> Any:
        program = lambda acc, bias, column: ops.silu(acc + bias) * column + ops.column()  # noqa: E731
        return cutegemm.grouped_gemm(a, b, ends, epilogue=program, operands=(bias, column))

    def by_rows(a: Any, b: Any, ends: Any, rows: Any) -> Any:
        return cutegemm.grouped_gemm(a, b, ends, rows=rows)

    def by_places(a: Any, b: Any, ends: Any, rows: Any) -> Any:
        return cutegemm.grouped_gemm(a, b, ends, places=rows)

    def masked(a: Any, b: Any, counts: Any) -> Any:
        return cutegemm.grouped_gemm(a, b, counts=counts, epilogue=lambda acc: ops.where(ops.matrix() == 2, acc, 0.0))

    tokens, weights, order = normal(6, 4), normal(3, 4, 8), numbers(3, 0, 5, 1, 4, 2)
    turned = [each.mT.contiguous() for each in (weights, tokens)]
    cases: list[tuple[Any, list[Any], list[tuple[list[Any], Any]]]] = [
        (plain, [tokens, weights, ends], [
            ([whole_, halves, whole_], Shard(1)), ([Shard(1), Shard(1), whole_], Partial()),
            ([Shard(0), whole_, whole_], whole_),
        ]),
        (biased, [tokens, weights, ends, bias, column], [
            ([whole_, halves, whole_, halves, whole_], Shard(1)),
            ([Shard(1), Shard(1), whole_, whole_, Shard(0)], whole_),
        ]),
        (by_rows, [tokens, weights, ends, rows], [([Shard(0), halves, whole_, whole_], Shard(1))]),
        (by_places, [tokens, weights, ends, order], [([Shard(1), Shard(1), whole_, whole_], Partial())]),
        (plain, [*turned, ends], [
            ([Shard(1), whole_, whole_], Shard(0)), ([Shard(2), Shard(0), whole_], Partial()),
        ]),
        (plain, [turned[1], normal(6, 8), ends], [
            ([Shard(0), whole_, whole_], Shard(1)), ([whole_, Shard(1), whole_], Shard(2)),
        ]),
        (masked, [normal(4, 5, 4), normal(4, 4, 8), counts], [
            ([Shard(0)] * 3, Shard(0)), ([whole_, halves, whole_], halves), ([Shard(2), Shard(1), whole_], Partial()),
        ]),
    ]  # fmt: skip
    for call, tensors, placements in cases:

        def counted(*given: Any, call: Any = call) -> Any:
            found = call(*given)
            if call is not masked:
                return found
            inside = torch.arange(5, device=setting.device)[None] < counts[:, None]  # the others are undefined
            mask = inside[:, :, None]
            return torch.where(
                mask if type(found) is torch.Tensor else placed(setting, mask, whole_, False), found, 0.0
            )

        for own, wanted in placements:
            got = same(setting, counted, tensors, own)
            assert call is masked or got == [wanted], (got, own)


@check
def quantized_products(setting: Setting) -> None:
    """Quantization gives the same bits, and scaled products the same numbers, wherever x, K and N are sharded."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    import cutegemm

    x, w = (torch.randn(*shape, generator=setting.generator).to(setting.device) for shape in ((256, 512), (384, 512)))
    every = (Replicate(), Shard(0), Shard(1))
    kept = {"rows": (Shard(0),), "tensor": (), (1, 128): (Shard(0), Shard(1)), (128, 128): (Shard(0), Shard(1))}
    for scaling, own in itertools.product(kept, every):
        options = {"scaling": scaling} if isinstance(scaling, str) else {"scaling": "blocks", "block": scaling}
        want = cutegemm.quantize(x, torch.int8, **options)
        ours = placed(setting, x, own, False)
        got = cutegemm.quantize(ours, torch.int8, **options)
        assert got[0].placements == (own if own in kept[scaling] else Replicate(),)
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine.full_tensor().float(), theirs.float())
        again = cutegemm.quantize(ours, torch.int8, scale=got[1])[0]
        back = cutegemm.dequantize(again, got[1], torch.float32)
        assert torch.equal(back.full_tensor(), cutegemm.dequantize(*want, torch.float32))
        assert back.placements == (own,)
    blocks = {"scaling": "blocks", "block": (128, 128)}
    for of_x, of_w in (
        ({"scaling": "rows"}, {"scaling": "rows"}),
        ({"scaling": "tensor"},) * 2,
        ({"scaling": "blocks"}, blocks),
    ):
        a, scale_a = cutegemm.quantize(x, torch.int8, **of_x)
        b, scale_b = (each.t() if each.dim() else each for each in cutegemm.quantize(w, torch.int8, **of_w))
        bias = torch.randn(384, generator=setting.generator).to(setting.device)

        def call(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None) -> Any:
            return cutegemm.gemm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.float32)

        for number, (of_a, of_b) in enumerate(itertools.product(every, repeat=2)):
            given = [a, b, scale_a, scale_b, *([bias] if number % 2 else [])]
            got = same(setting, call, given, [of_a, of_b, *(Replicate(),) * (len(given) - 2)], grad=False)
            if (of_a, of_b) == (Shard(1), Shard(0)):
                assert got == [Partial()] or number % 2


@check
def operators_that_are_refused(setting: Setting) -> None:
    from torch.distributed.tensor import Replicate, Shard

    import cutegemm
    from cutegemm.pytorch import mlp

    a, b = (placed(setting, setting.integers(4, 4), Shard(0), False) for _ in range(2))
    w, ends = setting.integers(2, 4, 4), torch.tensor([1, 4], dtype=torch.int32, device=setting.device)
    with refused(ValueError, "out: got one in a call with DTensors"):
        cutegemm.gemm(a, b, epilogue=lambda acc: acc + 1, out=a.clone())
    with refused(ValueError, "b: got a Tensor in a call of torch.ops.cutegemm.gemm_program with DTensors"):
        cutegemm.gemm(a, b.to_local(), epilogue=lambda acc: acc + 1)
    with refused(ValueError, "constant: got 'b' with DTensors"):
        cutegemm.gemm(a, b, epilogue=lambda acc: acc + 1, constant="b")
    narrow = [placed(setting, setting.integers(4, 4).to(torch.int8), Replicate(), False) for _ in range(2)]
    with refused(ValueError, "constant: got 'b' with DTensors"):
        cutegemm.gemm(*narrow, scale_a=placed(setting, torch.ones((), device=setting.device), Replicate(), False),
                      constant="b")  # fmt: skip
    weights = [placed(setting, setting.integers(*shape), Replicate(), False) for shape in ((8, 4), (4, 4))]
    with refused(ValueError, "constant_weights: got True with DTensors"):
        mlp.gated_mlp(a, *weights, mlp.Settings("silu", None, "auto", True))
    with refused(ValueError, "offsets: got a Tensor in a call of torch.ops.cutegemm.grouped_gemm with DTensors"):
        cutegemm.grouped_gemm(a, placed(setting, w, Replicate(), False), ends)
    with refused(ValueError, "b: its groups are sharded over the device mesh"):
        cutegemm.grouped_gemm(a, placed(setting, w, Shard(0), False), placed(setting, ends, Replicate(), False))
    with refused(ValueError, "out: got one in a call with DTensors"):
        cutegemm.grouped_gemm(
            a, placed(setting, w, Replicate(), False), placed(setting, ends, Replicate(), False), out=a.clone()
        )
