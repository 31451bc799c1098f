"""`compare`: how far a model with quantized layers is from the original, layer by layer."""

from __future__ import annotations

import copy

import pytest
import torch

from cutegemm.nn import compare, replace_linears


class ByKeyword(torch.nn.Module):
    def __init__(self, columns: int = 6):
        super().__init__()
        self.layer = torch.nn.Linear(16, columns)

    def forward(self, x):
        return self.layer(input=x)


def test_compare_sees_layers_that_are_called_by_keyword():
    reference, x = ByKeyword(), torch.randn(5, 16)
    found = compare(reference, replace_linears(copy.deepcopy(reference), dtype="fp8"), x)
    assert [each.name for each in found.layers] == ["layer"]
    assert 0 < found.error < 0.1


def test_compare_evaluates_and_leaves_the_models_as_they_were():
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    model[1].eval()
    quantized, before = replace_linears(copy.deepcopy(model), dtype="fp8"), copy.deepcopy(model.state_dict())
    found = compare(model, quantized, torch.randn(5, 16))
    assert found.error < 0.1
    for each in (model, quantized):
        assert [module.training for module in each.modules()] == [True, True, False, True]
        for name, value in before.items():
            if "1." in name:
                assert torch.equal(each.state_dict()[name], value)


def test_compare_names_what_it_cannot_compare():
    reference, x = ByKeyword(), torch.randn(5, 16)
    with pytest.raises(TypeError, match=r"^model: got int, expected a torch\.nn\.Module"):
        compare(1, reference, x)
    with pytest.raises(TypeError, match=r"^quantized: got NoneType, expected a torch\.nn\.Module"):
        compare(reference, None, x)
    with pytest.raises(ValueError, match=r"^quantized: .* shape \(5, 3\), expected that of model, \(5, 6\)"):
        compare(reference, ByKeyword(3), x)


def test_the_report_looks_into_what_is_wrapped_and_names_what_differs(seed):
    torch.manual_seed(seed)
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Linear(24, 7)), torch.randn(6, 32)
    quantized = replace_linears(copy.deepcopy(model), dtype="fp8")
    want = compare(model, quantized, x)
    assert compare(torch.compile(model, backend="eager"), quantized, x) == want
    assert compare(torch.nn.DataParallel(model), torch.nn.DataParallel(quantized), x) == want
    other = replace_linears(torch.nn.Sequential(torch.nn.Linear(32, 7)), dtype="fp8")
    with pytest.raises(ValueError, match=r"quantized: its layer '0' returned shape \(6, 7\), expected .* \(6, 24\)"):
        compare(model, other, x)


def test_a_report_without_layers_says_so(seed):
    torch.manual_seed(seed)
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 24)), torch.randn(6, 32)
    quantized = replace_linears(copy.deepcopy(model), dtype="fp8")
    for one, other in ((quantized, quantized), (model, torch.nn.Sequential(quantized)), (model, model)):
        with pytest.warns(UserWarning, match="^compare: outputs alone are compared"):
            assert compare(one, other, x).layers == ()
