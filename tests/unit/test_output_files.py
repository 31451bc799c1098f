"""What command lines take for a file to write, and that writing it loses nothing."""

from __future__ import annotations

import argparse
import os
import resource

import pytest

from cutegemm.winners import Winners
from tests.unit.test_winners import row
from tuning import cli
from tuning.winners import main as winners


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "table.json"
    file.write_text("before")
    file.chmod(0o640)
    cli.write(file, "after")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("after", 0o640)

    def fails(number):
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="too large"):
        cli.write(file, "never")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("table.json", "after")]


def test_a_limit_of_the_system_leaves_what_was_there(tmp_path):
    file = tmp_path / "table.json"
    file.write_text("before")
    child = os.fork()
    if not child:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            cli.write(file, "x" * 1000)
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert file.read_text() == "before"


def test_links_and_devices_stay_what_they_are(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    cli.write(link, "after")
    assert (link.is_symlink(), file.read_text()) == (True, "after")
    cli.write("/dev/null", "nothing")


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    store = tmp_path / "winners.sqlite3"
    Winners(store).record(row())
    for path, why in (
        (tmp_path, "a folder"),
        (tmp_path / "no" / "x.json", "there is no folder"),
        (store, "winners store"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=why):
            cli.output(str(path))
    assert cli.output(str(tmp_path / "new.json")) == str(tmp_path / "new.json")
    assert cli.table_or_pipe("-") == "-"


def test_a_store_is_not_exported_into_itself(tmp_path, capsys):
    store = tmp_path / "winners.sqlite3"
    Winners(store).record(row())
    before = store.read_bytes()
    with pytest.raises(SystemExit) as ended:
        winners(["export", "--store", str(store), str(store)])
    assert ended.value.code == 2
    assert "which is a winners store" in capsys.readouterr().err
    assert store.read_bytes() == before
