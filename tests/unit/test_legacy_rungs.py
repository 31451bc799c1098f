"""The ladder without compiling: registry, configurations, the validity rule, the search space, launch geometry."""

from __future__ import annotations

import ctypes
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegemm.errors import GemmError
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.cubin import usage
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.run.arguments import Operands, Scalars
from legacy_cuda import build, space
from legacy_cuda.backend import BACKEND, MAX_EXTENT
from legacy_cuda.config import MAX_ACCUMULATORS, LegacyConfig, parse, why_invalid
from legacy_cuda.kernel import _ARGS, MAX_GRID_Z, Geometry
from legacy_cuda.rungs import KERNELS, RUNGS, ladder
from tuning.autotune import _Frontier

H200 = arch_table.get("H200")
FP32 = Problem.of(8192, 8192, 8192, "fp32", majors="tt")
BF16 = Problem.of(8192, 8192, 8192, "bf16", majors="tt")


class TestRegistry:
    def test_every_rung_has_a_file_that_says_what_it_is(self):
        assert [r.file for r in RUNGS.values()] == sorted(p.name for p in KERNELS.glob("[0-9]*.cuh"))
        for rung in RUNGS.values():
            text = rung.source.read_text()
            for heading in ("// Idea", "// Per ", "// Limit", "// Published"):
                assert heading in text, f"{rung.file} lacks {heading}"
            assert re.search(rf"\b{rung.kernel}\(const __grid_constant__ GemmArgs args\)", text), rung.file

    def test_template_parameters_are_those_of_the_registry(self):
        for rung in RUNGS.values():
            template = re.findall(r"template <typename S, ([^>]*)>\s*__global__", rung.source.read_text())
            assert len(template) == 1, rung.file
            names = [part.split()[-1].lower() for part in template[0].split(",")]
            assert names == list(rung.defaults), rung.file

    def test_ladders(self):
        assert len(ladder("fp32")) == 16
        assert [r.name for r in ladder("16bit")] == [
            "warp_tile_16bit",
            "wmma_naive",
            "wmma_warp_tile",
            "wmma_double_buffer",
        ]
        with pytest.raises(ValueError, match="accepted are 'fp32' and '16bit'"):
            ladder("fp64")

    def test_bars_are_the_published_h200_figures(self):
        for rung in RUNGS.values():
            if rung.bar is not None:
                assert rung.bar in [p.tflops for p in rung.published if p.gpu == "H200"]


class TestConfig:
    def test_text_form_reads_back(self):
        for rung in RUNGS:
            config = LegacyConfig.of(rung)
            assert parse(str(config)) == parse(rung) == config
        assert parse("async_copy/tn8/bm64").parameters == {"bm": 64, "bn": 128, "bk": 16, "tm": 8, "tn": 8}
        assert parse(LegacyConfig.of("naive")) == LegacyConfig.of("naive")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("turbo", "no rung is called 'turbo'; accepted are naive, coalesced"),
            ("naive/bk8", "naive has no parameter 'bk'; it has bm, bn"),
            ("naive/bm", "'bm' of 'naive/bm' is no parameter"),
            ("naive/bm32/bm32", "'bm' is given twice"),
            ("naive/bm64", "2048 threads"),
            ("naive/bm0", "at least 1"),
            ("block_tile/bm16", "must be equal"),
            ("thread_tile_2d/tm16/tn16", "256 accumulators"),
            ("warp_tile/bm96", "warp tile must divide"),
            ("warp_tile/wniter3", "WNITER must divide"),
            ("warp_tile/tn2", "multiples of 4"),
            ("warp_tile/bk4", "multiple of 8"),
            ("warp_tile_async/stages1", "STAGES must be 2 to 8"),
            ("wmma_warp_tile/bk8", "whole 16x16x16 fragments"),
            ("async_copy/bk12", "multiple of 8"),
            ("thread_tile_1d/bk4", "do not tile the operands"),
        ],
    )
    def test_refusals_name_what_is_wrong(self, text, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            parse(text)

    def test_wrong_type(self):
        with pytest.raises(TypeError, match="config: got int"):
            parse(128)

    def test_shared_memory_limit_depends_on_the_architecture(self):
        config = parse("warp_tile_async/bm128/bn256/bk32/wm64/wn64/wniter4/tm8/tn4/stages4/group8")
        assert config.dynamic_smem(FP32.signature) == 4 * 32 * (132 + 260) * 4
        assert why_invalid(config, FP32.signature, H200) is None
        assert "shared memory" in str(why_invalid(config, FP32.signature, arch_table.get("A6000")))

    @pytest.mark.parametrize("majors", ["tt", "tn", "nt", "nn"])
    @pytest.mark.parametrize("shape", [(4096, 4096, 4096), (37, 41, 43), (2, 2, 2)])
    def test_defaults_serve_every_alignment_and_major(self, majors, shape):
        for rung in RUNGS.values():
            for dtype in rung.dtypes:
                signature = Problem.of(*shape, dtype, majors=majors).signature
                for name in arch_table.ARCHS:
                    assert why_invalid(LegacyConfig.of(rung.name), signature, arch_table.get(name)) is None

    def test_misaligned_problems_get_scalar_instantiations(self):
        config = LegacyConfig.of("vectorized_both")
        assert config.vectors(FP32.signature) == (4, 4, 1, 4)
        odd = Problem.of(5, 7, 9, "fp32", majors="tt").signature
        assert config.vectors(odd) == (1, 1, 1, 1)
        assert build.expression(odd, config).startswith(
            "vectorized_both<Signature<float, NoC, float, true, false, 1, 1, 1, 1>"
        )
        assert LegacyConfig.of("wmma_warp_tile").vectors(BF16.signature)[:2] == (8, 8)

    @given(
        st.sampled_from(sorted(RUNGS)),
        st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64, 96, 128, 256]), min_size=10, max_size=10),
    )
    def test_the_rule_never_raises_and_holds_its_promises(self, rung, values):
        values = tuple(values[: len(RUNGS[rung].defaults)])
        try:
            config = LegacyConfig(rung, values)
        except ValueError:
            return
        assert 32 <= config.threads <= 1024
        assert config.threads % 32 == 0
        assert 1 <= config.accumulators <= MAX_ACCUMULATORS
        assert config.static_smem() <= 48 * 1024
        assert parse(str(config)) == config


class TestSpace:
    def test_hundreds_of_combinations_all_valid(self):
        for problem, name, least in ((FP32, "thread_tile", 200), (FP32, "warp_tile", 400), (BF16, "warp_tile", 100)):
            found = list(space.family(name, problem.signature, H200))
            assert len(found) >= least
            assert len(set(found)) == len(found)
            assert all(why_invalid(c, problem.signature, H200) is None for c in found)
        with pytest.raises(ValueError, match="family: got 'warp'"):
            list(space.family("warp", FP32.signature, H200))

    def test_shapes_that_must_be_searched(self):
        found = set(map(str, BACKEND.configs(FP32, H200)))
        assert set(space.SEEDS) - found <= {s for s in space.SEEDS if s.startswith("wmma")}
        assert "double_buffer_shared/bm64/bn256/bk16/tm8/tn8" in found
        assert any(t.startswith("warp_tile_async/bm256/bn128/bk8/wm64/wn64") for t in found)

    @pytest.mark.parametrize("n", [1, 64, 1024, 8192])
    @pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
    @pytest.mark.parametrize("majors", ["tt", "nn"])
    def test_default_is_valid_and_small_for_small_problems(self, n, dtype, majors):
        problem = Problem.of(n, n, n, dtype, majors=majors)
        for name in arch_table.ARCHS:
            config = BACKEND.default(problem, arch_table.get(name))
            assert BACKEND.check(config, problem, arch_table.get(name)) is None
            assert n > 64 or config.tile()[0] == 32

    def test_the_search_tries_everything_once_seeds_first(self):
        candidates = sorted(
            space.family("thread_tile", FP32.signature, H200), key=lambda c: -space.promise(c, FP32, H200)
        )
        frontier, order = _Frontier(candidates), []
        while (config := frontier.next()) is not None:
            order.append(config)
            frontier.measured(1.0 / config.accumulators, config)
        assert len(order) == len(candidates) == len(set(order))
        assert str(order[0]) in space.SEEDS

    def test_the_search_turns_to_neighbours_of_the_best(self):
        candidates = [parse(f"async_copy/bm{bm}/bk{bk}") for bm in (64, 128, 256) for bk in (8, 16, 32)]
        frontier = _Frontier(candidates)
        best = parse("async_copy/bm256/bk32")
        frontier.measured(1.0, best)
        nearest = frontier.next()
        assert nearest in (best, parse("async_copy/bm256/bk8"), parse("async_copy/bm256/bk16"))


class TestSupports:
    def test_what_is_served(self):
        for majors in ("tt", "tn", "nt", "nn"):
            for dtype in ("fp32", "fp16", "bf16"):
                for c_dtype in (None, "fp32", "bf16"):
                    problem = Problem.of(33, 65, 17, dtype, majors=majors, batch=3, epilogue=Epilogue(c_dtype))
                    assert BACKEND.supports(problem, H200) is None

    @pytest.mark.parametrize(
        ("problem", "message"),
        [
            (Problem.of(8, 8, 8, "fp32", precision="tf32"), "TF32 use backend 'cute'"),
            (Problem.of(8, 8, 8, "fp32", epilogue=Epilogue(bias_dtype="fp32")), "no bias; backend 'cute' does"),
            (
                Problem.of(8, 8, 8, "fp16", epilogue=Epilogue(activation="relu")),
                r"no activation \(relu\); backend 'cute'",
            ),
            (Problem.of(MAX_EXTENT + 1, 8, 8, "fp16"), "takes M up to"),
            (Problem.of(8, 8, MAX_EXTENT + 1, "fp16"), "takes K up to"),
        ],
    )
    def test_what_is_refused(self, problem, message):
        assert re.search(message, str(BACKEND.supports(problem, H200)))

    def test_a_rung_of_the_other_ladder_is_refused(self):
        assert "multiplies fp16 and bf16, the operands are fp32" in str(BACKEND.check(parse("wmma_naive"), FP32, H200))
        with pytest.raises(ValueError, match="multiplies fp32, the operands are bf16"):
            BACKEND.build(BF16.signature, parse("naive"), H200)

    def test_a_grid_too_large_is_refused(self):
        problem = Problem.of(2_000_000_000, 2_000_000_000, 1, "fp16")
        assert "output tiles" in str(BACKEND.check(parse("wmma_naive"), problem, H200))
        with pytest.raises(ValueError, match="output tiles"):
            Geometry.of(problem, parse("wmma_naive"))


class TestGeometry:
    def test_arguments_match_the_struct_of_the_kernels(self):
        text = (KERNELS / "common.cuh").read_text()
        body = re.search(r"struct GemmArgs \{(.*?)\};", text, re.DOTALL)[1]
        codes = {"const void*": "Q", "void*": "Q", "long long": "q", "int": "i", "float": "f"}
        members = re.findall(r"^\s*(const void\*|void\*|long long|int|float) ([^;]*);", body, re.MULTILINE)
        layout = "".join(codes[kind] * len(names.split(",")) for kind, names in members)
        assert struct.calcsize("@" + layout + "0q") == _ARGS.size
        assert struct.calcsize("<" + layout) == _ARGS.size - 4

    def test_strides_extents_and_grid(self):
        problem = Problem.of(130, 257, 19, "fp32", majors="tn", batch=3, epilogue=Epilogue("bf16"))
        geometry = Geometry.of(problem, parse("warp_tile"))
        assert (geometry.grid_x, geometry.block, geometry.chunks) == (2 * 3, 128, ((0, 3),))
        assert geometry.strides == (19, 19, 257, 257, 1, 130 * 19, 19 * 257, 130 * 257, 130 * 257)
        assert geometry.extents == (130, 257, 19, 2, 3)
        ((count, params),) = geometry.launches(Operands(1 << 40, 2, 3, 0, 4), Scalars(0.5, 2.0))
        assert count == 3
        fields = _ARGS.unpack(params)
        assert fields[:4] == (1 << 40, 2, 3, 4)
        assert fields[-2:] == (0.5, 2.0)

    @pytest.mark.parametrize("batch", [1, MAX_GRID_Z + 2])
    def test_a_bound_launch_hands_the_driver_what_capture_describes(self, batch, monkeypatch):
        """Without a GPU: the driver's function is replaced by one that reads the parameter buffer as it does."""
        driver = pytest.importorskip("cuda.bindings.driver")
        problem = Problem.of(70, 33, 5, "fp32", majors="tt", batch=batch, epilogue=Epilogue("fp16"))
        kernel = BACKEND.build(problem.signature, parse("async_copy"), H200)
        seen = []

        def launch(function, gx, gy, gz, bx, by, bz, smem, stream, slots, extra):
            address = ctypes.c_void_p.from_address(slots).value
            seen.append((function, (gx, gy, gz), (bx, by, bz), smem, stream, ctypes.string_at(address, _ARGS.size)))
            return (0,)

        monkeypatch.setattr(driver, "cuLaunchKernel", launch)
        monkeypatch.setattr(kernel, "_function", lambda smem: "function")
        run = kernel.bind(problem)
        for operands, scalars, stream in (
            (Operands(1 << 47, 2, 3, 0, 5), Scalars(0.5, -2.0), 77),
            (Operands(10, 20, 30, 0, 50), Scalars(1.0, 0.0), 78),
        ):
            seen.clear()
            run(operands, scalars, stream)
            wanted = kernel.capture(problem, operands, scalars)
            assert [("function", w.grid, w.block, w.dynamic_smem, stream, w.params) for w in wanted] == seen

    def test_a_failing_launch_says_which_kernel(self, monkeypatch):
        driver = pytest.importorskip("cuda.bindings.driver")
        problem = Problem.of(8, 8, 8, "fp32", majors="tt")
        kernel = BACKEND.build(problem.signature, parse("naive"), H200)
        monkeypatch.setattr(driver, "cuLaunchKernel", lambda *a: (driver.CUresult.CUDA_ERROR_INVALID_VALUE,))
        monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (0, b"invalid argument"))
        monkeypatch.setattr(kernel, "_function", lambda smem: "function")
        with pytest.raises(GemmError, match=r"launching naive/bm32/bn32 failed: .*invalid argument"):
            kernel.bind(problem)(Operands(1, 2, 0, 0, 3), Scalars(), 0)

    def test_another_problem_is_refused(self):
        problem = Problem.of(8, 8, 8, "fp32", majors="tt")
        kernel = BACKEND.build(problem.signature, parse("naive"), H200)
        with pytest.raises(ValueError, match="cannot run"):
            kernel.capture(Problem.of(8, 8, 8, "fp32", majors="nn"), Operands(1, 2, 0, 0, 3), Scalars())

    def test_batches_beyond_the_grid_limit_are_split(self):
        problem = Problem.of(2, 2, 2, "fp16", batch=2 * MAX_GRID_Z + 5)
        geometry = Geometry.of(problem, parse("wmma_naive"))
        launches = [
            (count, _ARGS.unpack(p)[0]) for count, p in geometry.launches(Operands(1000, 0, 0, 0, 0), Scalars())
        ]
        assert launches == [(MAX_GRID_Z, 1000), (MAX_GRID_Z, 1000 + MAX_GRID_Z * 8), (5, 1000 + 2 * MAX_GRID_Z * 8)]

    @pytest.mark.parametrize("shape", [(0, 5, 5), (5, 0, 5)])
    def test_empty_results_launch_nothing(self, shape):
        assert Geometry.of(Problem.of(*shape, "fp32"), parse("naive")).chunks == ()


class TestBuild:
    def test_missing_headers_say_what_to_install(self, monkeypatch, tmp_path):
        build.include_paths.cache_clear()
        monkeypatch.setattr(build, "_header_roots", lambda: [tmp_path])
        try:
            with pytest.raises(GemmError, match=r"pip install nvidia-cuda-runtime .*Looked in"):
                build.include_paths()
        finally:
            build.include_paths.cache_clear()

    def test_compiler_errors_carry_the_log(self):
        with pytest.raises(GemmError, match=r"could not compile nothing<1>(?s:.*)error"):
            build._compile("nothing<1>", "common.cuh", "sm_80")

    def test_a_kernel_is_compiled_once_and_kept(self, store_root, monkeypatch):
        signature = Problem.of(8, 8, 8, "fp32", majors="tt").signature
        first = build.compiled(signature, parse("naive"), H200)
        assert "_Z5naive" in first.symbol
        assert f".entry {first.symbol}(" in first.ptx
        assert first.cubin[:4] == b"\x7fELF"
        monkeypatch.setattr(build, "_compile", lambda *a: pytest.fail("compiled again"))
        assert build.compiled(signature, parse("naive"), H200) == first

    def test_a_changed_source_is_not_found_in_the_store(self, store_root, monkeypatch):
        signature = Problem.of(8, 8, 8, "fp32", majors="tt").signature
        build.compiled(signature, parse("naive"), H200)
        monkeypatch.setattr(build, "source_fingerprint", lambda: "another")
        monkeypatch.setattr(build, "_compile", lambda *a: (_ for _ in ()).throw(GemmError("asked to compile")))
        with pytest.raises(GemmError, match="asked to compile"):
            build.compiled(signature, parse("naive"), H200)

    @pytest.mark.parametrize("rung", ["padded", "async_copy", "warp_tile", "warp_tile_async", "wmma_double_buffer"])
    def test_no_registers_are_spilled(self, rung):
        problem = Problem.of(64, 64, 64, RUNGS[rung].dtypes[0], majors="tt")
        (entry,) = usage(BACKEND.build(problem.signature, parse(rung), H200).cubin)
        assert entry.stack == 0, f"{entry.stack} bytes of local memory a thread"

    def test_invalid_for_the_signature(self):
        with pytest.raises(ValueError, match="not valid for"):
            build.compiled(BF16.signature, parse("naive"), H200)
