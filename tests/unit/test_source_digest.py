"""The digest of what sources mean: what changes it, and what must not."""

from __future__ import annotations

import pytest

from cutegemm.run.source_digest import source_digest

KERNEL = '''"""A kernel."""

from __future__ import annotations

from cutegemm.cute import types

STAGES = 4
"""How many stages the ring has."""


class Kernel:
    """Multiplies."""

    def run(self, a):
        """Runs."""
        # Twice, because once is not enough.
        return a + STAGES * 2


def other():
    return f"{STAGES} stages"
'''


def digest(folder, text: str, name: str = "kernel.py") -> str:
    path = folder / name
    path.write_text(text)
    return source_digest(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# Twice, because once is not enough.", "# Two stages at a time."),
        ('"""Multiplies."""', '"""Multiplies two\n    matrices."""'),
        ('"""Runs."""\n        ', ""),
        ('"""How many stages the ring has."""\n', ""),
        ("a + STAGES * 2", "(a + (STAGES * 2))"),
        ("from cutegemm.cute import types", "from cutegemm.cute.warps import types"),
        ("from cutegemm.cute import types", "from . import types"),
        ("def other", "\n\n\ndef other"),
    ],
)
def test_what_does_not_count(tmp_path, before, after):
    assert before in KERNEL
    assert digest(tmp_path, KERNEL) == digest(tmp_path, KERNEL.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("STAGES = 4", "STAGES = 5"),
        ("STAGES * 2", "STAGES * 2.0"),
        ("a + STAGES", "a - STAGES"),
        ("def run(self, a)", "def run(self, a: int)"),
        ("class Kernel", "@final\nclass Kernel"),
        ("{STAGES} stages", "{STAGES} steps"),
        ("from cutegemm.cute import types", "from cutlass.cute import types"),
        ("return a", "print(a); return a"),
    ],
)
def test_what_counts(tmp_path, before, after):
    assert before in KERNEL
    assert digest(tmp_path, KERNEL) != digest(tmp_path, KERNEL.replace(before, after))


def test_files_may_be_renamed_split_and_ordered_otherwise(tmp_path):
    whole = digest(tmp_path, KERNEL)
    assert digest(tmp_path, KERNEL, "renamed.py") == whole
    head, tail = KERNEL.split("def other", 1)
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("from cutegemm.other import STAGES\n\ndef other" + tail)
    second.write_text(head)
    assert source_digest(first, second) == source_digest(second, first) == whole


def test_a_statement_that_stands_twice_counts_twice(tmp_path):
    assert digest(tmp_path, "go()\n") != digest(tmp_path, "go()\ngo()\n")


def test_the_digest_is_the_same_under_every_python(tmp_path):
    """Shipped tables are made under one version and read under another: the digest is written down."""
    assert digest(tmp_path, KERNEL) == "a4c2f41d6a15bea4"


CUDA = """// A kernel.
#define WIDTH 4 /* floats */
__global__ void kernel(float* out, int n) {
    const char* text = "a // b";
    out[n] = n > > 1 ? 1.0f : n + +1;  // why
}
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("// A kernel.", "// The kernel.\n/* of\n two lines */", True),
        ("    out[n]", "out[n]", True),
        ("int n)", "int  n )", True),
        ("  // why", "", True),
        ("a // b", "a // c", False),
        ("> >", ">>", False),
        ("+ +", "++", False),
        ("WIDTH 4 ", "WIDTH 4\n", True),
        ("WIDTH 4", "WIDTH\n4", False),
        ("1.0f", "1.5f", False),
    ],
)
def test_cuda_sources(tmp_path, before, after, same):
    assert before in CUDA
    found = digest(tmp_path, CUDA, "k.cuh"), digest(tmp_path, CUDA.replace(before, after, 1), "k.cuh")
    assert (found[0] == found[1]) is same
