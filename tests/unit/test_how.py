"""The options that travel as one: what torch's operators say of them, to the letter, and how they are put together."""

from __future__ import annotations

import pytest
import torch

import cutegemm  # noqa: F401  it defines the operators
from cutegemm.run.how import ACCEPTED, How, passed, settled, split

PLAIN = 'str? precision=None, str backend="auto", str? config=None, '


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemm", f"{PLAIN}str? constant=None) -> Tensor"),
        ("gemm_out", "str? precision, str backend, str? config, Tensor(d!) out, str? constant=None) -> ()"),
        ("gemm_program", f'{PLAIN}str save="outputs", str? constant=None) -> Tensor[]'),
        ("gemm_program_out", "str? precision, str backend, str? config, Tensor(d!)[] out, str? constant=None) -> ()"),
        ("scaled_gemm", f"{PLAIN}str[]? scaling=None, str? constant=None) -> Tensor"),
        ("scaled_gemm_program", f"{PLAIN}str? constant=None) -> Tensor[]"),
    ],
)
def test_schemas_which_saved_graphs_hold_end_as_they_did(name, text):
    assert str(getattr(torch.ops.cutegemm, name).default._schema).endswith(f" {text}")


def test_operators_take_what_is_passed_and_fill_in_what_torch_leaves_away():
    how = How("tf32", "cute", "sm80", "b")
    assert split(passed(how, "own")) == (how, "own")
    assert passed(how) == tuple(how)
    assert split((), "outputs") == (How(), "outputs")
    assert split(("tf32", "cute"), "outputs") == (How("tf32", "cute"), "outputs")
    assert settled(None, ("tf32",)) == How("tf32")
    assert tuple(ACCEPTED) == How._fields
