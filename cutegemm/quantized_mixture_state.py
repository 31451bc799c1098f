"""What the states that `Fp8MoE` loads become: those of a `MoE`, of Hugging Face's fp8 experts, and of MXFP4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cutegemm import mxfp4, replacing
from cutegemm.problem.quantization import BLOCK, FORMATS
from cutegemm.pytorch.mlp import check_one
from cutegemm.quantized_linear import Settings
from cutegemm.quantized_weights import check_pair, padded, quantized

NAMES = ("gate_up_proj", "down_proj")
SCALE_ENDINGS = ("_scale", "_scale_inv")
"""Endings of the names of scales in a state: ours, and that of Hugging Face's fp8 experts. Values are multiplied by
either."""


def forms_of(name: str, weight: Any, scale: Any) -> dict[str, torch.Tensor]:
    """What the scales of a quantized weight may be by their shape, the likeliest kind first: "tensor", (), one for all
    experts; "blocks", (E, blocks, blocks) or (E, rows, blocks); "rows", (E, rows, 1).
    """
    scale = check_pair(weight, scale, 3, name, f"{name}_scale")
    (count, rows, columns), shape = weight.shape, tuple(scale.shape)
    of_rows, of_columns = -(-rows // BLOCK), -(-columns // BLOCK)
    found: dict[str, torch.Tensor] = {}
    if scale.numel() == 1:
        found["tensor"] = scale.reshape(())
    if shape == (count, of_rows, of_columns) or (shape == (count, rows, of_columns) and of_columns > 1):
        found["blocks"] = scale
    if shape in ((count, rows), (count, rows, 1)):
        found["rows"] = scale.reshape(count, rows, 1)
    elif shape in ((count,), (count, 1), (count, 1, 1)):
        found["rows"] = scale.reshape(count, 1, 1).expand(count, rows, 1).contiguous()
    if not found:
        raise ValueError(
            f"{name}_scale: got shape {shape} for a weight of shape {tuple(weight.shape)}, accepted are 1 or {count} "
            f"elements, {(count, rows)}, {(count, rows, 1)}, {(count, of_rows, of_columns)}, for blocks of {BLOCK} x "
            f"{BLOCK}, and {(count, rows, of_columns)}, for 1 x {BLOCK}"
        )
    return found


def of_both(scale: Any, weight: Any, interleaved: bool) -> Any:
    """The scales of the rows of gate and up, (E, 2 F), where there is one for each of both, (E, 2); else as given."""
    known = isinstance(scale, torch.Tensor) and isinstance(weight, torch.Tensor) and weight.dim() == 3
    if not known or tuple(scale.shape) != (weight.shape[0], 2) or weight.shape[1] % 2:
        return scale
    count = weight.shape[1] // 2
    return scale.repeat(1, count) if interleaved else scale.repeat_interleave(count, 1)


class _Loaded(NamedTuple):
    """A weight of a state, and what its scales may be; `Fp8MoE` takes the first of them that suits."""

    weight: torch.Tensor
    forms: dict[str, torch.Tensor]


def translate(module: Any, state: dict[str, Any], prefix: str) -> None:
    """Makes the entries of an `Fp8MoE` of those of a `MoE` and of Hugging Face's, and room for other scales. Raises
    TypeError, ValueError or RuntimeError for what does not fit, and then the module is what it was.
    """
    found: dict[str, _Loaded] = {}
    one_way = set[str]()  # weights that lie in one way only, whatever `transposed` says
    for name in NAMES:
        key, own = f"{prefix}{name}", getattr(module, name)
        if _unpack(module, state, key, own):
            one_way.add(key)
        keys = [key + end for end in SCALE_ENDINGS if key + end in state]
        check_one(keys)
        scales = [state.pop(each) for each in keys]
        if scales:
            one_way.add(key)
        loaded = _loaded(module, key, own, state.get(key), scales)
        if loaded is not None:
            found[name] = loaded
        elif scales:
            state[f"{key}_scale"] = scales[0]
    for name, (weight, _) in found.items():  # before torch copies the weight that fits
        key, expected = f"{prefix}{name}", getattr(module, name).shape
        if weight.shape != expected:
            raise RuntimeError(_mismatch(module, key, weight.shape, expected, key not in one_way))
    dtypes = {name: found[name].weight.dtype if name in found else getattr(module, name).dtype for name in NAMES}
    if len({dtype == torch.int8 for dtype in dtypes.values()}) > 1:
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"state_dict: got {given}; accepted are two weights of fp8, or two of int8")
    kinds = dict(module._kinds)
    for name, (weight, forms) in found.items():
        other = found.get(NAMES[1 - NAMES.index(name)])
        own = module._kinds[name]
        if not (own in forms and forms[own].shape == getattr(module, f"{name}_scale").shape):
            own = next((kind for kind in forms if other and kind in other.forms), next(iter(forms)))
        kinds[name] = own
        state[f"{prefix}{name}"], state[f"{prefix}{name}_scale"] = weight, forms[own]
    _make_room(module, found, kinds)


def _mismatch(module: Any, key: str, shape: torch.Size, expected: torch.Size, turns: bool) -> str:
    """The message for a weight that does not fit. shape, expected: as the module keeps weights. turns: whether the
    state's weight lies as `transposed` says.
    """
    shapes, hint = [tuple(shape), tuple(expected)], ""
    turned = [(each[0], each[2], each[1]) if len(each) == 3 else each for each in shapes]
    if turns:
        hint = f"; with transposed={not module.transposed} it would fit" if turned[0] == shapes[1] else ""
        shapes = turned if module.transposed else shapes
    return f"state_dict: size mismatch for {key}: got shape {shapes[0]}, expected {shapes[1]}{hint}"


def _unpack(module: Any, state: dict[str, Any], key: str, home: torch.Tensor) -> bool:
    """Puts a weight in bf16 in the place of one in MXFP4, and says whether there was one. home: the module's own."""
    keys = [key + end for end in mxfp4.ENDINGS if key + end in state]
    if not keys:
        return False
    others = (key, *(key + end for end in SCALE_ENDINGS))
    check_one([*(each for each in others if each in state), keys[0]])
    if len(keys) == 1:
        missing = next(key + end for end in mxfp4.ENDINGS if key + end not in state)
        raise ValueError(f"state_dict: got {keys[0]} without {missing}")
    blocks, scales = (state.pop(each) for each in keys)
    for each, tensor in zip(keys, (blocks, scales), strict=True):
        if not home.is_meta and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise ValueError(f"{each}: it is on meta, expected a tensor with numbers for a layer that has some")
    if not home.is_meta and isinstance(blocks, torch.Tensor):
        blocks = blocks.to(home.device)
    weight = mxfp4.unpacked(blocks, scales, key)
    state[key] = weight.mT if module.transposed else weight  # blocks lie along K whatever other weights do
    return True


def _loaded(module: Any, key: str, own: torch.Tensor, weight: Any, scales: list[Any]) -> _Loaded | None:
    """A weight of a state, quantized if it was not; None for what torch is to refuse by name. own: the module's."""
    if not isinstance(weight, torch.Tensor):
        return None
    weight = weight.flatten(1, 2) if weight.dim() == 4 else weight
    if scales:
        forms = forms_of(key, weight, scales[0])
        return _Loaded(padded(weight), forms)
    if weight.is_floating_point() and weight.dtype not in FORMATS:
        home = weight if own.is_meta else weight.to(own.device)
        home = home.mT if module.transposed and home.dim() == 3 else home
        values, scale = quantized(home, module.settings.dtype, module.settings.scaling[1], key)
        return _Loaded(values, {module.settings.scaling[1]: scale})
    if weight.dtype != own.dtype:
        raise TypeError(f"{key}: got {weight.dtype} without its scales, which the module's {own.dtype} has")
    return None


def _make_room(module: Any, found: dict[str, _Loaded], kinds: dict[str, str]) -> None:
    """For weights of another dtype, and scales of another kind, than the module has."""
    for name, (weight, forms) in found.items():
        own, of_own, scale = getattr(module, name), getattr(module, f"{name}_scale"), forms[kinds[name]]
        if weight.dtype != own.dtype:
            replacing.give_buffer(module, name, torch.empty_like(own, dtype=weight.dtype))
        if scale.shape != of_own.shape:
            room = torch.empty(scale.shape, dtype=torch.float32, device=of_own.device)
            replacing.give_buffer(module, f"{name}_scale", room)
    of_input, *others = module.settings[1:]
    dtype = module.settings.dtype
    if dtype not in (each := [getattr(module, name).dtype for name in NAMES]):
        dtype = each[0]
    module.settings = Settings.of(dtype, (of_input[0], kinds[NAMES[0]]), *others)
    module._kinds = kinds
