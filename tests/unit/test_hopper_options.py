"""The table of a Hopper configuration's options: everything that derives from its rows agrees with them."""

from __future__ import annotations

import dataclasses
import random
import re
from itertools import combinations, product
from pathlib import Path

import pytest

import cutegemm
from cutegemm.choice.footprint import Footprint
from cutegemm.cute import BACKEND
from cutegemm.cute.hopper import config as config_module
from cutegemm.cute.hopper.config import CLUSTERS, SWAPPED_TILES, HopperConfig
from cutegemm.cute.hopper.options import (
    FITTED_TRIALS,
    HALF_TRIALS,
    NAMES,
    OPTIONS,
    PART_TRIALS,
    SETTINGS,
    TRIALS,
    TWIN_PART_TRIALS,
    TWIN_TRIALS,
    read,
)
from cutegemm.hardware import arch
from cutegemm.problem import Problem
from cutegemm.problem.epilogue import Epilogue
from cutegemm.problem.program.simplify import simplified
from cutegemm.problem.program.text import parse

H200 = arch.get("H200")
SIGNATURE = Problem.of(4096, 4096, 4096, "bf16").signature
OF_BYTES = Problem.of(4096, 4096, 4096, "e4m3").signature
PLAIN = HopperConfig.parse("sm90/128x128x64/coop2/c1x1/s3/row")
FOLDER = Path(config_module.__file__).parent
DATA = Path(cutegemm.__file__).parent / "data"
ROWS = {row.name: row for row in (*SETTINGS, *OPTIONS)}
FORBIDDEN = {
    frozenset((row.name, other)): exclusion.reason
    for row in ROWS.values()
    for exclusion in row.excludes
    for other in exclusion.others
}
"""The reason why two rows cannot be combined."""
WITHOUT_OPTIONS = [
    dataclasses.replace(PLAIN, schedule=schedule, cluster=cluster, splits=splits, cluster_k=cluster_k)
    for schedule, cluster, splits, cluster_k in product(("coop2", "pp", "solo"), ((1, 1), (2, 1)), (1, 2), (1, 2))
    if not (schedule == "pp" and splits > 1)  # the rule of `splits` says so, whatever the options
]


def with_options(config: HopperConfig, *names: str) -> HopperConfig:
    options = read(names)
    assert options is not None
    return dataclasses.replace(config, options=options)


def held(config: HopperConfig) -> list[str]:
    """The names of the rows that apply to a configuration."""
    return [name for name, row in ROWS.items() if row.holds(config)]


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_every_option_is_explained_and_accepted(option):
    assert re.fullmatch("[a-z]+", option.name), "the text form's pattern reads lower-case letters"
    assert len(option.help) > 20
    assert option.name in HopperConfig.form().split("options ")[1].split(", ")
    explained = " ".join(config_module.__doc__.split())
    assert f" {option.name} {option.help}" in explained


def test_the_kernel_reads_every_option_of_the_table_and_no_other():
    """A row that nothing reads would change nothing, and a name without a row is never there."""
    sources = [path.read_text() for path in FOLDER.glob("*.py") if path.name != "options.py"]
    found = {name for text in sources for name in re.findall(r'"(\w+)" (?:not )?in [a-z.]*\boptions\b', text)}
    assert found == set(NAMES)


def test_names_are_unique():
    assert len(ROWS) == len(SETTINGS) + len(OPTIONS)
    assert set(NAMES) <= set(ROWS)


def test_every_exclusion_is_between_rows_of_the_table_and_stated_once():
    stated = [
        frozenset((row.name, other))
        for row in ROWS.values()
        for exclusion in row.excludes
        for other in exclusion.others
    ]
    assert len(stated) == len(set(stated)) == len(FORBIDDEN) > 10
    for pair in stated:
        assert len(pair) == 2, f"{pair}: a row that excludes itself"
        assert pair <= set(ROWS)


def test_the_rule_of_validity_says_what_the_table_says():
    """All sets of up to four options, in every combination of settings."""
    refused = set()
    for config in WITHOUT_OPTIONS:
        for names in (names for count in range(5) for names in combinations(NAMES, count)):
            asked = with_options(config, *names)
            reasons = {
                FORBIDDEN[frozenset(pair)] for pair in combinations(held(asked), 2) if frozenset(pair) in FORBIDDEN
            }
            why = asked.why_invalid(SIGNATURE, H200)
            if "fit" in names:  # for groups: tests/emulated/test_grouped.py
                assert why is not None
                continue
            if {"twin", "half"} & set(names):  # for sums of fp8 that are promoted after each k tile
                assert why is not None
                why = dataclasses.replace(asked, bn=64, bk=128).why_invalid(OF_BYTES, H200)
            assert (why in reasons) if reasons else why is None, str(asked)
            refused |= {why} - {None}
    assert refused == set(FORBIDDEN.values())


def test_each_setting_is_met():
    """Else the test above would say nothing about it."""
    assert {name for config in WITHOUT_OPTIONS for name in held(config)} == {setting.name for setting in SETTINGS}


def test_options_are_read_in_any_order_and_written_in_that_of_the_table():
    rng = random.Random(3)
    for count in range(len(NAMES) + 1):
        names = rng.sample(NAMES, count)
        parsed = HopperConfig.parse("/".join((str(PLAIN), *names)))
        assert parsed == with_options(PLAIN, *names)
        assert str(parsed) == "/".join((str(PLAIN), *(name for name in NAMES if name in names)))
        assert HopperConfig.parse(str(parsed)) == parsed


@pytest.mark.parametrize("names", ["pdl/pdl", "twice", "zig/pdl/twice", "swap/zig/swap"])
def test_unknown_and_repeated_options_are_refused_with_those_that_are_accepted(names):
    assert read(names.split("/")) is None
    with pytest.raises(ValueError, match=f"accepted is .* options {', '.join(NAMES)}"):
        HopperConfig.parse(f"{PLAIN}/{names}")


def test_the_texts_of_the_shipped_tables_stay_as_they_are():
    texts = {text for path in DATA.glob("*.json") for text in re.findall(r'sm90/\d[^"\s,]*', path.read_text())}
    assert len(texts) > 100
    assert {str(HopperConfig.parse(text)) for text in texts} == texts


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_an_option_sets_its_field_of_the_footprint_and_no_other_options(option):
    flags = [row.footprint for row in OPTIONS if row.footprint]
    assert len(set(flags)) == len(flags)
    assert all(field.type == "bool" for field in dataclasses.fields(Footprint) if field.name in flags)
    config = PLAIN if option.name != "arrival" else dataclasses.replace(PLAIN, splits=2)
    for names, expected in (((), set()), ((option.name,), {option.footprint} - {None})):
        seen = BACKEND.footprint(with_options(config, *names), SIGNATURE, H200)
        assert {name for name in flags if getattr(seen, name)} == expected


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_lessons_and_given_up_determinism_are_only_for_calls_that_name_them(option):
    why = BACKEND.only_by_name(with_options(PLAIN, option.name))
    assert (why is not None) == (option.lesson or option.only_by_name is not None)
    assert why is None or repr(option.name) in why


@pytest.mark.parametrize("config", WITHOUT_OPTIONS, ids=str)
def test_settings_that_are_lessons_are_only_for_calls_that_name_them(config):
    lessons = [setting.name for setting in SETTINGS if setting.lesson and setting.holds(config)]
    why = BACKEND.only_by_name(config)
    assert (why is not None) == bool(lessons) == config.solo
    assert all(repr(name) in why for name in lessons)


@pytest.mark.parametrize(
    ("itemsize", "signature", "trials"),
    [
        (2, SIGNATURE, (*TRIALS, *PART_TRIALS, *FITTED_TRIALS)),
        (1, OF_BYTES, (*TRIALS, *PART_TRIALS, *TWIN_TRIALS, *TWIN_PART_TRIALS, *HALF_TRIALS)),
    ],
)
def test_the_tuner_tries_sets_that_anyone_may_get_and_that_are_valid_somewhere(itemsize, signature, trials):
    sets = [names for trial in trials for names in trial.sets]
    kinds = signature, dataclasses.replace(signature, work="ragged_m")
    valid = {
        c.options for c in HopperConfig.space(itemsize) if any(c.why_invalid(kind, H200) is None for kind in kinds)
    }
    for names in sets:
        options = read(names.split("/"))
        assert "/".join(options or ()) == names, "in the order of the text form"
        assert options in valid
        assert not any(ROWS[name].lesson or ROWS[name].only_by_name for name in options)
    assert {c.options for c in HopperConfig.space(itemsize)} == {tuple(names.split("/")) for names in sets}
    for trial in trials:
        assert 1 <= trial.clusters <= len(CLUSTERS)


def test_tiles_with_odd_eights_of_columns_are_tried_with_swapped_operands_where_they_are_valid():
    """A box of D has up to 64 rows there, as many as divide the tile's and are a multiple of 8."""
    boxes = {8: 8, 24: 24, 40: 40, 56: 56, 72: 24, 88: 8, 104: 8, 120: 40, 168: 56, 216: 24}
    for bn, rows in boxes.items():
        config = HopperConfig.parse(f"sm90/64x{bn}x64/coop1/c1x1/s3/serp8/swap/pdl")
        assert config.why_invalid(SIGNATURE, H200) is None
        assert config.uses_tma_store(SIGNATURE)
        assert config.store_columns(2, SIGNATURE) == rows
    tried = [config for config in HopperConfig.space() if config.bn % 16]
    assert {(config.bm, config.bn) for config in tried} == set(SWAPPED_TILES)
    assert all(config.swapped and boxes[config.bn] >= min(config.bn, 24) for config in tried)
    valid = {(config.bm, config.bn) for config in tried if config.why_invalid(SIGNATURE, H200) is None}
    assert valid == set(SWAPPED_TILES)
    problem = Problem.of(8, 4096, 4096, "bf16")
    split = [config for config in HopperConfig.split_space(problem, H200) if config.bn % 16]
    assert any(config.why_invalid(SIGNATURE, H200) is None for config in split)
    refused = ("e4m3", "int8", "fp32")
    for dtype in refused:
        signature = Problem.of(64, 64, 64, dtype, precision="tf32" if dtype == "fp32" else "ieee").signature
        assert all(config.why_invalid(signature, H200) for config in tried[:200])
    with_c = Problem.of(64, 64, 64, "bf16", epilogue=Epilogue(c_dtype="bf16")).signature
    assert "no matrix operand" in (tried[0].why_invalid(with_c, H200) or "")
    gated = simplified(parse("def epilogue(gate: halves[0], up: halves[1]): return gate * up"))
    with_gate = Problem.of(64, 64, 64, "bf16", epilogue=Epilogue(custom=gated)).signature
    assert "no gate and up" in (tried[0].why_invalid(with_gate, H200) or "")
    in_groups = dataclasses.replace(SIGNATURE, work="ragged_m")
    assert "no group's" in (tried[0].why_invalid(in_groups, H200) or "")


@pytest.mark.parametrize("bn", [4, 12, 20, 264])
def test_columns_that_no_wgmma_has_are_refused(bn):
    config = HopperConfig.parse(f"sm90/64x{bn}x64/coop1/c1x1/s3/serp8/swap")
    assert "accepted are multiples of 8 up to 256" in (config.why_invalid(SIGNATURE, H200) or "")
