"""Split-K and stream-K where launches could meet in a workspace: graphs beside graphs, compiled graphs, many shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cutegemm
from tests.problems import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("hopper"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compilers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SPLIT = "sm90/128x128x64/coop2/c1x1/s5/row/k16"
STREAM = "sm90/128x128x64/coop2/c1x1/s5/serp8/streamk"
PROBLEMS = {SPLIT: (256, 264, 16392), STREAM: (1600, 2048, 1032)}


@pytest.mark.parametrize("config", [SPLIT, STREAM])
def test_graphs_captured_on_one_stream_run_beside_each_other(config, seed):
    case = Case.random(*PROBLEMS[config], "bf16", seed=seed, device="cuda")
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    torch.cuda.synchronize()
    graphs, outs = [], []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            outs.append([cutegemm.gemm(case.a, case.b, backend="cute", config=config) for _ in range(4)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(side):
            eager = cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    torch.cuda.synchronize()
    assert torch.equal(eager, want)
    assert all(torch.equal(out, want) for graph_outs in outs for out in graph_outs)


@pytest.mark.parametrize("config", [SPLIT, STREAM])
def test_graphs_of_torch_compile(config, seed):
    """Their warm-up takes memory from their own pool, where nothing may stay."""
    case = Case.random(*PROBLEMS[config], "bf16", seed=seed, device="cuda")
    torch._dynamo.reset()
    step = torch.compile(
        lambda a, b: cutegemm.gemm(a, b, backend="cute", config=config) + 1, fullgraph=True, mode="reduce-overhead"
    )
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=config) + 1
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(step(case.a, case.b).clone(), want)


def test_one_workspace_for_all_shapes_of_a_stream(seed):
    """In a stream of their own, shapes that follow one another back to back, each with other words and parts."""
    cases = [Case.random(8 * i, 264 - 8 * i, 4104, "bf16", seed=seed, device="cuda") for i in range(1, 30)]
    wants = [cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT) for case in cases]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for case, want in zip(cases, wants, strict=True):
            got = [cutegemm.gemm(case.a, case.b, backend="cute", config=SPLIT) for _ in range(3)]
            assert all(torch.equal(one, want) for one in got)
            del got
    torch.cuda.synchronize()
    # 4 tiles, 16 parts of 64 KiB each, at most: 4 MiB and the words.
    assert torch.cuda.memory_allocated() - before < 8 * 2**20


@pytest.mark.parametrize("config", [SPLIT, STREAM])
def test_workspaces_are_freed_between_launches_under_way_and_beside_graphs(config, seed):
    case = Case.random(*PROBLEMS[config], "bf16", seed=seed, device="cuda")
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(cutegemm.gemm(case.a, case.b, backend="cute", config=config))
        assert cutegemm.clear_workspaces() > 0
        # Whatever else torch's allocator gives that memory to must not disturb the launches, nor they it.
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.full((1 << 20,), -1, dtype=torch.int8, device="cuda")
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, want)
    assert all(torch.equal(out, want) for out in outs)
    cutegemm.clear_workspaces()
    assert cutegemm.clear_workspaces() == 0


@pytest.mark.parametrize("config", [SPLIT, STREAM])
def test_threads_on_their_own_default_streams(config, seed):
    """Every thread's stream has the handle 2; the launches of several run beside each other."""
    case = Case.random(*PROBLEMS[config], "bf16", seed=seed, device="cuda")
    want = cutegemm.gemm(case.a, case.b, backend="cute", config=config)
    outs = [torch.empty_like(want) for _ in range(4)]
    want = want.cpu()
    torch.cuda.synchronize()

    def work(out: torch.Tensor) -> bool:
        own = torch.cuda.ExternalStream(2)
        right = True
        with torch.cuda.stream(own):
            for _ in range(50):
                cutegemm.gemm(case.a, case.b, out=out, backend="cute", config=config)
                # Compared on the CPU: torch's allocator takes the streams of all threads for one, so that temporary
                # tensors of a comparison on the GPU could be shared by two threads.
                right = right and torch.equal(out.cpu(), want)
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, outs))
