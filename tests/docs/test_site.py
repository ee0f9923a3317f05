"""The site builds strictly, opens without a network, and cannot say what the code does not."""

import fcntl
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from mutants import OUR_MUTANTS

import fedscaffold
from fedscaffold.conformance import IDENTITIES, conform, ours
from fedscaffold.conformance.federations import CONDITIONS
from fedscaffold.conformance.mistakes import MISTAKES
from fedscaffold.estimators.federated import OWN_PARAMETERS, RUN_PARAMETERS
from fedscaffold.grids.grid import REFUSED as GRID_REFUSED
from fedscaffold.run_config import ARGUMENTS
from fedscaffold.simulation.sweeps import REFUSED
from tests.faults import SCENARIOS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
sys.path.append(str(ROOT / "tools" / "website"))
import apidoc  # noqa: E402
import docstrings  # noqa: E402
import griffe  # noqa: E402
import hook  # noqa: E402
import museum  # noqa: E402
import wall  # noqa: E402

# Addresses in the theme's script that nothing here makes it use: a repository's stars, diagrams, browsers of 2019.
ASLEEP = (
    "api.github.com",
    "/api/v4/projects",
    "unpkg.com/mermaid@",
    "unpkg.com/resize-observer",
    "clipboardjs.com",
)


class Page(HTMLParser):
    """What a built page links to, loads, and can be pointed at."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads, self.scripts, self.text, self.inside = (
            set(),
            [],
            [],
            [],
            [],
            [],
        )
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])
        self.loads += [
            given[name] for name in ("src", "srcset", "data", "poster") if given.get(name)
        ]
        if tag in ("script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        (self.scripts if self.inside else self.text).append(data)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site; workers that run at once share one build."""
    home = tmp_path_factory.getbasetemp()
    folder = (home.parent if "PYTEST_XDIST_WORKER" in os.environ else home) / "site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "sitemap.xml").exists():
            command = [
                sys.executable,
                "-m",
                "mkdocs",
                "build",
                "--strict",
                "--site-dir",
                str(folder),
            ]
            quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(
                command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site):
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


def built(source):
    return source.relative_to(DOCS).with_suffix(".html").as_posix()


@pytest.mark.slow
@pytest.mark.process
def test_every_page_is_in_the_navigation(pages):
    written = {built(source) for source in DOCS.rglob("*.md")}
    assert written | {"404.html", "drift.html"} == set(pages)
    reached = {urlsplit(link).path for link in pages["index.html"].links}
    assert written - reached - {"index.html"} == set()


@pytest.mark.process
def test_every_link_and_anchor_leads_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            at = urlsplit(link)
            if at.scheme in ("http", "https", "mailto") or name == "404.html":
                continue
            target = (site / name).parent / unquote(at.path) if at.path else site / name
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), (name, link)
            if at.fragment and target.suffix == ".html":
                found = pages[target.resolve().relative_to(site.resolve()).as_posix()].ids
                assert unquote(at.fragment) in found, (name, link)


@pytest.mark.process
def test_nothing_is_loaded_from_elsewhere(site, pages):
    outside = re.compile(r"(?:https?:)?//[\w$]")
    for name, page in pages.items():
        assert not [one for one in page.loads if outside.match(one)], name
        assert not re.search(
            r"https?://", "".join(page.scripts).replace("http://www.w3.org/", "")
        ), name
        assert not {"mermaid", "__source"} & page.ids
    for path in site.rglob("*.css"):
        assert not re.search(
            r"@import|url\(\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")
        ), path
    inner = [
        (site / name, one)
        for name, page in pages.items()
        if name != "404.html"
        for one in page.loads
    ]
    loaded = {page.parent / one for page, one in inner if one.endswith(".js")}
    loaded = {path.resolve() for path in loaded} | set(site.glob("assets/javascripts/workers/*.js"))
    assert len(loaded) >= 3
    for path in loaded:
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
        text = text.replace("https://bit.ly/2s3ChXG", "")  # in the words of a warning
        addresses = re.findall(r"https?://[^\s\"'`)]+", text)
        assert all(any(known in one for known in ASLEEP) for one in addresses), (path, addresses)


@pytest.mark.process
def test_the_wall_has_a_tile_for_each_fault_and_says_of_each_what_the_code_does(pages, site):
    assert set(wall.WORDS) == set(SCENARIOS)
    assert set(wall.OPEN) == set(range(1, wall.TILES + 1)) - set(SCENARIOS)
    assert set(SCENARIOS) >= {22, 23, *range(29, 36)}
    text = (site / "wall.html").read_text(encoding="utf-8")
    tiles = dict(
        re.findall(r'<section class="tile \w+" id="fault-(\d+)">(.*?)</section>', text, re.S)
    )
    assert [int(number) for number in tiles] == list(range(1, wall.TILES + 1))
    for number, (name, _) in SCENARIOS.items():
        assert f'<p class="fault">{name}</p>' in tiles[str(number)]
        assert "covered by a scenario" in tiles[str(number)]
    for number, tile in wall.OPEN.items():
        assert wall.STATES[tile.state] in tiles[str(number)]
        assert tile.state != "scenario"
        for test in tile.tests:
            assert test_exists(test.removeprefix("tests/")), test
    assert f"fault-{wall.TILES + 1}" not in pages["wall.html"].ids


def test_a_scenario_that_is_taken_away_takes_its_tile_along(monkeypatch):
    monkeypatch.setattr(
        wall, "SCENARIOS", {number: one for number, one in SCENARIOS.items() if number != 7}
    )
    with pytest.raises(KeyError):
        wall.tiles()


@pytest.mark.slow
@pytest.mark.process
def test_the_museum_is_complete_and_every_label_is_true(site):
    told = {name for room in museum.ROOMS.values() for name in room.mistakes}
    assert told == set(MISTAKES)
    assert set(museum.OURS) == set(OUR_MUTANTS)
    text = (site / "museum.html").read_text(encoding="utf-8")
    exhibits = re.findall(r'<figure class="exhibit".*?</figure>', text, re.S)
    assert len(exhibits) == len(MISTAKES) + len(OUR_MUTANTS)
    rows = {identity.name: identity for identity in IDENTITIES}
    adapters = MISTAKES | OUR_MUTANTS
    named = set()
    for exhibit in exhibits:
        name = re.search(r"<figcaption><strong>(.*?)</strong>", exhibit)[1].replace("&#x27;", "'")
        caught = rows[re.search(r"Caught by <strong>(.*?)</strong>", exhibit)[1]]
        assert conform(adapters[name], [caught])[0].outcome == "fails", (name, caught.name)
        assert exhibit.count("<polyline") == 2
        assert re.search(
            r"<pre><code>(?:mutant|broken|update|lambda)\b.*</code></pre>", exhibit, re.S
        )
        count = museum.recognised().get(name)
        assert bool(count) == ('href="judged.html#by-mistake"' in exhibit), name
        named.add(name)
    assert named == set(adapters)
    assert set(museum.recognised()) <= set(MISTAKES)
    assert len(museum.recognised()) > 5


@pytest.mark.process
def test_no_project_is_named_in_the_museum(site):
    text = (
        (site / "museum.html")
        .read_text(encoding="utf-8")
        .partition("<article")[2]
        .partition("</article>")[0]
    )
    source = (ROOT / "src" / "fedscaffold" / "conformance" / "mistakes.py").read_text(
        encoding="utf-8"
    )
    sources = " ".join(re.findall(r"^    # (.*)$", source, re.M))
    shapes = r"\b(?:[A-Z][A-Za-z]*-?[A-Z_][\w-]*|Plato|Flower|fluke|flame|declearn|pfl-research|niid_bench|ki-ljl)\b"
    projects = set(re.findall(shapes, sources))
    assert len(projects) > 12
    assert not {project for project in projects if re.search(rf"\b{project}\b", text)}


def test_curves_are_distances_to_the_optimum():
    case = CONDITIONS["all"].case
    best = np.linalg.solve(case.hessians.mean(axis=0), case.linear.mean(axis=0))
    values, broke = museum.distances(ours, case)
    assert broke is None
    assert len(values) == case.rounds + 1
    assert values[0] == pytest.approx(np.linalg.norm(case.x0 - best))
    assert values[-1] < 1e-10
    wrong = museum.distances(MISTAKES["the correction never reaches the parameters"], case)[0]
    steps, lr = case.local_steps[0], case.lr[0]
    left = [
        np.linalg.matrix_power(np.eye(3) - lr * a, steps) for a in case.hessians
    ]  # FedAvg's round is affine: F7
    pushed = [
        np.linalg.solve(a, (np.eye(3) - u) @ b)
        for a, u, b in zip(case.hessians, left, case.linear, strict=True)
    ]
    end = np.linalg.solve(np.eye(3) - np.mean(left, axis=0), np.mean(pushed, axis=0))
    assert wrong[-1] == pytest.approx(np.linalg.norm(end - best), rel=1e-9)
    line = museum.picture("said", case.rounds, right=values, wrong=wrong)
    assert line.count("<polyline") == 2
    assert len(re.search(r'class="wrong" points="(.*?)"', line)[1].split()) == case.rounds + 1


def resolved(name):
    """What a name such as `fs.a.b.C.d(parameter)` means; a function may have the name of its module, and then hides it."""
    package, path, parameter = re.fullmatch(r"(fs|papers)\.([\w.]+)(?:\((\w+)\))?", name).groups()
    package = {"fs": "fedscaffold"}.get(package, package)
    try:
        target = attrgetter(path)(importlib.import_module(package))
    except AttributeError:
        target = pkgutil.resolve_name(f"{package}.{path}")
    if parameter:
        assert parameter in inspect.signature(target).parameters, name
    return target


def test_exists(test):
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    return bool(re.search(rf"^(?:def {name}\(|{name} = )", text, re.M))


test_exists.__test__ = False


@pytest.mark.parametrize("page", ["notation.md", "theory-formulas.md"])
def test_names_in_the_tables_of_theory_exist(page):
    names = re.findall(r"`((?:fs|papers)\.[\w.()]+)`", (DOCS / page).read_text(encoding="utf-8"))
    assert len(names) > 40
    for name in names:
        resolved(name)


def test_every_formula_has_a_function_a_test_and_its_errata():
    page = (DOCS / "theory-formulas.md").read_text(encoding="utf-8")
    rows = {match[1]: match[0] for match in re.finditer(r"^\| ([AF]\d+'?|T2) \| .*$", page, re.M)}
    assert {f"F{k}" for k in range(1, 28)} | {"F8'"} <= set(rows)
    for number, row in rows.items():
        tests = re.findall(r"`([\w/]+\.py::test_\w+)`", row)
        assert number == "F2" or (tests and re.search(r"`(fs|papers)\.", row)), number
        assert all(test_exists(test) for test in tests), row
    numbers = set(
        re.findall(
            r"\bF\d+'?", "".join(path.read_text(encoding="utf-8") for path in theory_files())
        )
    )
    assert numbers <= set(rows), "the docstrings of theory have formulas that the page has not"
    claims = importlib.import_module("papers.claims").CLAIMS
    experiments = page.partition("## The papers' experiments")[2]
    ran = re.findall(r"`(?:python -m papers )?([a-z]+-[a-z0-9]+)`", experiments)
    assert len(ran) >= 9
    assert set(ran) <= set(claims)


def theory_files():
    """The library's, the published bounds, and the formulas that are wrong in print."""
    folders = Path(fedscaffold.__file__).parent / "theory", ROOT / "papers" / "bounds"
    return [
        *(path for folder in folders for path in folder.glob("*.py")),
        ROOT / "papers" / "as_printed.py",
    ]


@pytest.mark.process
def test_every_erratum_is_linked_from_its_formula_or_stands_alone(pages):
    anchors = {one for one in pages["errata.html"].ids if re.fullmatch(r"00\d-\d+[a-z]?", one)}
    linked = {
        urlsplit(link).fragment
        for link in pages["theory-formulas.html"].links
        if "errata.html#00" in link
    }
    assert len(anchors) > 35
    assert linked - {"003-slides"} <= anchors
    assert anchors - linked <= {
        "000-10",
        "000-11",
    }  # a caption, a name: no formula of theirs is computed here


@pytest.mark.process
def test_the_reference_has_every_public_name(pages):
    ids = set().union(*(page.ids for name, page in pages.items() if name.startswith("api/")))
    rooms = "algorithms conformance data deploy estimators problems simulation state theory"
    for room in rooms.split():
        for name in importlib.import_module(f"fedscaffold.{room}").__all__:
            assert apidoc.path(room, name) in ids, (room, name)
    face = {f"fedscaffold.{name}" for name in fedscaffold.__all__}
    assert face - ids == set()
    assert face - {urlsplit(link).fragment for link in pages["api/index.html"].links} == set()


@pytest.mark.process
def test_examples_of_docstrings_are_code_and_no_quotations(site):
    for path in sorted((site / "api").glob("*.html")):
        text = path.read_text(encoding="utf-8")
        assert "<blockquote" not in text, path.name
        assert "&gt;&gt;&gt;" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.S), path.name
    assert '<span class="gp">&gt;&gt;&gt; </span>' in text


@pytest.mark.process
def test_the_speed_page_is_the_benchmarks_own(pages):
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    shown = re.sub(r"\s+", " ", "".join(pages["speed.html"].text))
    rows = re.findall(r"^\| ([^|`*\[]{8,}?) \|", readme, re.M)
    assert rows
    assert all(row in shown for row in rows)


@pytest.fixture(scope="module")
def package():
    extension = griffe.load_extensions(docstrings.Docstrings)
    return griffe.load("fedscaffold", search_paths=[ROOT / "src"], extensions=extension)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("simulate", list(ARGUMENTS)),
        ("sweep", [one for one in ARGUMENTS if one not in REFUSED]),
        ("grid", [one for one in ARGUMENTS if one not in GRID_REFUSED]),
        ("FederatedClassifier", ["model", *OWN_PARAMETERS, *RUN_PARAMETERS]),
        ("FederatedRegressor", [*OWN_PARAMETERS, *RUN_PARAMETERS]),
    ],
)
def test_the_reference_lists_the_arguments_that_are_filled_in_at_run_time(name, listed, package):
    live = getattr(fedscaffold, name)
    seen = package[f"{live.__module__.removeprefix('fedscaffold.')}.{name}"]
    described = {
        one.name
        for part in seen.docstring.parse("google")
        if part.kind == "parameters"
        for one in part.value
    }
    assert set(listed) <= described
    assert {one.name for one in seen.parameters} - {"self"} == set(
        inspect.signature(live).parameters
    )
    assert docstrings.FILLED.search(seen.docstring.value) is None


@pytest.mark.process
def test_no_page_shows_what_should_have_been_filled_in(pages):
    for name in ("api/simulation.html", "api/estimators.html"):
        assert not {"ARGUMENTS", "PARAMETERS"} & set(" ".join(pages[name].text).split())


def test_a_page_from_elsewhere_keeps_only_links_that_lead_somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(hook, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "# A\n\n[one](../docs/wall.md#x) [two](b.py) [three](https://c.org)\n\n# B\n"
    )
    assert hook.included("a.md") == "[one](wall.md#x) two [three](https://c.org)\n\n# B\n"


def test_what_nothing_makes_is_a_failure(caplog):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    asked = "<!-- made: nonsense -->"
    assert hook.on_page_markdown(asked, page) == asked
    assert caplog.messages == [
        "index.md asks for 'nonsense', which nothing makes"
    ]  # and strict builds fail on it


# In the browser: pages in frames as wide as a phone and as a screen, opened from the file system, which say what they saw.
SEEN = """<script>window.faults = []; addEventListener("error", event => window.faults.push(String(event.message)));
addEventListener("load", () => setTimeout(() => {
  const query = document.querySelector("[data-md-component=search-query]"), ask = name => query.dispatchEvent(new Event(name));
  if (location.hash === "#search") { query.focus(); ask("focus"); query.value = "momentum"; ask("input"); ask("keyup"); }
  setTimeout(() => parent.postMessage(JSON.stringify({
    page: location.pathname.split("/site/").pop() + location.hash, width: innerWidth, wide: document.documentElement.scrollWidth,
    found: document.querySelectorAll(".md-search-result__item").length, faults: window.faults,
    small: [...document.querySelectorAll(".tile *, .exhibit p")].filter(one => parseFloat(getComputedStyle(one).fontSize) < 10).length,
  }), "*"), 1500);
}, 800));</script>"""
NARROW, WIDE = ["wall", "museum", "theory-formulas", "api/simulation"], ["index", "museum"]


@pytest.mark.process
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: it shows the pages")
def test_pages_open_from_the_file_system(site, tmp_path):
    home = tmp_path / "site"
    shutil.copytree(site, home)
    for name in {*NARROW, *WIDE}:
        page = home / f"{name}.html"
        page.write_text(
            page.read_text(encoding="utf-8").replace("<head>", "<head>" + SEEN, 1), encoding="utf-8"
        )
    views = [(f"{name}.html", 400) for name in NARROW] + [(f"{name}.html", 1600) for name in WIDE]
    views.append(("index.html#search", 400))
    frames = "".join(
        f'<iframe src="site/{page}" style="width:{width}px;height:800px;border:0"></iframe>'
        for page, width in views
    )
    (tmp_path / "frames.html").write_text(
        f"""<meta charset="utf-8"><pre id="seen"></pre><script>const all = []; addEventListener("message", event => {{
        all.push(event.data); document.getElementById("seen").textContent = `[${{all}}]`; }});</script>{frames}""",
        encoding="utf-8",
    )
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--window-size=1700,2000",
        "--virtual-time-budget=8000",
        "--dump-dom",
        (tmp_path / "frames.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    text = re.search(r'<pre id="seen">(\[.*?\])</pre>', done.stdout, re.S)
    assert text, (done.stdout[:2000], done.stderr[-2000:])
    seen = json.loads(text[1])
    assert sorted((one["page"], one["width"]) for one in seen) == sorted(views)
    for one in seen:
        assert one["faults"] == [], one
        assert one["wide"] <= one["width"], one
        assert one["small"] == 0, one
        assert one["found"] > 0 or "#search" not in one["page"], one
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
