"""Every command of the documentation runs, and every `make` target it names exists. (Python examples are doctests.)"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


# one process for all commands of a page: starting JAX anew for each would take most of the time
DRIVER = """
import json, sys
from fedscaffold.cli import main
for words in json.load(sys.stdin):
    sys.argv = words
    try:
        main()
    except SystemExit as left:
        if left.code not in (0, None):
            sys.exit(f"{words}: exit code {left.code}")
"""


JUDGE = "python -m fedscaffold.conformance "

# commands that take long and are run by tests of their own
ELSEWHERE = {"fedscaffold exercise stale", "fedscaffold exercise momentum"}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page):
    lines = [line.split("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(c.startswith("fedscaffold") for c in commands(page))], ids=lambda p: p.name
)
def test_commands_run(page, tmp_path):
    for text in blocks(page, "toml"):
        (tmp_path / "first.toml").write_text(text, encoding="utf-8")
    for text in blocks(page, "python"):
        if text.startswith("# "):  # a file, named in its first line
            (tmp_path / text.splitlines()[0][2:].strip()).write_text(text, encoding="utf-8")
    typed = [command for command in commands(page) if command.startswith("fedscaffold") and command not in ELSEWHERE]
    asked = json.dumps([shlex.split(command) for command in typed])
    driver = [sys.executable, "-c", DRIVER]
    done = subprocess.run(driver, cwd=tmp_path, input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_judge_runs_without_the_command_line(tmp_path):
    howto = ROOT / "docs" / "howto-judge.md"
    [adapter] = [text for text in blocks(howto, "python") if text.startswith("# theirs.py")]
    (tmp_path / "theirs.py").write_text(adapter, encoding="utf-8")
    typed = {command for page in PAGES for command in commands(page) if command.startswith(JUDGE)}
    assert len(typed) >= 3
    for command in typed:
        words = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr)


def test_other_commands_are_make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for command in commands(page):
            if not command.startswith(("fedscaffold", JUDGE)):
                name, *targets = command.split()
                assert name == "make", (page.name, command)
                assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets), command


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), (page.name, link)


def test_what_is_run_elsewhere_is():
    text = (ROOT / "tests" / "test_exercises.py").read_text(encoding="utf-8")
    assert all(f'verb("{command.split()[-1]}"' in text for command in ELSEWHERE)
