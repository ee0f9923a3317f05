"""The picture of rooms is drawn from the imports and up to date; calls take the way that the page states."""

import importlib.util
import json
import re
from pathlib import Path

import forkserver
import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("architecture", ROOT / "tools" / "architecture.py")
architecture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(architecture)


@pytest.mark.slow
def test_the_page_is_up_to_date():
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert page == architecture.filled(page), "run `make architecture`, look, and commit"


@pytest.mark.slow
def test_every_room_is_above_what_it_imports():
    found = architecture.arrows()
    level = {room: k for k, row in enumerate(architecture.layers(found)) for room in row}
    assert set(level) == set(found)
    assert all(level[target] < level[room] for room, targets in found.items() for target in targets)


def test_a_circle_is_named():
    with pytest.raises(SystemExit, match="a -> b -> a"):
        architecture.layers({"a": {"b"}, "b": {"a"}})


def test_what_follows_from_other_arrows_is_not_drawn():
    found = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert architecture.direct(found) == {"top": {"middle"}, "middle": {"bottom"}, "bottom": set()}
    assert architecture.picture(found).count('<path d="M') == 3  # two arrows and the tip


FOLLOWED = """
import inspect, json, sys
from pathlib import Path
import fedscaffold as fs
source, entered = Path(fs.__file__).parent, {}

def note(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(str(source)):
        return
    if code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<"):
        file = Path(code.co_filename).relative_to(source).as_posix()
        entered.setdefault((file, code.co_qualname))
"""
TOLD = """
sys.setprofile(None)
print(json.dumps(list(entered)))
"""
SIMULATE = """
problem = fs.problems.two_datasets("logistic", 4, records=20)
sys.setprofile(note)
fs.simulate(fs.scaffold(), problem, rounds=2, local_steps=2, batch_size=4, lr=0.1, cohort=2)
"""
DEPLOYED = """
import deploy_case
from fedscaffold.deploy import InProcess, drive
settings, folder = deploy_case.settings(), Path(sys.argv[1])
server, sites = deploy_case.server_of(settings, folder), InProcess(deploy_case.learner(), settings, folder)
drive(server, sites, rounds=1)
sys.setprofile(note)
drive(server, sites, rounds=2)
"""
COMPARE = """
import contextlib
from fedscaffold.cli import main
words = "--dataset digits --clients 4 --rounds 2 --local-steps 2 --batch-size 8 --lr 0.1 --seeds 1 --workers 1"
sys.argv = ["fedscaffold", "compare", "--algorithms", "scaffold,fedavg", *words.split(), "--out", sys.argv[1]]
sys.setprofile(note)
with contextlib.suppress(SystemExit):
    main()
"""


# files and functions of ours that the first such call of a process enters, lambdas and the like apart: no more than these
@pytest.mark.process
@pytest.mark.parametrize(
    ("title", "code", "files", "functions"),
    [
        ("`fs.simulate`", SIMULATE, 33, 234),
        ("A deployed round", DEPLOYED, 32, 212),
        pytest.param("`fedscaffold compare`", COMPARE, 75, 471, marks=pytest.mark.slow),
    ],
)
def test_a_call_takes_the_way_that_the_page_states(tmp_path, title, code, files, functions):
    said = forkserver.run(FOLLOWED + code + TOLD, str(tmp_path / "made"), check=True).stdout
    entered = json.loads(said.splitlines()[-1])
    assert len({file for file, _ in entered}) <= files
    assert len(entered) <= functions
    page = architecture.PAGE.read_text(encoding="utf-8")
    section = page.split(f"\n### {title}\n")[1].split("\n#")[0]
    stated = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", section, re.MULTILINE)
    assert len(stated) > 10
    passed = [
        (function, file)
        for file, name in entered
        for function in dict.fromkeys((name.split(".")[0], name.split(".")[-1]))
        if (function, file) in stated
    ]
    assert list(dict.fromkeys(passed)) == stated
