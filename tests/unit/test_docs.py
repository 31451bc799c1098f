"""The pages: links lead somewhere, code compiles and runs where it says so, commands, paths and variables exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from cutegemm.cute.hopper import options
from cutegemm.winners import table
from tests.unit.conftest import SHIPPED
from tuning import command

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "cutegemm/cutlass2x/README.md", ROOT / "legacy_cuda/README.md",
)  # fmt: skip
RUNS = "<!-- runs on CPU -->\n"
"""Stands before a code block that a machine without a GPU runs as a program of its own."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
_INDENTED = re.compile(r"^    (?:[A-Z_]+=\S+ )*(python|cutegemm|make|compute-sanitizer|pytest) .*$", re.MULTILINE)

_PATH = re.compile(r"(?<![\w./])(?:tests|tuning|cutegemm|legacy_cuda|docs)/[\w./*-]+")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    texts = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def wrong_links(page: Path) -> list[str]:
    """Those relative links of a page that lead to no file, or to no heading of a page."""
    wrong = []
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and (file.suffix != ".md" or anchor not in headings(file))):
            wrong.append(target)
    return wrong


def code(page: Path) -> list[str]:
    return [text for language, text in _FENCE.findall(page.read_text()) if language == "python"]


def marked(page: Path) -> list[str]:
    """The blocks of a page that run on a CPU."""
    text = page.read_text()
    found = [_FENCE.match(text, start.end()) for start in re.finditer(re.escape(RUNS), text)]
    assert None not in found, f"{name(page)}: {RUNS.strip()} stands before something else than a code block"
    return [block[2] for block in found if block]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line that begins with `python -m` or `cutegemm`: blocks, and code within a line."""
    text = page.read_text()
    fenced = [line for language, block in _FENCE.findall(text) if not language for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    for line in (*fenced, *(found[0].strip() for found in _INDENTED.finditer(text)), *inline):
        words = shlex.split(line.replace("'", ""), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words.pop(0)
        if words[:2] == ["python", "-m"] or (words[:1] == ["cutegemm"] and len(words) > 1):
            yield words


def wrong_commands(page: Path) -> list[str]:
    """Those commands of a page whose module, or whose tool of `cutegemm`, is not there."""
    wrong = []
    for words in commands(page):
        known = words[1] in command.TOOLS or words[1] == "--help" if words[0] == "cutegemm" else exists(words[2])
        if not known:
            wrong.append(" ".join(words))
    return wrong


def wrong_paths(page: Path) -> list[str]:
    """Those paths in code, from the root of the repository and perhaps with wildcards, at which nothing lies."""
    text = page.read_text()
    blocks = [*re.findall(r"`([^`\n]+)`", _FENCE.sub("", text)), *(line[0] for line in _INDENTED.finditer(text))]
    return [path for block in blocks for path in _PATH.findall(block) if not any(ROOT.glob(path.rstrip("./")))]


def variables(files: Iterable[Path]) -> set[str]:
    """The environment variables of ours that files name."""
    return {found for file in files for found in re.findall(r"CUTEGEMM_[A-Z][A-Z_]*[A-Z]", file.read_text())}


def exists(module: str) -> bool:
    """Whether `python -m module` finds something to run."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return False
    if spec is not None and spec.submodule_search_locations is not None:
        return exists(f"{module}.__main__")
    return spec is not None


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 170


def test_readme_leads_to_every_page():
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in _LINK.findall((ROOT / "README.md").read_text())}
    assert [name(page) for page in PAGES[1:] if page not in linked] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_a_file_or_heading(page):
    assert wrong_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_compiles(page):
    for block in code(page):
        ast.parse(block, name(page))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page):
    assert wrong_commands(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_stands_behind_a_command_is_a_comment(page):
    """So that a line can be copied into a shell as it is."""
    lines = (found[0] for found in _INDENTED.finditer(page.read_text()))
    assert [line for line in lines if re.search(r"\S {3,}[^# ]", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page):
    assert wrong_paths(page) == []


def test_every_environment_variable_is_in_the_table_of_trust_and_every_page_names_real_ones():
    sources = [path for folder in ("cutegemm", "legacy_cuda", "tuning") for path in (ROOT / folder).rglob("*.py")]
    read = variables([*sources, ROOT / "tests/conftest.py"])
    table = set(re.findall(r"^\| `(CUTEGEMM_\w+)` \|", (ROOT / "docs/trust.md").read_text(), re.MULTILINE))
    assert table == read
    assert variables(PAGES) <= read


def test_the_pages_count_the_shipped_winners():
    shipped = [
        len({row.problem for row in table.load((SHIPPED / f"winners-{gpu}.json").read_text())})
        for gpu in ("h200", "h100-sxm")
    ]
    readme, tuning = ((ROOT / page).read_text() for page in ("README.md", "docs/tuning.md"))
    (said,) = re.findall(r"winners \((\d+) problems on an H200, (\d+) on an H100\)", readme)
    assert [int(count) for count in said] == shipped
    _, _, shown = tuning.partition("The tables shipped in")
    assert [int(count) for count in re.findall(r"(\d+) problems;", shown)] == shipped


def test_the_options_of_a_hopper_configuration_are_in_the_table_of_its_page():
    page = (ROOT / "docs/hopper.md").read_text()
    _, _, section = page.partition("## A configuration's text\n")
    rows = re.findall(r"^\| (`.*?`) \| ", section.partition("\n## ")[0], re.MULTILINE)
    assert set(options.NAMES) <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_marked_code_runs_without_a_gpu(tmp_path):
    """In a folder of its own, in one process: each block imports what it needs, and is compiled as its page."""
    pytest.importorskip("llvmlite")
    blocks = "\n".join(
        f"exec(compile({block!r}, {name(page)!r}, 'exec'), {{'__name__': '__main__'}})"
        for page in PAGES for block in marked(page)
    )  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", blocks],
        cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_wrong_is_found(tmp_path):
    """The checks themselves: a page with one mistake of each kind."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: of `code`\n\n[ok](#a-page-of-code) [ok](page.md#a-page-of-code) [web](https://example.org/x#y)\n"
        "[no heading](#absent) [no file](absent.md) [no page](page.txt#part)\n\n"
        "`python -m tuning.absent --x` `python -m tuning` `cutegemm absent` `cutegemm sweep --shapes 1`\n\n"
        "    python -m tuning.bench --square 1..2\n    A=1 python -m absent.module   # a comment\n\n"
        "```\npython -m tests.absent\n```\n"
        "`tests/unit/test_docs.py`, `tests/gpu/test_*.py`, `docs/absent.md`, `/tests/absent`\n"
    )
    assert wrong_links(page) == ["#absent", "absent.md", "page.txt#part"]
    assert wrong_paths(page) == ["docs/absent.md"]
    assert sorted(wrong_commands(page)) == [
        "cutegemm absent", "python -m absent.module", "python -m tests.absent", "python -m tuning",
        "python -m tuning.absent --x",
    ]  # fmt: skip
