"""Every command of the documentation runs, and every `make` target it names exists. (Python examples are doctests.)"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


# one process for all commands of a page: starting JAX anew for each would take most of the time
DRIVER = """
import importlib, json, sys
for words in json.load(sys.stdin):
    sys.argv = words
    try:
        importlib.import_module(words[0]).main()
    except SystemExit as left:
        if left.code not in (0, None):
            sys.exit(f"{words}: exit code {left.code}")
"""


JUDGE = "python -m fedscaffold.conformance "

# commands that take long and are run by tests of their own
EXERCISES = {
    f"python -m papers.exercises {name}"
    for name in ("participation", "stale", "momentum", "compression", "richardson")
}
ELSEWHERE = EXERCISES | {
    # `test_conform_judges_ours_and_others` of tests/cli/test_cli.py
    "fedscaffold conform",
    "fedscaffold conform --json",
    # a claim of tests/papers/test_reproduce.py, which is measured and judged there
    "python -m papers conjectures --quick",
    # two of its claims: `test_the_command` of tests/papers/test_reproduce.py, and docs/howto-reproduce.md
    "python -m papers quadratics-fig2 theorem2-lower-bound --quick --out runs/papers",
}


def entry(command):
    """The module whose `main` answers a command of ours, and the words after it; None for other commands."""
    words = shlex.split(command)
    if words[0] == "fedscaffold":
        return ["fedscaffold.cli", *words[1:]]
    if words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("papers", "benchmarks"):
        return [f"{words[2]}.__main__", *words[3:]]
    return None


# of a comparison or a diagnosis: the command is tested, not where it gets to
LIMITS = {
    "compare": {"--clients": 10, "--rounds": 5, "--seeds": 1},
    "diagnose": {"--clients": 3},
}
# what "all" means: `test_all_algorithms_are_those_that_the_settings_allow` of tests/cli/test_cli.py
SOME = {"all": "scaffold,fedavg,sgd"}


def shortened(words):
    """The words with fewer clients, rounds, seeds and methods, in one process: `tests/grids` has several."""
    if words[1:2] not in (["compare"], ["diagnose"]):
        return words
    most = LIMITS[words[1]]
    fewer = [
        str(min(int(word), most[last])) if last in most else SOME.get(word, word)
        for last, word in zip(["", *words[:-1]], words, strict=True)
    ]
    alone = words[1] == "diagnose" or {"--workers", "--slurm"} & {*words}
    return fewer if alone else [*fewer, "--workers", "1"]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page):
    lines = [
        line.split("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(entry, commands(page)))], ids=lambda p: p.name
)
def test_commands_run(page, tmp_path):
    for text in blocks(page, "toml"):
        (tmp_path / "first.toml").write_text(text, encoding="utf-8")
    for text in blocks(page, "python"):
        if text.startswith("# "):  # a file, named in its first line
            (tmp_path / text.splitlines()[0][2:].strip()).write_text(text, encoding="utf-8")
    asked = json.dumps(
        [
            shortened(entry(command))
            for command in commands(page)
            if entry(command) and command not in ELSEWHERE
        ]
    )
    done = forkserver.run(DRIVER, cwd=tmp_path, input=asked)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak  # in short: `test_commands_run` compares three methods by this command
@pytest.mark.process
def test_all_algorithms_are_compared(tmp_path):
    [command] = [one for one in commands(ROOT / "docs" / "command-line.md") if " all " in one]
    done = forkserver.run(DRIVER, cwd=tmp_path, input=json.dumps([entry(command)]))
    assert done.returncode == 0, done.stderr


@pytest.mark.process
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
            if entry(command) is None and not command.startswith(JUDGE):
                name, *targets = command.split()
                assert name == "make", (page.name, command)
                assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets), command


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), (page.name, link)


def test_what_is_run_elsewhere_is():
    text = (ROOT / "tests" / "papers" / "test_exercises.py").read_text(encoding="utf-8")
    for command in EXERCISES:  # by the verb, or the function behind it on fewer rounds
        name = command.split()[-1]
        assert f'verb("{name}"' in text or f".{name}(" in text, name
    typed = {command for page in PAGES for command in commands(page)}
    assert typed >= ELSEWHERE - EXERCISES
    assert "python -m papers quadratics-fig2 --quick --out runs/papers" in typed


def test_the_readme_counts_right_and_names_every_room():
    from fedscaffold import ALGORITHMS
    from fedscaffold.conformance import IDENTITIES
    from fedscaffold.conformance.mistakes import MISTAKES

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"and {len(ALGORITHMS) - 1} related methods" in text
    assert f"the {len(IDENTITIES)} identities and {len(MISTAKES)} mistakes" in text
    rooms = {path.parent.name for path in (ROOT / "src" / "fedscaffold").glob("*/__init__.py")}
    assert rooms == {room for room in rooms if f"`{room}/`" in text}
