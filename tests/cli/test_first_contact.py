"""The first things anybody types: the name alone, --version, doctor."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedscaffold import data
from fedscaffold.cli import doctor

MAIN = "from fedscaffold.cli import main\n"
STATES = {"ok", "warning", "missing"}


def typed(*words, first="", last="main()"):
    script = f"import sys\n{first}\nsys.argv = ['fedscaffold', *{list(words)!r}]\n{MAIN}{last}"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


@pytest.mark.process
def test_the_name_alone_says_what_to_type_next_and_loads_no_jax():
    done = typed(last="try:\n    main()\nfinally:\n    assert 'jax' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 12
    verbs = re.findall(r"^  fedscaffold (\w+)", done.stdout, re.M)
    assert {"demo", "run", "doctor"} <= set(verbs)
    listed = typed("--help").stdout
    assert all(re.search(rf"^  {verb} ", listed, re.M) for verb in verbs)


@pytest.mark.process
def test_the_version_is_that_of_the_package():
    done = typed("--version")
    assert (done.returncode, done.stdout) == (0, f"fedscaffold {metadata.version('fedscaffold')}\n")


@pytest.mark.process
def test_doctor_finds_this_installation_usable():
    done = typed("doctor", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["usable"]) == (0, True)
    found = {finding["what"]: finding for finding in answer["findings"]}
    assert {
        "Python",
        "extra sim",
        "extra cli",
        "extra report",
        "extra torch",
        "JAX",
        "data",
        "cache",
        "disk",
    } <= set(found)
    assert {finding["state"] for finding in found.values()} <= STATES
    assert all(finding["mend"] for finding in found.values() if finding["state"] != "ok")
    assert found["JAX"]["state"] == found["extra sim"]["state"] == "ok"
    assert "cpu" in found["JAX"]["said"]


@pytest.mark.process
def test_doctor_says_what_is_needed_and_missing():
    done = typed("doctor", first="sys.modules['jax'] = None")
    assert done.returncode == 1
    assert re.search(
        r"^missing  extra sim: jax not installed\n +pip install 'fedscaffold\[sim\]'",
        done.stdout,
        re.M,
    )
    assert re.search(r"^missing  JAX: does not start", done.stdout, re.M)
    assert done.stdout.endswith("not usable: mend what is needed and missing\n")


def test_doctor_sees_folders_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("FEDSCAFFOLD_DATA", str(tmp_path / "file"))
    for finding in (doctor._cache(), doctor._data()):
        assert finding.state == "warning"
        assert "set " in finding.mend
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor._cache().state == "ok"
    assert list((tmp_path / "cache").iterdir()) == []


def test_doctor_knows_the_files_of_every_data_set(tmp_path, monkeypatch):
    assert {"digits", *doctor.FILES} == set(data.DATASETS)
    monkeypatch.setenv("FEDSCAFFOLD_DATA", str(tmp_path))
    for name, (folder, files) in doctor.FILES.items():
        here = doctor._is_available([tmp_path], folder, files)
        if not here:
            with pytest.raises(FileNotFoundError, match=f"^{re.escape(files[0])} not found"):
                data.load(name)
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in files[:-1]:
            (tmp_path / folder / file).write_text("")
        assert doctor._is_available([tmp_path], folder, files) == here
        (tmp_path / folder / f"{files[-1]}.gz").write_text("")
        assert doctor._is_available([tmp_path], folder, files)
    assert "not at hand" not in doctor._data().said


@pytest.mark.parametrize(
    ("wanted", "state"),
    [
        ("numpy>=1", "ok"),
        ("numpy<1", "warning"),
        ("numpy==0.1.*", "warning"),
        ("no-such-package>=1", "missing"),
    ],
)
def test_versions_are_held_to_their_bounds(wanted, state):
    assert doctor._extra("sim", "to simulate", [Requirement(wanted)]).state == state


def test_requirements_belong_to_the_extra_that_asks_for_them():
    asked = [
        (extra, text)
        for text in ("numpy>=1.26", "jax>=0.10; extra == 'sim'", 'typer>=0.15; extra == "cli"')
        for extra in ("sim", "cli")
        if doctor._belongs_to(extra, Requirement(text))
    ]
    assert [(extra, text.split(">")[0]) for extra, text in asked] == [
        ("sim", "numpy"),
        ("sim", "jax"),
        ("cli", "typer"),
    ]


def test_doctor_asks_for_extras_that_there_are():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(doctor.EXTRAS) <= set(project["optional-dependencies"])


@pytest.mark.process
@pytest.mark.parametrize(
    "start",
    [
        [Path(sys.executable).with_name("fedscaffold")],
        [sys.executable, "-m", "papers"],
        [sys.executable, "-m", "papers.exercises"],
    ],
    ids=["fedscaffold", "python -m papers", "python -m papers.exercises"],
)
def test_the_commands_as_a_shell_starts_them(start):
    done = subprocess.run([*start, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
