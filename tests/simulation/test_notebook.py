"""A run in a notebook: a table, axes and HTML that say what its history says; missing packages are named."""

import subprocess
import sys

import numpy as np
import pytest

import fedscaffold as fs

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        f"InputError: run.{call}() needs {package.split('.')[0]}: pip install"
        in done.stderr.splitlines()[-1]
    )
