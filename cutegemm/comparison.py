"""`compare`: how far a model with quantized layers is from the one that it was made from, layer by layer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from cutegemm import replacing
from cutegemm.quantized_linear import Fp8Linear
from cutegemm.quantized_mixture import Fp8MoE
from cutegemm.quantized_mlp import Fp8SwiGLU


class LayerError(NamedTuple):
    """A layer's own error, on the inputs that the reference model gives it: ||q - r|| / ||r|| of its outputs r, and the
    largest |q - r| over the largest |r|.
    """

    name: str
    error: float
    worst: float


class Comparison(NamedTuple):
    """What `compare` finds. error: ||q - r|| / ||r|| of the whole models' outputs. cosine: between them. layers: the
    quantized layers, the worst first.
    """

    error: float
    cosine: float
    layers: tuple[LayerError, ...]

    def __str__(self) -> str:
        lines = [f"output: relative error {self.error:.3g}, cosine {self.cosine:.6f}"]
        lines += [f"{each.error:10.3g} {each.worst:10.3g}  {each.name}" for each in self.layers]
        return "\n".join(lines[:1] + ["     error      worst  layer"] * bool(self.layers) + lines[1:])


def compare(model: torch.nn.Module, quantized: torch.nn.Module, *inputs: Any, **options: Any) -> Comparison:
    """How far `quantized` is from `model`, of which it is a copy with `Fp8Linear`, `Fp8SwiGLU` and `Fp8MoE` in place of
    layers.

    Both models are called with the inputs, without gradients and in evaluation mode: no dropout, and no statistics are
    changed. Each module has its own mode again afterwards. Each replaced layer is also run by itself, on the input that
    the layer of the same name in `model` gets: so its own error shows, not those before it. A UserWarning says when
    there is no such layer.

    Args:
        model: the reference, in any dtype; on the device of the inputs, as `quantized`.
        inputs, options: what the models are called with. The first tensor of what they return is compared (`logits`
            where there are such).

    Raises:
        TypeError: no module, or no tensor in what a model returns.
        ValueError: the models, or layers of one name, return tensors of different shapes.
    """
    replacing.check(model, None)
    replacing.check(quantized, None, "quantized")
    model, quantized = _unwrapped(model), _unwrapped(quantized)
    layers: list[LayerError] = []
    whole = {name: each for name, each in quantized.named_modules() if isinstance(each, Fp8SwiGLU | Fp8MoE)}
    within = {id(layer) for each in whole.values() for layer in each.children()}
    replaced = whole | {
        name: each for name, each in quantized.named_modules() if isinstance(each, Fp8Linear) and id(each) not in within
    }

    def watch(name: str) -> Callable[..., None]:
        def look(module: Any, given: tuple[Any, ...], named: dict[str, Any], result: torch.Tensor) -> None:
            found = replaced[name].forward(*given, **named)
            if found.shape != result.shape:
                shapes = tuple(found.shape), tuple(result.shape)
                raise ValueError(
                    f"quantized: its layer {name!r} returned shape {shapes[0]}, expected that of model's, {shapes[1]}"
                )
            error, worst, _ = _distance(found, result)
            layers.append(LayerError(name, error, worst))

        return look

    originals = {name: each for name, each in model.named_modules() if name in replaced}
    handles = [
        each.register_forward_hook(watch(name), with_kwargs=True)
        for name, each in originals.items()
        if not isinstance(each, Fp8Linear | Fp8SwiGLU | Fp8MoE)
    ]
    if not handles:
        warnings.warn(
            "compare: outputs alone are compared: no quantized layer has the name of a layer of `model` that is not",
            stacklevel=2,
        )
    with torch.no_grad(), _evaluating(model), _evaluating(quantized):
        try:
            want = _output(model(*inputs, **options))
        finally:
            for handle in handles:
                handle.remove()
        got = _output(quantized(*inputs, **options))
        if got.shape != want.shape:
            shapes = tuple(got.shape), tuple(want.shape)
            raise ValueError(
                f"quantized: it returned a tensor of shape {shapes[0]}, expected that of model, {shapes[1]}"
            )
        error, _, cosine = _distance(got, want)
    return Comparison(error, cosine, tuple(sorted(layers, key=lambda layer: -layer.error)))


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards each module in its own."""
    modes = [(each, each.training) for each in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model within torch.compile's module, DataParallel or DistributedDataParallel, whose names have a prefix."""
    wrappers = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    while replacing.is_compiled(model) or isinstance(model, wrappers):
        model = model._orig_mod if replacing.is_compiled(model) else model.module
    return model


def _distance(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float, float]:
    """(||got - want|| / ||want||, the largest difference over the largest |want|, cosine)."""
    x, y = got.double().flatten(), want.double().flatten()
    norm, least = y.norm(), torch.finfo(torch.float64).tiny
    worst = (x - y).abs().amax() / y.abs().amax().clamp(min=least) if y.numel() else norm
    cosine = torch.dot(x, y) / (x.norm() * norm).clamp(min=least)
    return float((x - y).norm() / norm.clamp(min=least)), float(worst), float(cosine)


def _output(result: Any) -> torch.Tensor:
    """The first tensor of what a model returns."""
    logits = getattr(result, "logits", None)
    for each in _tensors(result if logits is None else logits):
        return each
    raise TypeError(f"model: it returned {type(result).__name__} without a tensor, which cannot be compared")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
