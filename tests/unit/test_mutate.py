"""Mutations of PTX text, and the accounting of survivors."""

import pytest

from cutegemm.emulator.errors import NoProgress
from cutegemm.emulator.mutate import mutations
from tests.mutation_verdicts import Case, Outcome, Survivor, check_unchanged, compare, judge, read_survivors

PTX = """
.version 8.0
.target sm_90a
.entry bar_sync_in_a_name(.param .u64 p) {
    // bar.sync 0; in a comment /* is none */
    ld.param.u64 %rd1, [p];
    cp.async.cg.shared.global [%r1], [%rd1], 16;
    cp.async.commit_group;
    cp.async.wait_group 2;
    @%p1 bar.sync 0;
    bar.sync 1, 128;
    bar.sync 0;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.init.shared.b64 [%r2+8], %r7;
    { .reg .pred P1;
    LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r111], %r640, 10000000;
    @P1 bra DONE; bra LAB_WAIT;
    DONE: }
    @%p2 mbarrier.arrive.expect_tx.shared.b64 %rd10, [%r21], %r114;
    mbarrier.arrive.shared::cluster.b64 _, [%r382], %r384;
    cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4}], [%r5];
    fence.proxy.async.shared::cta;
    wgmma.wait_group.sync.aligned 1;
    barrier.cluster.arrive.aligned;
    griddepcontrol.wait;
    setmaxnreg.inc.sync.aligned.u32 \t232;
    ld.global.acquire.gpu.b32 %r1, [%rd2];
    st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};
}
"""


def broken_line(mutation):
    return mutation.ptx.split("\n")[mutation.line - 1].strip()


def test_every_way_of_breaking_a_kernel():
    got = [(m.site, m.change, broken_line(m)) for m in mutations(PTX)]
    assert got == [
        ("cp.async.commit_group #1", "delete", ""),
        ("cp.async.wait_group 2 #1", "wait 1 more", "cp.async.wait_group 3;"),
        ("cp.async.wait_group 2 #1", "delete", ""),
        ("@% bar.sync 0 #1", "delete", ""),
        ("bar.sync 1, 128 #1", "delete", ""),
        ("bar.sync 0 #1", "delete", ""),
        ("mbarrier.init.shared.b64 [%], 1 #1", "delete", ""),
        (
            "mbarrier.init.shared.b64 [%], 1 #1",
            "expect 1 arrival fewer",
            "{ .reg .b32 %mutant; mov.u32 %mutant, 0; mbarrier.init.shared.b64 [%r1], %mutant; }",
        ),
        ("mbarrier.init.shared.b64 [%+8], % #1", "delete", ""),
        (
            "mbarrier.init.shared.b64 [%+8], % #1",
            "expect 1 arrival fewer",
            "{ .reg .b32 %mutant; sub.u32 %mutant, %r7, 1; mbarrier.init.shared.b64 [%r2+8], %mutant; }",
        ),
        (
            "mbarrier.try_wait.parity.shared.b64 P1, [%], %, 10000000 #1",
            "do not wait",
            "LAB_WAIT: setp.eq.u32 P1, 0, 0;",
        ),
        (
            "@% mbarrier.arrive.expect_tx.shared.b64 %, [%], % #1",
            "16 bytes fewer",
            "{ .reg .b32 %mutant; sub.u32 %mutant, %r114, 16; "
            "@%p2 mbarrier.arrive.expect_tx.shared.b64 %rd10, [%r21], %mutant; }",
        ),
        (
            "@% mbarrier.arrive.expect_tx.shared.b64 %, [%], % #1",
            "expect no bytes",
            "@%p2 mbarrier.arrive.shared.b64 %rd10, [%r21];",
        ),
        ("@% mbarrier.arrive.expect_tx.shared.b64 %, [%], % #1", "delete", ""),
        ("mbarrier.arrive.shared::cluster.b64 _, [%], % #1", "delete", ""),
        ("fence.proxy.async.shared::cta #1", "delete", ""),
        ("wgmma.wait_group.sync.aligned 1 #1", "wait 1 more", "wgmma.wait_group.sync.aligned 2;"),
        ("wgmma.wait_group.sync.aligned 1 #1", "delete", ""),
        ("barrier.cluster.arrive.aligned #1", "delete", ""),
        ("barrier.cluster.arrive.aligned #1", "relaxed", "barrier.cluster.arrive.relaxed.aligned;"),
        ("griddepcontrol.wait #1", "delete", ""),
        ("setmaxnreg.inc.sync.aligned.u32 232 #1", "delete", ""),
        ("setmaxnreg.inc.sync.aligned.u32 232 #1", "8 registers more", "setmaxnreg.inc.sync.aligned.u32 240;"),
        (
            "setmaxnreg.inc.sync.aligned.u32 232 #1",
            "not in the first warp",
            "{ .reg .pred %mutant; .reg .b32 %place; mov.u32 %place, %tid.x; and.b32 %place, %place, 96; "
            "setp.ne.u32 %mutant, %place, 0; @%mutant setmaxnreg.inc.sync.aligned.u32 232; }",
        ),
        ("ld.global.acquire.gpu.b32 %, [%] #1", "relaxed", "ld.global.relaxed.gpu.b32 %r1, [%rd2];"),
    ]


def test_a_mutation_changes_one_line_and_no_other():
    lines = PTX.split("\n")
    for mutation in mutations(PTX):
        changed = mutation.ptx.split("\n")
        assert len(changed) == len(lines)
        assert [i + 1 for i, pair in enumerate(zip(lines, changed, strict=True)) if pair[0] != pair[1]] == [
            mutation.line
        ]


def test_sites_survive_renumbered_registers_and_moved_lines():
    moved = "\n\n" + PTX.replace("%r1", "%r91")
    assert [(m.site, m.change) for m in mutations(moved)] == [(m.site, m.change) for m in mutations(PTX)]


def test_groups_that_are_always_empty_are_left_out():
    without = PTX.replace("cp.async.cg.shared.global [%r1], [%rd1], 16;", "")
    left_out = {m.site for m in mutations(PTX)} - {m.site for m in mutations(without)}
    assert left_out == {"cp.async.commit_group #1", "cp.async.wait_group 2 #1"}
    bulk = PTX + "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    assert {m.site for m in mutations(bulk)} > {"cp.async.bulk.commit_group #1", "cp.async.bulk.wait_group 0 #1"}


def _case(run):
    return Case("case", PTX, (run,))


def test_what_notices_is_named():
    first = mutations(PTX)[0]

    def wrong_under_seed_3(ptx, seed):
        return "element (0, 0) is 1, expected 2" if seed == 3 and ptx != PTX else None

    outcome = judge(_case(wrong_under_seed_3), first, range(5))
    assert (outcome.killer, outcome.seed, outcome.said) == ("wrong result", 3, "element (0, 0) is 1, expected 2")

    def stuck(ptx, seed):
        raise NoProgress("warp 3 waits\nsecond line")

    outcome = judge(_case(stuck), first, range(5))
    assert (outcome.killer, outcome.seed, outcome.said) == ("NoProgress", 0, "warp 3 waits")
    assert not judge(_case(lambda ptx, seed: None), first, range(5)).killed
    unreached = judge(_case(stuck), first, range(5), reached=frozenset({1}))
    assert not unreached.killed
    assert not unreached.reached


def test_errors_that_are_not_findings_pass():
    def defect(ptx, seed):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        judge(_case(defect), mutations(PTX)[0], range(2))


def test_a_kernel_that_is_wrong_unchanged_cannot_be_scored():
    with pytest.raises(RuntimeError, match="seed 0: the unchanged kernel is wrong: all zero"):
        check_unchanged(_case(lambda ptx, seed: "all zero"), range(2))


def test_the_table_and_the_outcomes_must_agree():
    noticed = {"fence.proxy.async.shared::cta;", "bar.sync 1, 128;"}

    def run(ptx, seed):
        return None if all(text in ptx for text in noticed) else "wrong"

    broken = [m for m in mutations(PTX) if m.site.startswith(("fence", "bar.sync", "griddep"))]
    outcomes = [judge(_case(run), each, range(2)) for each in broken]
    assert [o.killed for o in outcomes] == [True, False, True, False]
    problems = compare(outcomes, [])
    assert len(problems) == 2
    assert "unexplained survivor: case: line 12: bar.sync 0; -> delete" in problems[0]
    rows = [
        Survivor("case", "bar.sync 0 #1", "delete", "equivalent", "another barrier follows at once"),
        Survivor("case", "griddepcontrol.wait #1", "delete", "model", "one launch alone depends on none"),
        Survivor("case", "bar.sync 1, 128 #1", "delete", "equivalent", "but it is killed by now"),
        Survivor("other", "bar.sync 0 #1", "delete", "equivalent", "a case that was not run"),
    ]
    assert compare(outcomes, rows) == [
        "stale row: case: bar.sync 1, 128 #1 -> delete: nothing that survives",
        "stale row: other: bar.sync 0 #1 -> delete: nothing that survives",
    ]
    assert len(compare(outcomes, rows, complete=False)) == 1
    assert not compare(outcomes, rows[:2])


def test_a_star_in_a_row_stands_for_any_text():
    outcomes = [Outcome("cute-a", mutation, None) for mutation in mutations(PTX) if "[%]" in mutation.site]
    assert len(outcomes) == 8
    row = Survivor("cute-*", "*[%*]*", "*", "model", "any access to a barrier")
    assert not compare(outcomes, [row])
    assert len(compare(outcomes, [Survivor("cute", "*", "*", "model", "any access to a barrier")])) == 9
    assert len(compare(outcomes, [Survivor("*", "mbarrier.init*", "*", "model", "any access to a barrier")])) == 6


def test_a_row_needs_a_verdict_and_a_reason():
    row = {"case": "c", "site": "bar.sync 0 #1", "change": "delete", "verdict": "equivalent", "reason": "a b c d"}
    assert read_survivors({"survivor": [row]}) == [Survivor(**row)]
    for wrong in ({"verdict": "fine"}, {"reason": "because"}):
        with pytest.raises(ValueError, match="needs a verdict"):
            read_survivors({"survivor": [{**row, **wrong}]})


def test_an_outcome_prints_its_line():
    outcome = Outcome("case", mutations(PTX)[1], None)
    assert str(outcome.mutation) == "line 9: cp.async.wait_group 2; -> wait 1 more"
