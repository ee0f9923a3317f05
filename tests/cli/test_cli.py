"""The command line as a user meets it: exit codes, one-line errors, JSON, files."""

import csv
import json
import re
import shlex
import tomllib

import pytest
from forkserver import fedscaffold, run

CONFIG = """
seed = 1
rounds = 6
[problem]
dataset = "digits"
split = "similarity:0"
clients = 10
model = "softmax"
[algorithm]
name = "scaffold"
[local]
epochs = 1
batch_size = 0.2
lr = 0.1
[cohort]
size = 0.3
[output]
dir = "out"
"""


@pytest.mark.process
def test_help_names_every_verb_and_each_has_an_example():
    top = fedscaffold("--help")
    assert top.returncode == 0
    for verb in ("demo", "run", "compare", "data", "conform", "plan", "diagnose", "report"):
        assert re.search(rf"^\s+{verb}\s", top.stdout, re.M), verb
        words = (verb, "show", "--help") if verb == "data" else (verb, "--help")
        page = fedscaffold(*words).stdout
        assert "Example: fedscaffold" in page, verb
        assert "--json" in page, verb


@pytest.mark.slow
@pytest.mark.process
def test_run_leaves_its_folder_and_says_so(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    done = fedscaffold("run", "config.toml", "--set", "local.lr=0.2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["rounds"] == 6
    assert answer["lr"] == 0.2
    assert answer["diverged_at"] is None
    assert 0 < answer["residual"] < 1e-5
    folder = tmp_path / "out"
    resolved = tomllib.loads((folder / "config.toml").read_text())
    assert resolved["local"]["lr"] == 0.2
    assert resolved["precision"] == "float32"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()[1:-1]]
    assert [line["round"] for line in lines] == list(range(1, 7))
    assert {"loss", "accuracy", "residual", "bytes_up", "bytes_down"} <= set(lines[0])
    assert (folder / "report.html").read_text().lower().startswith("<!doctype html>")
    # the resolved config is a config: it gives the same bits again
    again = fedscaffold(
        "run", "out/config.toml", "--set", "output.dir=again", "--json", cwd=tmp_path
    )
    assert json.loads(again.stdout)["digest"] == answer["digest"]
    (folder / "report.html").unlink()
    assert fedscaffold("report", "out", cwd=tmp_path).returncode == 0
    assert (folder / "report.html").exists()


@pytest.mark.slow
@pytest.mark.process
def test_compare_prints_a_table_and_keeps_csv_latex_and_page(tmp_path):
    words = shlex.split(
        "compare --dataset digits --split similarity:0 --model softmax --clients 10 --cohort 0.5 "
        "--algorithms scaffold,fedavg --rounds 25 --local-epochs 2 --batch-size 0.2 --lr tuned "
        "--target accuracy:0.5 --seeds 2 --out cmp --json"
    )
    done = fedscaffold(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["algorithm"] for row in answer["rows"]] == ["scaffold", "fedavg"]
    assert all(row["reached"] == 2 for row in answer["rows"])
    rows = list(csv.DictReader((tmp_path / "cmp" / "table.csv").read_text().splitlines()))
    assert float(rows[0]["rounds_to_target"]) == answer["rows"][0]["rounds_to_target"]
    assert "tabular" in (tmp_path / "cmp" / "table.tex").read_text()
    assert (tmp_path / "cmp" / "report.html").exists()


def test_all_algorithms_are_those_that_the_settings_allow():
    from fedscaffold.algorithms import ALGORITHMS
    from fedscaffold.cli.comparison_folder import ask_comparison
    from fedscaffold.experiments.config_file import parse

    settings = "cohort.size = 0.5\nlocal.steps = 2\nproblem.dataset = 'quadratic'"
    asked, _ = ask_comparison(parse(settings), " all", 1, None, {})
    assert {*asked.algorithms, *asked.left_out} == set(ALGORITHMS)
    assert len(asked.algorithms) + len(asked.left_out) == len(ALGORITHMS)
    assert "scaffold" in asked.algorithms
    assert asked.left_out["scaffnew"].startswith("scaffnew")


@pytest.mark.slow
@pytest.mark.process
def test_data_show_prints_and_draws(tmp_path):
    done = fedscaffold(
        "data",
        "show",
        "--split",
        "dirichlet:0.1",
        "--clients",
        "5",
        "--out",
        "split.png",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^client", done.stdout, re.M)) == 5
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    page = fedscaffold("data", "show", "--out", "split.html", "--json", cwd=tmp_path)
    assert json.loads(page.stdout)["clients"] == 20
    assert "<html" in (tmp_path / "split.html").read_text()
    listed = json.loads(fedscaffold("data", "list", "--json").stdout)
    assert "emnist" in listed["datasets"]
    assert "similarity" in listed["splits"]


@pytest.mark.slow
@pytest.mark.process
def test_conform_judges_ours_and_others(tmp_path):
    ours = fedscaffold("conform", "--json")
    assert ours.returncode == 0
    assert json.loads(ours.stdout)["fails"] == 0
    (tmp_path / "mine.py").write_text(
        "from fedscaffold.algorithms import fedavg\nfrom fedscaffold.conformance import run\n"
        "def adapter(case):\n    return run(fedavg(), case)\n"
    )
    theirs = fedscaffold("conform", "--target", "mine:adapter", cwd=tmp_path)
    assert theirs.returncode == 1
    assert re.search(r"^fails\s+optimum", theirs.stdout, re.M)


@pytest.mark.slow
@pytest.mark.process
def test_divergence_is_a_result_not_an_error(tmp_path):
    (tmp_path / "config.toml").write_text(
        CONFIG.replace('dataset = "digits"', 'dataset = "quadratic"')
    )
    changes = ["--set", "local.lr=50.0", "--set", "rounds=500", "--set", "local.batch_size=1.0"]
    done = fedscaffold("run", "config.toml", *changes, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["diverged_at"] > 1
    assert "2/L" in answer["advice"]


MISTAKES = [
    (["run", "missing.toml"], "missing.toml not found"),
    (["run", "config.toml", "--set", "algorithm.name=scafold"], "did you mean 'scaffold'"),
    (["run", "config.toml", "--set", "algorithm.mu=1.0"], "unknown parameter of scaffold 'mu'"),
    (["run", "config.toml", "--set", "local.lr=-0.1"], "lr must be a number above 0, got -0.1"),
    (["run", "config.toml", "--set", "local.lr=fast"], "local.lr must be"),
    (["run", "config.toml", "--set", "locl.lr=0.1"], "did you mean 'local'"),
    (["run", "config.toml", "--set", "local.batchsize=3"], "did you mean 'local.batch_size'"),
    (["run", "config.toml", "--set", "local"], "--set takes key=value"),
    (["run", "config.toml", "--set", "cohort.size=11"], "at most 10, got 11"),
    (["run", "config.toml", "--set", "local.steps=3"], "either local_steps or local_epochs"),
    (["run", "config.toml", "--set", "problem.dataset=digit"], "did you mean 'digits'"),
    (["run", "config.toml", "--set", "problem.split=similar:0"], "did you mean 'similarity'"),
    (["run", "config.toml", "--set", "problem.model=resnet"], "unknown model"),
    (["run", "config.toml", "--set", "problem.model=mlp:wide"], "mlp:WIDTH"),
    (["run", "config.toml", "--set", "problem.clients=5000"], "clients"),
    (
        ["run", "config.toml", "--set", "problem.dataset=a9a", "--data", "nowhere"],
        "a9a not found in nowhere",
    ),
    (["run", "config.toml", "--set", "stop_at=accuracy"], "accuracy:0.9"),
    (["run", "config.toml", "--set", "problem.foo=1"], "unknown key 'problem.foo'"),
    (
        ["run", "config.toml", "--set", "problem.mu=0.1"],
        "dataset 'digits' makes no use of problem.mu",
    ),
    (
        ["run", "config.toml", "--set", "problem.dim=20"],
        "makes no use of problem.dim",
    ),  # its default all the same
    (["run", "idle.toml"], "dataset 'quadratic' makes no use of problem.l2"),
    (
        ["run", "config.toml", "--set", "local.momentum=0.5"],
        "local.optimizer 'sgd' makes no use of local.momentum",
    ),
    (
        ["run", "config.toml", "--set", "server.lr=0.5"],
        "server.optimizer 'none' makes no use of server.lr",
    ),
    (
        ["compare", "--local-steps", "1", "--dataset", "quadratic", "--model", "mlp:3"],
        "no use of problem.model",
    ),
    (
        ["compare", "--local-steps", "1", "--set", "problem.noise=1"],
        "dataset 'digits' makes no use of problem.noise",
    ),
    (
        ["plan", "--target", "0.1", "--seeds", "0"],
        "seeds must be a whole number of at least 1, got 0",
    ),
    (["run", "broken.toml"], "not valid TOML"),
    (["compare", "--rounds", "2"], "--local-epochs or --local-steps"),
    (
        ["compare", "--local-steps", "1", "--algorithms", "scaffold,fedavgg"],
        "did you mean 'fedavg'",
    ),
    (["compare", "--local-steps", "1", "--target", "acuracy:0.5"], "did you mean 'accuracy'"),
    (["compare", "--local-steps", "1", "--seeds", "0"], "seeds must be"),
    (["compare", "--local-steps", "many"], "local.steps"),
    (["compare", "--local-step", "1"], "No such option"),
    (["report", "nowhere"], "holds no run"),
    (["data", "show", "--split", "dirichlet:-1"], "dirichlet"),
    (["data", "show", "--out", "split.doc"], ".png"),
    (["data", "show", "--clients", "0"], "--clients must be a whole number of at least 1, got 0"),
    (["conform", "--target", "nothing:here"], "nothing"),
    (["fly"], "No such command"),
]
# all in one process: starting one for each takes longer than everything else here
DRIVER = """
import contextlib, io, json, sys
from fedscaffold.cli import main
answers = []
for words in json.load(sys.stdin):
    sys.argv = ["fedscaffold", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as left:
            answers.append([left.code, out.getvalue(), err.getvalue()])
json.dump(answers, sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_users_mistake_is_one_line_and_exit_2(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    (tmp_path / "idle.toml").write_text(
        "problem = {dataset = 'quadratic', l2 = 0.1}\nlocal.steps = 1"
    )
    asked = json.dumps([words for words, _ in MISTAKES])
    done = run(DRIVER, input=asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) == len(MISTAKES)
    for (words, said), (code, out, err) in zip(MISTAKES, answers, strict=True):
        assert code == 2, (words, err or out)
        assert said in err, (words, err)
        assert len(err.strip().splitlines()) == 1, (words, err)
        assert out == "", words


@pytest.mark.slow
@pytest.mark.process
def test_a_resolved_configuration_runs_again(tmp_path):
    """It names every key, also those that its data set and optimisers make nothing of."""
    (tmp_path / "config.toml").write_text(
        "rounds = 2\nproblem.dataset = 'quadratic'\nlocal.steps = 1"
    )
    assert fedscaffold("run", "config.toml", "--set", "output.dir=a", cwd=tmp_path).returncode == 0
    assert "l2 = " in (tmp_path / "a" / "config.toml").read_text()
    again = fedscaffold("run", "a/config.toml", "--set", "output.dir=b", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.process
def test_a_missing_data_file_says_what_where_and_how():
    done = fedscaffold("data", "show", "--dataset", "emnist", env={"FEDSCAFFOLD_DATA": ""})
    assert done.returncode == 2
    assert "emnist_byclass62.npz" in done.stderr
    assert "FEDSCAFFOLD_DATA" in done.stderr


@pytest.mark.slow
@pytest.mark.process
def test_a_second_process_finds_the_compiled_program(tmp_path):
    """The first process writes every program that the second asks for: a miss would leave a file of its own."""
    (tmp_path / "config.toml").write_text(
        "rounds = 2\nproblem.dataset = 'quadratic'\nlocal.steps = 1"
    )
    env = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAX_COMPILATION_CACHE_DIR": "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    compiled = []
    for _ in range(2):
        assert fedscaffold("run", "config.toml", "--json", cwd=tmp_path, env=env).returncode == 0
        compiled.append(
            {path.name for path in (tmp_path / "cache" / "fedscaffold" / "jax").glob("*-cache")}
        )
    assert compiled[0]
    assert compiled[1] == compiled[0]
