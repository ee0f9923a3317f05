"""A run in a notebook: a table, axes and HTML that say what its history says; missing packages are named."""

import re
import sys
from io import StringIO
from types import ModuleType, SimpleNamespace

import forkserver
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import status_line

PROBLEM = fs.problems.quadratic(num_clients=4, dim=3, mu=0.1, seed=0)


@pytest.fixture(scope="module")
def run():
    ask = {
        "rounds": 6,
        "local_steps": 2,
        "lr": 0.1,
        "metrics": ("loss", "drift"),
        "evaluate_every": 2,
    }
    return fs.simulate(fs.scaffold(), PROBLEM, **ask)


def test_the_table_is_the_history(run):
    pytest.importorskip("pandas")
    table = run.to_pandas()
    assert table.index.tolist() == run.history["round"].tolist()
    for name in table.columns:
        np.testing.assert_array_equal(table[name].to_numpy(), run.history[name])
    assert {"round", *table.columns} == set(run.history)


def test_axes_show_what_was_measured(run):
    mpl = pytest.importorskip("matplotlib")
    mpl.use("agg")
    axes = run.plot()
    assert [panel.get_ylabel() for panel in axes] == ["loss", "drift"]
    xs, ys = axes[0].lines[0].get_data()
    there = np.isfinite(run.history["loss"])
    np.testing.assert_array_equal(xs, run.history["round"][there])
    np.testing.assert_array_equal(ys, run.history["loss"][there])
    assert len(run.plot("residual")) == 1
    with pytest.raises(fs.InputError, match="unknown metric 'los'"):
        run.plot("los")


def test_html_has_the_last_values(run):
    text = run._repr_html_()
    assert f"<td>{run.history['loss'][-1]:.6g}</td>" in text
    assert "<script" not in run._replace(advice="<script>")._repr_html_()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "call"), [("pandas", "to_pandas"), ("matplotlib.pyplot", "plot")]
)
def test_a_missing_package_is_named_in_one_line(package, call):
    code = f"import sys; sys.modules[{package!r}] = None\nimport numpy as np\n"
    code += f"from fedscaffold.simulation import notebook\nnotebook.{call}({{'round': np.arange(2), 'loss': np.zeros(2)}})"
    done = forkserver.run(code)
    assert (
        f"InputError: run.{call}() needs {package.split('.')[0]}: pip install"
        in done.stderr.splitlines()[-1]
    )


class Outputs(list):
    """IPython's display protocol: one list of texts for each output of a cell."""

    def display(self, bundle, *, raw, display_id):
        assert raw
        assert display_id is True
        texts = [bundle["text/plain"]]
        self.append(texts)
        return SimpleNamespace(update=lambda new, *, raw: texts.append(new["text/plain"]))


@pytest.fixture
def outputs(monkeypatch):
    """A notebook's kernel that shows every text, and what it has been sent."""
    sent = Outputs()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel="a kernel")
    ipython.display, display.display = display, sent.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(status_line, "REFRESH", 0.0)
    return sent


ASK = {"rounds": 6, "local_steps": 2}
LEFT = r"round \d/6, about \d+ s left"


@pytest.mark.parametrize(
    ("work", "first", "between", "last"),
    [
        (lambda: fs.simulate(fs.scaffold(), PROBLEM, lr=0.1, **ASK), "3 para", LEFT, "round 6/6"),
        (lambda: fs.sweep(fs.scaffold(), PROBLEM, lr=[0.1], seeds=2, **ASK), "3 p", LEFT, "round"),
        (
            lambda: fs.grid(fs.scaffold(), PROBLEM, over={"lr": [0.1, 0.2, 0.3]}, workers=1, **ASK),
            r"1 of 3 runs, about \d+ s left",
            "2 of 3 runs, about",
            "3 of 3 runs, ",
        ),
    ],
    ids=["simulate", "sweep", "grid"],
)
def test_progress_is_one_output_of_a_notebook_that_is_updated(
    outputs, capsys, monkeypatch, work, first, between, last
):
    monkeypatch.setenv("PJRT_NPROC", "1")  # the grid stays in this process
    work()
    (texts,) = outputs
    assert re.match(first, texts[0])
    assert len(texts) > 2
    assert all(re.match(between, text) for text in texts[1:-1])
    assert re.fullmatch(last + r".*\d s", texts[-1])
    assert capsys.readouterr() == ("", "")


class Terminal(StringIO):
    def isatty(self):
        return True


def test_progress_of_a_command_in_a_cell_is_one_line(monkeypatch):
    """Its output is kept with every text that was replaced: there must be none."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setattr(status_line, "LOG", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("PJRT_NPROC", "1")
    fs.grid(fs.scaffold(), PROBLEM, over={"lr": [0.1, 0.2, 0.3]}, workers=1, **ASK)
    said = sys.stderr.getvalue()
    assert re.fullmatch(r"1 of 3 runs, [^;]*; 2 of 3 runs, [^;]*; 3 of 3 runs, [\d.]+ s\n", said)


def test_each_run_has_its_own_output_also_if_it_ends_early(outputs):
    patience = [lambda look: look.round >= 2]
    for _ in range(2):
        fs.simulate(fs.scaffold(), PROBLEM, lr=0.1, callbacks=patience, **ASK)
    assert len(outputs) == 2
    fs.simulate(fs.scaffold(), PROBLEM, lr=0.1, progress=False, **ASK)
    assert len(outputs) == 2


def test_no_progress_in_a_program_that_only_imports_ipython(monkeypatch, capsys):
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: None
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    fs.simulate(fs.scaffold(), PROBLEM, lr=0.1, **ASK)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.process
def test_an_executed_notebook_and_its_export_hold_one_line_per_run():
    """With Jupyter's own kernel, client and exporter, where they are installed."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    nbconvert = pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    begin = "import fedscaffold as fs\nask = dict(rounds=300, local_steps=2)\n"
    begin += "problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.1, seed=0)"
    every = "every = fs.Callback()\nevery.every = 1\n"
    run = "fs.simulate(fs.scaffold(), problem, lr=0.1, callbacks=[every], **ask);"
    grid = "fs.grid(fs.scaffold(), problem, over={'lr': [0.1, 0.2], 'seed': range(3)}, **ask);"
    cells = [nbformat.v4.new_code_cell(code) for code in (begin, every + run, run, grid)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    texts = [[out.data["text/plain"] for out in cell.outputs] for cell in notebook.cells]
    assert [len(one) for one in texts] == [0, 1, 1, 1]
    assert all(re.fullmatch(r"round 300/300, [\d.]+ s", one) for (one,) in texts[1:3])
    assert re.fullmatch(r"6 of 6 runs, [\d.]+ s", texts[3][0])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert page.count("round 300/300") == 2
    assert "left" not in re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
