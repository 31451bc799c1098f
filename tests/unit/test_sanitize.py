"""The problems that compute-sanitizer watches: configurations that became invalid must not leave the list unnoticed."""

from collections import Counter

import pytest

from cutegemm import backend
from cutegemm.hardware import arch
from tests.gpu import sanitize, sanitize_groups
from tests.groups import WORKS


def test_every_configuration_serves_ragged_problems_of_the_list():
    served: Counter[str] = Counter()
    for case, config in sanitize.cases("cpu", hopper=True):
        assert backend.get("cute").parse(config).why_invalid(case.problem().signature, arch.get("sm_90a")) is None
        served[config] += any(size % 32 for size in (*case.a.shape, case.b.shape[1]))
    named = {text for texts in sanitize.CONFIGS.values() for text in texts}
    assert {config for config in served if not config.startswith("sm90")} == named
    assert min(served.values()) >= 1
    assert {config.split("/")[0] for config in served} == {"simt", "vector", "sm80", "dmma", "sm90"}


def test_every_work_of_groups_is_watched_in_each_family():
    served = Counter((config.split("/")[0], case.work) for case, config in sanitize_groups.cases("cpu"))
    assert set(served) == {(family, work) for family in ("sm80", "simt", "sm90") for work in WORKS}
    named = {config for _, config in sanitize_groups.cases("cpu")}
    listed = {config for configs in sanitize_groups.CONFIGS.values() for config in configs}
    others = sanitize_groups.HALVES, sanitize_groups.SWAPPED, sanitize_groups.SWAPPED_BYTES, sanitize_groups.IN_FP32
    assert named == listed.union(*others)
    kinds = Counter(
        (config.split("/")[0], case.work, bool(case.operands), case.epilogue is not None)
        for case, config in sanitize_groups.cases("cpu")
        if case.a.element_size() > 1
    )
    kinds_of_a_work = ((True, True), (False, True), (False, False))
    wanted = {
        (family, work, *kind) for family in ("sm80", "simt", "sm90") for work in WORKS for kind in kinds_of_a_work
    }
    assert not wanted - set(kinds)


@pytest.mark.slow
def test_mixtures_that_are_watched_are_right():
    for check in sanitize_groups.mixtures("cpu"):
        check()
