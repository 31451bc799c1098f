"""Which module may import which: no circles, arrows that point down, and little that importing the package loads.

Imports within functions count, those under `TYPE_CHECKING` do not. The registry of backends imports by name, which is
what lets kernel families stand above the choice among them.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cutegemm", "legacy_cuda", "tuning")
LIBRARY = ("cutegemm", "legacy_cuda")

LAYERS = {
    "command lines": "tuning.*",
    "public calls": """
        cutegemm cutegemm.gemm cutegemm.grouped cutegemm.linear cutegemm.nn cutegemm.tune cutegemm.memory cutegemm.demo
        cutegemm.quantize cutegemm.quantized_linear cutegemm.comparison cutegemm.scaled_mm cutegemm.moe cutegemm.mixture
        cutegemm.replacing cutegemm.parallel cutegemm.layer_operator cutegemm.quantized_mlp cutegemm.mlp_operator
        cutegemm.mixing cutegemm.mixing_gradients cutegemm.quantized_mixing cutegemm.quantized_mixture
        cutegemm.moe_operator cutegemm.router cutegemm.gating cutegemm.moe_arguments cutegemm.mxfp4
        cutegemm.quantized_weights cutegemm.quantized_mixture_state
        cutegemm.emulator.__main__ cutegemm.emulator.workload cutegemm.cutlass2x.__main__""",
    "PyTorch": "cutegemm.pytorch.*",
    "a call": """
        cutegemm.run.call cutegemm.run.runner cutegemm.run.fused cutegemm.run.grouped cutegemm.run.how
        cutegemm.run.preparing
        cutegemm.run.quantizing cutegemm.run.quantize_kernels cutegemm.run.routing cutegemm.run.combining
        cutegemm.run.routing_kernels cutegemm.run.steps""",
    "tuner": "cutegemm.tuner.*",
    "kernels": "cutegemm.cute.* cutegemm.cutlass2x.* legacy_cuda.* cutegemm.torch_backend cutegemm.torch_grouped",
    "choice": """
        cutegemm.choice.plan cutegemm.choice.group_kin cutegemm.choice.relatives cutegemm.choice.prepared
        cutegemm.choice.heuristics cutegemm.choice.spills""",
    "winners": "cutegemm.winners.*",
    "what a backend is": "cutegemm.backend",
    "cost model": """
        cutegemm.choice cutegemm.choice.cost_model cutegemm.choice.compiled cutegemm.choice.cost_rates
        cutegemm.choice.cost_formula cutegemm.choice.compare
        cutegemm.choice.cost_terms cutegemm.choice.footprint cutegemm.choice.learned
        cutegemm.choice.program_cost""",
    "emulator": "cutegemm.emulator.*",
    "what kernels run with": """
        cutegemm.run cutegemm.run.kernel_store cutegemm.run.arguments cutegemm.run.reductions cutegemm.run.source_digest
        cutegemm.run.cache_dir cutegemm.run.float32 cutegemm.run.environment cutegemm.run.progress
        cutegemm.native.*""",
    "hardware": "cutegemm.hardware.*",
    "problem": "cutegemm.problem.* cutegemm.ops.*",
    "errors, locks": "cutegemm.errors cutegemm.locks",
}
"""The layers from top to bottom: modules by name, `NAME.*` a package with all that no other layer names."""

Graph = Mapping[str, frozenset[str]]
"""Module -> modules that it imports."""


def modules(root: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Name -> source text of every module of these packages."""
    found = {}
    for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def imported(text: str) -> tuple[str, ...]:
    """What a module imports at any time: names of modules, and of what is taken from one as `module.name`."""
    return tuple(_imported(text))


def _imported(text: str) -> Iterator[str]:
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the project imports by full names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in (getattr(node.func, at, "") for at in ("id", "attr")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def graph(texts: Mapping[str, str]) -> Graph:
    """The imports among these modules. What is taken from a package is the package's unless it is a module."""
    found = {}
    for name, text in texts.items():
        known = (each if each in texts else each.rpartition(".")[0] for each in imported(text))
        found[name] = frozenset(each for each in known if each in texts) - {name}
    return found


def circles(of: Graph) -> list[list[str]]:
    """The sets of modules that import one another, directly or by way of others: strongly connected components."""
    reach: dict[str, set[str]] = {}
    for start in of:
        seen, todo = set[str](), [start]
        while todo:
            todo += (more := of[todo.pop()] - seen)
            seen |= more
        reach[start] = seen
    alike = {frozenset(b for b in reach[a] if a in reach[b]) for a in of if a in reach[a]}
    return sorted(sorted(component) for component in alike)


def layer(module: str) -> int:
    """The place of a module's layer, 0 at the top. Raises LookupError unless one layer has it."""
    named = [place for place, names in enumerate(LAYERS.values()) if module in names.split()]
    package = module
    while not named and package:
        named = [place for place, names in enumerate(LAYERS.values()) if f"{package}.*" in names.split()]
        package = package.rpartition(".")[0]
    if len(named) != 1:
        raise LookupError(f"{module}: {len(named)} layers of LAYERS name it; give it one")
    return named[0]


TEXTS = modules(ROOT, PACKAGES)


@pytest.fixture(scope="module")
def imports() -> Graph:
    return graph(TEXTS)


def test_there_is_no_circle(imports):
    assert circles(imports) == []


def test_the_library_imports_neither_command_lines_nor_tests():
    outside = [
        f"{name} imports {each}"
        for name, text in TEXTS.items()
        for each in imported(text)
        if name.split(".")[0] in LIBRARY and each.split(".")[0] in ("tuning", "tests")
    ]
    assert outside == []


def test_every_module_has_its_layer():
    assert all(layer(name) >= 0 for name in TEXTS)
    named = {name for names in LAYERS.values() for name in names.split()}
    assert {name.removesuffix(".*") for name in named} <= set(TEXTS), "LAYERS names modules that there are not"


def test_arrows_point_down(imports):
    names = tuple(LAYERS)
    up = [
        f"{name} ({names[layer(name)]}) imports {each} ({names[layer(each)]})"
        for name, others in imports.items()
        for each in sorted(others)
        if layer(each) < layer(name)
    ]
    assert up == []


def test_a_circle_is_found_wherever_the_imports_stand():
    texts = {
        "p": "",
        "p.a": "from p import b\nimport os",
        "p.b": "def f():\n    import p.c",
        "p.c": "import importlib\nx = importlib.import_module('p.a')",
        "p.d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.e import name\nfrom p.a import x",
        "p.e": "from p.d import y",
    }
    found = graph(texts)
    assert found == {
        "p": frozenset(), "p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}, "p.d": {"p.a"}, "p.e": {"p.d"}
    }  # fmt: skip
    assert circles(found) == [["p.a", "p.b", "p.c"]]
    assert circles({**found, "p.d": frozenset({"p.e"})}) == [["p.a", "p.b", "p.c"], ["p.d", "p.e"]]


def test_a_module_without_a_layer_is_named():
    with pytest.raises(LookupError, match=r"cutegemm\.run\.new: 0 layers"):
        layer("cutegemm.run.new")
    assert layer("cutegemm.tuner.new") == layer("cutegemm.tuner")
    assert layer("cutegemm.emulator.workload") < layer("cutegemm.tuner") < layer("cutegemm.emulator.ops.wgmma")


def test_importing_the_package_loads_little():
    """No DSL, no compiler, no database, no kernel family, tuner or emulator; no thread. It takes 0.05 s of processor
    time beyond torch's 1.2 s, which include torch's flop counter: where triton is installed, that imports it. On a
    slower machine both take longer. What needs rich or DTensor asks for it then.
    """
    program = """
import sys, time, threading
start = time.process_time()
import torch, torch.utils.flop_counter
torch_took = time.process_time() - start
before, threads = set(sys.modules), threading.active_count()
start = time.process_time()
import cutegemm
took = time.process_time() - start
heavy = ("cutlass", "cuda", "llvmlite", "tvm_ffi", "cutlass_library", "numba", "sqlite3", "multiprocessing", "tuning",
         "legacy_cuda", "cutegemm.cute.hopper", "cutegemm.cutlass2x", "cutegemm.tuner.run", "cutegemm.winners",
         "cutegemm.emulator", "cutegemm.choice.heuristics")
new = set(sys.modules) - before
print(sorted(name for name in new if any(name == one or name.startswith(one + ".") for one in heavy)))
print(threading.active_count() - threads, torch.cuda.is_initialized())
a = torch.ones(4, 4, requires_grad=True)
cutegemm.gemm(a, a).sum().backward()
torch.vmap(cutegemm.gemm)(a[None], a[None])
cutegemm.gemm(torch.nn.Parameter(a), a.as_subclass(type("Own", (torch.Tensor,), {})))
import cutegemm.tuner.report, cutegemm.emulator.bridge
print([name for name in ("torch.distributed.tensor", "rich") if name in sys.modules])
print(took, torch_took)
"""
    # As users import it, who have its bytecode from the time before.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment
        )
        *found, times = done.stdout.splitlines() or [""]
        assert found == ["[]", "0 False", "[]"], done.stderr
        took, torch_took = map(float, times.split())
        if took < max(0.1, torch_took / 12):
            break
    else:
        raise AssertionError(f"importing the package took {took:.2f} s, torch {torch_took:.2f} s")
