"""What a sweep begins with: today's choice, and earlier winners of this shape and of nearby ones."""

from __future__ import annotations

from cutegemm import backend as backends
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.tuner import run as sweep_run
from cutegemm.winners import Measurement, Winners
from cutegemm.winners.fingerprint import fingerprint
from tests.tuning_fakes import H200


def test_seeds_are_todays_choice_and_earlier_winners(tmp_path, monkeypatch):
    problem = Problem.of(256, 256, 256, "bf16")
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    store = Winners()
    fast, slow, gone = "sm80/64x64x32/w32x32/s5/g8", "sm80/64x32x32/w32x16/s5/g8", "sm80/63x1x1/w9x9/s5/g8"
    for config, ratio in ((slow, 0.5), (fast, 0.9), (gone, 2.0), ("nonsense", 3.0)):
        store.record(Measurement("H200", 132, str(problem), "cute", config, "old sources", 1e-5, "ok",
                                 reference_seconds=ratio * 1e-5))  # fmt: skip
    found = sweep_run.seeds(problem, H200, store, ["cute"])
    assert [seed.text for seed in found[1:]] == [fast, slow]
    assert backends.get("cute").check(found[0].config, problem, H200) is None
    assert sweep_run.seeds(problem, H200, store, ["legacy"]) == found[:1]
    # A fresh winner is what gemm takes today.
    store.record(Measurement("H200", 132, str(problem), "cute", slow, fingerprint("cute", slow), 1e-5, "ok"))
    assert sweep_run.seeds(problem, H200, store, ["cute"])[0].text == slow


def test_with_a_constant_operand_todays_choice_has_the_ring_that_gemm_gives_it(tmp_path, monkeypatch):
    """The sweep began with the ring for calls without the promise, and could end with a slower winner than none."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sweep_run.winners_table, "shipped", lambda *where: {})
    store, plain = Winners(), Problem.of(16, 4096, 4096)
    text = "sm90/64x16x128/coop1/c1x1/s5/row/swap/pdl"
    store.record(Measurement("H200", 132, str(plain), "cute", text, fingerprint("cute", text), 1e-5, "ok"))
    assert sweep_run.seeds(plain, H200, store, ["cute"])[0].text == text
    found = sweep_run.seeds(Problem.of(16, 4096, 4096, constant="b"), H200, store, ["cute"])
    assert found[0].text == text.replace("s5", "s11")


def test_seeds_from_the_other_16_bit_type_and_from_near(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sweep_run.winners_table, "shipped", lambda *where: {})
    store = Winners(tmp_path / "elsewhere.sqlite3")
    texts = ["sm80/64x64x32/w32x32/s5/g8", "sm80/64x32x32/w32x16/s5/g8", "sm80/128x128x32/w64x64/s4/g8"]
    where = [(256, 256, 256, "bf16"), (256, 384, 256, "fp16"), (4096, 4096, 4096, "fp16")]
    for text, (m, n, k, dtype) in zip(texts, where, strict=True):
        problem = Problem.of(m, n, k, dtype)
        store.record(Measurement("H200", 132, str(problem), "cute", text, fingerprint("cute", text), 1e-5, "ok",
                                 reference_seconds=1e-5))  # fmt: skip
    found = sweep_run.seeds(Problem.of(256, 256, 256, "fp16"), H200, store, ["cute"])
    assert [seed.text for seed in found[1:]] == texts[:2]
    turned = Problem.of(256, 256, 256, "fp16", majors="nt")
    assert [seed.text for seed in sweep_run.seeds(turned, H200, store, ["cute"])[1:]] == texts[:1]
    assert sweep_run.seeds(Problem.of(256, 256, 256, "fp16", batch=2), H200, store, ["cute"])[1:] == []


def test_seeds_from_other_majors_whose_operands_are_aligned_otherwise(tmp_path, monkeypatch):
    """B of 256 x 100 is aligned to 16 bytes where K is contiguous, to 8 where N is."""
    monkeypatch.setenv("CUTEGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sweep_run.winners_table, "shipped", lambda *where: {})
    fused = Epilogue("bf16", "fp32", "n", "relu")
    text = "sm80/64x64x32/w32x32/s5/g8"
    for epilogue in (Epilogue(), fused):
        tn, tt = (Problem.of(256, 100, 256, "bf16", majors=majors, epilogue=epilogue) for majors in ("tn", "tt"))
        assert (tn.signature.align_b, tt.signature.align_b) == (16, 8)
        for known, asked in ((tt, tn), (tn, tt)):
            store = Winners(tmp_path / f"{known}{epilogue}".replace("/", ""))
            store.record(Measurement("H200", 132, str(known), "cute", text, fingerprint("cute", text), 1e-5, "ok",
                                     reference_seconds=1e-5))  # fmt: skip
            assert [seed.text for seed in sweep_run.seeds(asked, H200, store, ["cute"])[1:]] == [text]
            other = Problem.of(256, 100, 256, "fp16", majors="nn")
            found = [seed.text for seed in sweep_run.seeds(other, H200, store, ["cute"])[1:]]
            assert found == ([text] if epilogue == Epilogue() else [])
