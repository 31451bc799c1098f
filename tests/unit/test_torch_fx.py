"""Models of these layers in torch.fx, and copies of them, of programs and of errors: deepcopy, pickle, torch.save."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import cutegemm
from cutegemm import nn, ops

X = torch.linspace(-1, 1, 4 * 16).view(4, 16)


class Tracer(torch.fx.Tracer):
    """As docs/pytorch.md has it."""

    def is_leaf_module(self, module, name):
        return type(module).__module__.startswith("cutegemm.") or super().is_leaf_module(module, name)


class Programmed(torch.nn.Module):
    """A program among a module's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(X.t().contiguous())
        self.epilogue = cutegemm.trace_epilogue(lambda acc, row: ops.gelu(acc) + row, (torch.ones(4),))

    def forward(self, x):
        return cutegemm.gemm(x, self.weight, epilogue=self.epilogue, operands=(X[0, :4],))


def pickled(module):
    """Torch itself cannot unpickle a tensor in fp8, which torch.save can keep."""
    fp8 = any(each.dtype == torch.float8_e4m3fn for each in module.state_dict().values())
    return module if fp8 else pickle.loads(pickle.dumps(module))


def linears():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))


MODELS = {
    "Linear": lambda: nn.replace_linears(linears()),
    "Fp8Linear": lambda: nn.replace_linears(linears(), dtype="fp8"),
    "SwiGLU": lambda: torch.nn.Sequential(nn.SwiGLU(16, 32), torch.nn.ReLU()),
    "MoE": lambda: torch.nn.Sequential(nn.MoE(16, 32, 4, 2), torch.nn.ReLU()),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_traced_as_leaves(name):
    model = MODELS[name]().eval()
    with torch.no_grad():
        traced = torch.fx.GraphModule(model, Tracer().trace(model))
        for each in (traced, pickled(traced), copy.deepcopy(traced)):
            assert torch.equal(each(X), model(X))
    with pytest.raises(TypeError, match=r"got Proxy, expected a torch\.Tensor; have torch\.fx take"):
        torch.fx.symbolic_trace(model)


@pytest.mark.parametrize("name", [*MODELS, "a program"])
def test_copies_of_models(name):
    model = (MODELS | {"a program": Programmed})[name]().eval()
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    with torch.no_grad():
        for each in (torch.load(memory, weights_only=False), copy.deepcopy(model), pickled(model)):
            assert torch.equal(each(X), model(X))


def test_a_copy_of_a_program_is_the_same_program():
    program = Programmed().epilogue
    for each in (copy.copy(program), copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert (each, hash(each), each.text) == (program, hash(program), program.text)
