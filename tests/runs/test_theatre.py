"""The drift theatre: its numbers are the library's (under node), and the page works (in a real browser)."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from forkserver import fedscaffold

import fedscaffold as fs
from fedscaffold.metrics import explained
from fedscaffold.runs.theatre import asset, theatre, write_theatre

NODE = shutil.which("node")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_node = pytest.mark.skipif(
    NODE is None, reason="node is not installed: it runs the page's formulas"
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: it shows the page"
)

MU = 1.0  # FedProx's pull, the library's default
METHODS = {
    "sgd": fs.sgd(),
    "fedavg": fs.fedavg(),
    "fedprox": fs.fedprox(mu=MU),
    "scaffold": fs.scaffold(),
}
ROUNDS = 7
# On random landscapes: rounds with given cohorts from a start that is not special, and all that the page says of theory.
DRIVER = """
const cases = JSON.parse(require("fs").readFileSync(0, "utf8")), quiet = () => () => [0, 0];
console.log(JSON.stringify(cases.map(({ settings, cohorts }) => {
  const problem = Engine.landscape(settings), { lr, steps, noise } = settings, runs = {};
  for (const [name, method] of Object.entries(Engine.METHODS)) {
    let state = { x: problem.start, c: [0, 0], c_i: problem.linear.map(() => [0, 0]) };
    for (const cohort of cohorts) state = Engine.round(method, state, problem, settings, cohort, quiet).state;
    runs[name] = state;
  }
  const laws = { scaffold: {}, fedavg: { memory: false }, fedprox: { memory: false, drag: Engine.PULL } };
  return {
    problem, runs, pull: Engine.PULL, optimum: Theory.optimum(problem),
    rate: Theory.contractionRate(problem, lr, steps), best: Theory.bestLocalSteps(problem, lr),
    bias: { fedavg: Theory.bias(problem, lr, steps), fedprox: Theory.bias(problem, lr, steps, Engine.PULL) },
    laws: Object.fromEntries(Object.entries(laws).map(([name, law]) =>
      [name, Theory.stationary(problem, lr, steps, noise ** 2, law)])),
  };
})));
"""


def scripted(driver, given):
    script = f"{asset('engine.js')}\n{asset('theory.js')}\n{driver}"
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def settings_of(rng, clients):
    return {
        "clients": clients,
        "steps": int(rng.integers(2, 60)),
        "lr": round(float(rng.uniform(0.02, 0.6)), 3),
        "slopes": float(rng.uniform(0.2, 1)),
        "curves": float(rng.uniform(0, 0.7)),
        "noise": float(rng.uniform(0.1, 1)),
        "cohort": int(rng.integers(1, clients + 1)),
    }


@pytest.fixture(scope="module")
def instances():
    """Random settings, the page's numbers for them, and the library's problem."""
    rng = np.random.default_rng(8)
    cases = []
    for clients in (2, 3, 4, 5):
        settings = settings_of(rng, clients)
        size = settings["cohort"]
        cohorts = [sorted(rng.choice(clients, size, replace=False).tolist()) for _ in range(ROUNDS)]
        cases.append({"settings": settings, "cohorts": cohorts})
    cases[1]["settings"] |= {"curves": 0.0, "lr": 0.05}  # clients that bend alike: no bias
    cases[2]["settings"] |= {"steps": 1}
    found = scripted(DRIVER, cases)
    made = []
    for case, page in zip(cases, found, strict=True):
        given = page["problem"]
        problem = fs.problems.quadratic(
            hessians=given["hessians"], linear=given["linear"], x0=given["start"]
        )
        made.append((case["settings"], case["cohorts"], page, problem))
    return made


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.browser
@needs_node
@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_the_simulators(instances, name):
    for settings, cohorts, page, problem in instances[::2] if name != "scaffold" else instances:
        run = fs.simulate(
            METHODS[name],
            problem,
            rounds=ROUNDS,
            local_steps=settings["steps"],
            lr=settings["lr"],
            cohorts=cohorts,
            precision="float64",
            metrics=(),
            progress=False,
        )
        seen = page["runs"][name]
        np.testing.assert_allclose(seen["x"], run.vector, rtol=1e-9, atol=1e-9)
        if name == "scaffold":
            np.testing.assert_allclose(seen["c"], run.server.c, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(seen["c_i"], run.clients.c_i, rtol=1e-9, atol=1e-9)


@pytest.mark.process
@pytest.mark.browser
@needs_node
def test_theory_is_the_librarys(instances):
    for settings, _, page, problem in instances:
        assert page["pull"] == MU
        at = {"lr": settings["lr"], "local_steps": settings["steps"]}
        np.testing.assert_allclose(page["optimum"], fs.theory.fixed_point(problem, **at), atol=1e-9)
        assert page["rate"] == pytest.approx(
            fs.theory.contraction_rate(problem, **at).spectral_radius, rel=1e-9
        )
        best = fs.theory.best_local_steps(problem, lr=settings["lr"])
        assert page["best"]["steps"] == best.local_steps
        assert page["best"]["rate"] == pytest.approx(best.rate, rel=1e-9)
        assert page["best"]["estimate"] == pytest.approx(best.estimate, rel=1e-9)
        for name, off in page["bias"].items():
            np.testing.assert_allclose(
                off, fs.theory.bias(problem, **at, algorithm=METHODS[name]), rtol=1e-9, atol=1e-12
            )
        for name, law in page["laws"].items():
            exact = fs.theory.stationary(
                problem, **at, noise=settings["noise"] ** 2, algorithm=METHODS[name]
            )
            np.testing.assert_allclose(law, exact.x_covariance, rtol=1e-9, atol=1e-12)


@pytest.mark.process
@pytest.mark.browser
@needs_node
def test_the_two_dials_of_heterogeneity_are_apart(instances):
    base = {"clients": 3, "slopes": 0.5, "curves": 0.3}
    driver = 'console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0)).map(Engine.landscape)))'
    plain, pulled, bent = scripted(driver, [base, base | {"slopes": 1.0}, base | {"curves": 0.6}])
    assert pulled["hessians"] == plain["hessians"]
    assert bent["linear"] == plain["linear"]
    np.testing.assert_allclose(pulled["linear"], 2 * np.array(plain["linear"]), rtol=1e-14)
    mean = np.mean(plain["hessians"], axis=0)
    np.testing.assert_allclose(np.mean(bent["hessians"], axis=0), mean, atol=1e-15)
    np.testing.assert_allclose(bent["hessians"] - mean, 2 * (plain["hessians"] - mean), atol=1e-15)
    for one in (plain, pulled, bent, *(page["problem"] for _, _, page, _ in instances)):
        np.testing.assert_allclose(np.mean(one["linear"], axis=0), 0, atol=1e-15)
        assert np.linalg.eigvalsh(one["hessians"]).min() > 0


@pytest.mark.process
@pytest.mark.browser
@needs_node
def test_noise_leaves_the_model_in_its_ellipse():
    """The drawn noise has the variance that the ellipse is drawn for: the mean of many rounds, by its standard error."""
    settings = {
        "clients": 3,
        "steps": 4,
        "lr": 0.3,
        "slopes": 0.8,
        "curves": 0.5,
        "noise": 0.5,
        "cohort": 3,
    }
    driver = """
      const settings = JSON.parse(require("fs").readFileSync(0)), { problem, told } = Engine.run(settings, [], 4000);
      console.log(JSON.stringify({ xs: told.scaffold.xs.slice(50), law: Theory.stationary(problem, 0.3, 4, 0.25) }));"""
    seen = scripted(driver, settings)
    xs = np.array(seen["xs"])
    squares = (xs**2).sum(axis=1)
    blocks = (
        squares[: len(squares) // 50 * 50].reshape(-1, 50).mean(axis=1)
    )  # longer than the memory of the run
    error = blocks.std(ddof=1) / np.sqrt(len(blocks))
    assert abs(blocks.mean() - np.trace(seen["law"])) < 4 * error
    inside = np.einsum("ti,ij,tj->t", xs, np.linalg.inv(seen["law"]), xs) < 2 * np.log(20)
    shares = inside[: len(inside) // 50 * 50].reshape(-1, 50).mean(axis=1)
    assert abs(shares.mean() - 0.95) < 4 * shares.std(ddof=1) / np.sqrt(len(shares))


@pytest.mark.process
@pytest.mark.browser
@needs_node
@pytest.mark.parametrize(
    ("kind", "last"),
    [("lose", 3), ("twice", 1), ("drop", 1e9), ("momentum", 1e9), (None, 0), ("drop", 30)],
)
def test_a_broken_memory_stops_beside_the_optimum_for_good(kind, last):
    settings = {
        "clients": 4,
        "steps": 10,
        "lr": 0.2,
        "slopes": 0.8,
        "curves": 0.6,
        "noise": 0,
        "cohort": 4,
    }
    harms = [{"kind": kind, "from": 2 if kind == "lose" else 0, "to": last}] if kind else []
    driver = """
      const { settings, harms } = JSON.parse(require("fs").readFileSync(0)), { problem, told } = Engine.run(settings, harms, 200);
      const one = told.scaffold, well = one.xs.map((_, t) => Engine.healthy(one, t));
      console.log(JSON.stringify({ problem, xs: one.xs, e: one.mismatch, well, avg: told.fedavg.xs }));"""
    seen = scripted(driver, {"settings": settings, "harms": harms})
    x, e = np.array(seen["xs"][-1]), np.array(seen["e"][-1])
    end = -np.linalg.solve(
        np.mean(seen["problem"]["hessians"], axis=0), e
    )  # grad f(x) = -e, the optimum being 0
    np.testing.assert_allclose(x, end, atol=1e-9)
    if kind is None:
        assert all(seen["well"])
        assert np.linalg.norm(x) < 1e-12
        return
    assert np.linalg.norm(x) > 0.1
    first = seen["well"].index(False)
    assert first <= 3
    assert not any(seen["well"][first:])


@pytest.mark.process
@pytest.mark.browser
@needs_node
def test_the_gauge_turns_red_where_the_librarys_does():
    driver = """
      const [t, size, clients, values] = JSON.parse(require("fs").readFileSync(0));
      console.log(JSON.stringify(values.map(v => Engine.healthy({ mismatch: { [t]: [v, 0] }, size: { [t]: size }, clients }, t))));"""
    limit = explained(9, 4, 0.5)
    assert scripted(driver, [9, 0.5, 4, [0.999 * limit, 1.001 * limit]]) == [True, False]


def test_the_page_asks_nobody_for_anything():
    page = theatre()
    assert not re.search(
        r"https?://|//[a-z]|@import|url\(|fetch\(|XMLHttp|import\(",
        re.sub(r"(?m)//[ ].*$", "", page),
    )
    assert "default-src 'none'" in page
    assert "$" not in re.sub(r"\$\{", "", page)  # every part is filled in
    assert len(page.encode()) < 100_000


@pytest.mark.process
def test_the_verb(tmp_path):
    done = fedscaffold("theatre", "--out", "a/drift.html", "--json", cwd=tmp_path, check=True)
    answer = json.loads(done.stdout)
    assert answer["page"] == str((tmp_path / "a/drift.html").resolve())
    assert (tmp_path / "a/drift.html").read_text(encoding="utf-8") == theatre()
    wrong = fedscaffold("theatre", "--out", "drift.png", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--out must be a page such as theatre.html, got drift.png" in wrong.stderr


# In the browser: two frames, as wide as a phone and as a screen, in which the page is played and says what it saw.
PLAYED = """<script>addEventListener("load", () => setTimeout(() => {
  const id = name => document.getElementById(name), curve = name => document.querySelector(`[data-method=${name}]`).getAttribute("d");
  const text = name => id(name).textContent, seen = { width: innerWidth, faults: window.faults };
  const slide = (name, value) => { id(name).value = value; id(name).dispatchEvent(new Event("input", { bubbles: true })); };
  seen.wide = document.documentElement.scrollWidth;
  seen.cut = [...document.querySelectorAll("button, label, p, dd, dt, h2, figcaption")].filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent);
  const sizes = [...document.querySelectorAll("body *")].filter(one => one.textContent.trim() && !["SCRIPT", "STYLE", "SUB", "NOSCRIPT"].includes(one.tagName));
  seen.smallest = Math.min(...sizes.map(one => parseFloat(getComputedStyle(one).fontSize)));
  seen.panels = ["sgd", "fedavg", "fedprox", "scaffold"].map(name => id(`panel-${name}`).getBoundingClientRect().width);
  seen.still = [text("away-fedavg"), text("away-scaffold"), text("theory-bias")];
  seen.moved = {};
  for (const [name, value] of [["clients", 3], ["steps", 23], ["lr", 0.3], ["slopes", 0.4], ["curves", 0.3], ["noise", 0.5], ["cohort", 2]]) {
    const before = curve("scaffold") + curve("fedavg"), theory = text("numbers");
    slide(`dial-${name}`, value);
    seen.moved[name] = [before !== curve("scaffold") + curve("fedavg"), theory !== text("numbers")];
  }
  document.querySelectorAll("#tour button")[2].click();
  slide("round", 5); seen.round5 = [text("round-now"), curve("sgd").split("L").length];
  id("step").click(); seen.stepped = text("round-now");
  seen.well = [id("gauge").className, text("verdict")];
  seen.broken = {};
  for (const kind of ["lose", "twice", "drop", "momentum"]) {
    id(`break-${kind}`).click(); slide("round", 60);
    seen.broken[kind] = [id("gauge").className, getComputedStyle(id("verdict")).color, text("away-scaffold"), id(`break-${kind}`).getAttribute("aria-pressed")];
  }
  slide("round", 30); id("break-momentum").click(); slide("round", 60);
  seen.stopped = [id("gauge").className, id("break-momentum").getAttribute("aria-pressed")];
  id("reset").click(); seen.reset = [id("gauge").className, text("round-now")];
  id("play").click(); seen.playing = text("play"); id("play").click(); seen.paused = text("play");
  seen.unnamed = [...document.querySelectorAll("button, input, svg[role=img]")].filter(one =>
    !(one.getAttribute("aria-label") || one.textContent.trim() || (one.labels && one.labels.length))).length;
  seen.skipped = [...document.querySelectorAll("button, input")].filter(one => { one.focus(); return document.activeElement !== one; }).length;
  parent.postMessage(JSON.stringify(seen), "*");
}, 200));</script>"""
FAULTS = """<script>window.faults = []; addEventListener("error", event => window.faults.push(String(event.message)));
  addEventListener("securitypolicyviolation", event => window.faults.push(event.violatedDirective));
  console.error = console.warn = (...words) => window.faults.push(words.join(" "));</script>"""
FRAMES = """<meta charset="utf-8"><pre id="seen"></pre><script>const all = [];
  addEventListener("message", event => { all.push(event.data); if (all.length === 2) document.getElementById("seen").textContent = `[${all}]`; });</script>
  <iframe src="played.html#still" style="width:400px;height:860px;border:0"></iframe>
  <iframe src="played.html#still" style="width:1600px;height:1000px;border:0"></iframe>"""


@pytest.fixture(scope="module")
def browsed(tmp_path_factory):
    """What two frames saw, by width, and what the browser wrote on its console."""
    folder = tmp_path_factory.mktemp("browser")
    page = write_theatre(folder / "theatre.html").read_text(encoding="utf-8")
    played = page.replace("<style>", FAULTS + "<style>", 1).replace("</body>", PLAYED + "</body>")
    (folder / "played.html").write_text(played, encoding="utf-8")
    (folder / "frames.html").write_text(FRAMES, encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--window-size=1700,2000",
        "--virtual-time-budget=4000",
        "--dump-dom",
        (folder / "frames.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    text = re.search(r'<pre id="seen">(\[.*?\])</pre>', done.stdout, re.S)
    assert text, (done.stdout[:2000], done.stderr[-2000:])
    plain = text[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {one["width"]: one for one in json.loads(plain)}, console


@pytest.mark.process
@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_in_a_browser(browsed, width):
    frames, console = browsed
    seen = frames[width]
    assert not console
    assert seen["faults"] == []
    # readable: nothing sticks out or is cut, no letter is tiny, the pictures are large enough
    assert seen["wide"] <= width
    assert seen["cut"] == []
    assert seen["smallest"] >= 10
    assert min(seen["panels"]) > 160
    # the model ends where theory says, and SCAFFOLD at the target
    away, arrived, bias = seen["still"]
    assert away == f"{bias} away"
    assert arrived == "arrived"
    # every slider moves the curves, and the numbers of theory
    assert all(curves for curves, _ in seen["moved"].values()), seen["moved"]
    assert [name for name, (_, numbers) in seen["moved"].items() if not numbers] == []
    # playing
    assert seen["round5"] == ["5", 6]
    assert seen["stepped"] == "6"
    assert (seen["playing"], seen["paused"]) == ("Pause", "Play")
    assert seen["reset"] == ["health", "0"]
    # keyboard and screen reader
    assert seen["unnamed"] == 0
    assert seen["skipped"] == 0


@pytest.mark.process
@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [400, 1600])
def test_breaking_things_turns_the_gauge_red_and_it_stays_so(browsed, width):
    seen = browsed[0][width]
    assert seen["well"][0] == "health"
    assert "Healthy" in seen["well"][1]
    for kind, (state, colour, away, pressed) in seen["broken"].items():
        assert state == "health broken", kind
        red, green, blue = (int(v) for v in re.findall(r"\d+", colour)[:3])
        assert red > 2 * max(green, blue), (kind, colour)
        assert float(away.split()[0]) > 0.05, (kind, away)
        assert pressed == "true"
    assert seen["stopped"] == ["health broken", "false"]  # the cause is gone, the damage is not
