"""The reference of a run's arguments is made from their table, and is up to date."""

import importlib.util
import sys
from pathlib import Path

import pytest

from fedscaffold import cli
from fedscaffold.run_config import ARGUMENTS, FILE_ARGUMENTS, KEYS, PROBLEM_ARGUMENTS

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("arguments", ROOT / "tools" / "arguments.py")
arguments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(arguments)


def rows(text):
    """The rows of a page's tables, by their first cell."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return {row[0].strip("`"): row for row in cells}


def test_the_page_is_up_to_date():
    assert arguments.PAGE.read_text(encoding="utf-8") == arguments.page(), (
        "run `make arguments`, look, and commit"
    )


def test_every_argument_and_key_has_a_row():
    found = rows(arguments.page())
    assert {*ARGUMENTS, *FILE_ARGUMENTS, *PROBLEM_ARGUMENTS} <= set(found)
    shown = {row[1].strip("`") for name, row in found.items() if name in ARGUMENTS}
    assert shown - {"-"} | {*FILE_ARGUMENTS, *PROBLEM_ARGUMENTS} == set(KEYS)


def test_the_options_are_those_that_compare_has(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedscaffold", "compare", "--help"])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        cli.main()
    helped = capsys.readouterr().out
    found = {
        cell for row in rows(arguments.page()).values() for cell in row if cell.startswith("`--")
    }
    assert len(found) > 10
    assert all(f"{cell.strip('`')} " in helped for cell in found)
    assert rows(arguments.page())["server.lr"][1] == "-"  # --lr is the clients'


def test_a_page_that_is_out_of_date_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(arguments, "PAGE", tmp_path / "configuration.md")
    monkeypatch.setattr(sys, "argv", ["arguments.py"])
    arguments.main()
    monkeypatch.setattr(sys, "argv", ["arguments.py", "--check"])
    arguments.main()
    arguments.PAGE.write_text(arguments.page().replace("`seed`", "`sead`"), encoding="utf-8")
    with pytest.raises(SystemExit, match="out of date: run `make arguments`"):
        arguments.main()
