"""Split-K and stream-K in CUDA graphs: no node that clears, nothing left behind, right beside each other."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter

import pytest
import torch

import cutegemm
from cutegemm.cute import workspace
from tests.problems import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("hopper"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compilers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SPLIT = "sm90/128x128x64/coop2/c1x1/s5/row/k16"
ARRIVAL = "sm90/128x128x64/coop2/c1x1/s5/row/k16/arrival"
STREAM = "sm90/128x128x64/coop2/c1x1/s5/serp8/streamk"
PROBLEMS = {SPLIT: (256, 264, 16392), ARRIVAL: (256, 264, 16392), STREAM: (1600, 2048, 1032)}


def nodes(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """How many nodes of each type a graph has."""
    from cuda.bindings import driver

    handle = driver.CUgraph(graph.raw_cuda_graph())
    status, _, count = driver.cuGraphGetNodes(handle, 0)
    assert int(status) == 0
    status, found, _ = driver.cuGraphGetNodes(handle, count)
    assert int(status) == 0
    return Counter(driver.cuGraphNodeGetType(node)[1].name for node in found[:count])


def integers(config: str, seed: int) -> Case:
    """A case whose sums are exact in any order, so that every replay gives the very same numbers."""
    case = Case.random(*PROBLEMS[config], "bf16", seed=seed, device="cuda")
    for each in (case.a, case.b):
        each.copy_(torch.randint_like(each, -1, 2))
    return case


def settle(wanted: int) -> None:
    """Waits until no more than `wanted` bytes are kept for graphs: CUDA's thread calls the destructors soon."""
    deadline = time.monotonic() + 10
    graphs = workspace.default._graphs
    while sum(block.memory.nbytes for block in graphs.blocks()) > wanted and time.monotonic() < deadline:
        graphs.collect()
        time.sleep(0.01)
    assert sum(block.memory.nbytes for block in graphs.blocks()) <= wanted


@pytest.mark.parametrize("config", [SPLIT, ARRIVAL, STREAM])
def test_200_calls_have_200_kernels_and_nothing_else(config, seed):
    case = integers(config, seed)
    out = cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    want = out.clone()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(200):
            cutegemm.gemm(case.a, case.b, out=out, backend="cute", config=config)
    assert nodes(graph) == {"CU_GRAPH_NODE_TYPE_KERNEL": 200}
    graph.instantiate()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_a_graph_is_instantiated_again(seed):
    """An executable is replaced while the one before it may still run."""
    case = integers(SPLIT, seed)
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
    for _ in range(3):
        graph.instantiate()
        for _ in range(20):
            graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_branches_of_one_graph_run_beside_each_other(seed):
    case = integers(SPLIT, seed)
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
    torch.cuda.synchronize()
    graph, sides, outs = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(4)], []
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for side in sides:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                outs += [cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT) for _ in range(5)]
        for side in sides:
            main.wait_stream(side)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_graphs_are_replayed_on_other_streams_beside_eager_calls(seed):
    case = integers(STREAM, seed)
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=STREAM)
    graphs, outs = [], []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(cutegemm.gemm(case.a, case.b, backend="cute", config=STREAM))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for turn in range(40):
        for number, graph in enumerate(graphs):
            # A graph runs after its own earlier launches, whatever the stream.
            with torch.cuda.stream(streams[(number + turn) % len(streams)]):
                graph.replay()
        eager = cutegemm.gemm(case.a, case.b, backend="cute", config=STREAM)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in (*outs, eager))


def test_a_thousand_captures_leak_nothing(seed):
    case = integers(SPLIT, seed)
    out = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)

    def captures(count: int) -> None:
        for _ in range(count):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                cutegemm.gemm(case.a, case.b, out=out, backend="cute", config=SPLIT)
            graph.replay()
            del graph

    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        settle(0)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    captures(50)
    before, allocated = used(), torch.cuda.memory_allocated()
    captures(1000)
    after = used()  # which frees what deleted graphs held
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers take memory of the same GPU
        assert after <= before + 8 * 2**20
    assert torch.cuda.memory_allocated() == allocated


def test_a_capture_that_fails_gives_its_memory_back(seed):
    case = integers(SPLIT, seed)
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
    torch.cuda.synchronize()
    settle(0)
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError), torch.cuda.graph(graph):  # noqa: PT012
            cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
            torch.cuda.current_stream().synchronize()  # not allowed while it is captured
        del graph
    torch.cuda.synchronize()
    settle(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_capturing_in_every_mode_beside_a_thread_that_launches(seed):
    """The mode "global" forbids allocations in every thread but those that ask to be exempt."""
    case = integers(SPLIT, seed)
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
    torch.cuda.synchronize()
    for mode in ("global", "thread_local", "relaxed"):
        cutegemm.clear_workspaces()
        torch.cuda.empty_cache()  # the memory must come from cudaMalloc
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            out = cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want), mode


def test_make_graphed_callables(seed):
    """Forward and backward graphs of a layer whose products split K, in one pool."""
    layer = torch.nn.Linear(8192, 64, bias=False, device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randint(-1, 2, (16, 8192), device="cuda", generator=generator).to(torch.bfloat16)
    layer.weight.data.copy_(torch.randint(-1, 2, (64, 8192), device="cuda", generator=generator))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = layer.weight

        def forward(self, x):
            return cutegemm.gemm(x, self.weight.t(), backend="cute", config="sm90/64x64x64/coop1/c1x1/s8/row/k16/pdl")

    with torch.no_grad():  # a use of the weight recorded on the default stream breaks torch's own capture as well
        want = x.float() @ layer.weight.float().t()
    graphed = torch.cuda.make_graphed_callables(Layer(), (x.clone().requires_grad_(),))
    for _ in range(3):
        given = x.clone().requires_grad_()
        got = graphed(given)
        assert torch.equal(got, want.to(torch.bfloat16))
        got.sum().backward()
        assert torch.equal(given.grad, layer.weight.float().sum(0).to(torch.bfloat16).expand_as(given))
