"""The picture of rooms is drawn from the imports, and is up to date."""

import importlib.util
from pathlib import Path

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
