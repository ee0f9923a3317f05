"""Every number that a user can give: what is none of its kind is refused in one line, wherever it is given."""

import fractions

import numpy as np
import pytest
from pydantic import BaseModel

import fedscaffold as fs
from fedscaffold import InputError, algorithms, checks
from fedscaffold.deploy import settings
from fedscaffold.experiments import config_file
from fedscaffold.problems import weights_of
from fedscaffold.simulation import compression, stale
from fedscaffold.theory.advice import advise
from papers.bounds.speed_up import speed_up

nan, inf = float("nan"), float("inf")
HUGE = (2**63, 10**30, 10**5000)
NEVER = (
    True,
    False,
    np.True_,
    nan,
    inf,
    -inf,
    "5",
    "",
    b"5",
    [5],
    {},
    1j,
    np.array([5, 5]),
    lambda: 5,
    10**5000,
)
BAD = {
    "count": (*NEVER, 0, -1, 1.5, 5.0, 1e9, np.float32(5), fractions.Fraction(1, 2), *HUGE),
    "seed": (*NEVER, -1, 1.5, 5.0, 1e9, *HUGE),
    "positive": (*NEVER, 0, -1, 0.0, -0.5),
    "number": (*NEVER, -1, -0.5),
    "share": (*NEVER, 0, -1, 0.0, -0.5, 1.5, 2.0, 5.0, *HUGE),
}
GOOD = {
    "count": (2, np.int32(2), np.uint8(2), np.array(2)),
    "seed": (0, 2, 2**62, np.int64(2)),
    "positive": (0.5, 1, np.float32(0.5), np.int64(1), np.array(0.5), fractions.Fraction(1, 2)),
    "number": (0, 0.5, np.float64(0.5)),
    "share": (1, 2, 0.5, 1.0, np.float32(0.5), np.int64(2)),
}


def one_line(error, *words):
    said = str(error.value)
    assert len(said.splitlines()) == 1, said
    assert len(said) < 500
    for word in words:
        assert word in said


@pytest.mark.parametrize("kind", BAD)
def test_the_checks_themselves(kind):
    check = {
        "count": lambda v: checks.whole("it", v),
        "seed": lambda v: checks.whole("it", v, at_least=0),
        "positive": lambda v: checks.number("it", v, above=0),
        "number": lambda v: checks.number("it", v, at_least=0),
        "share": lambda v: checks.share("it", v, "clients"),
    }[kind]
    for value in BAD[kind]:
        with pytest.raises(InputError) as error:
            check(value)
        one_line(error, "it must be", "got ")
    for value in GOOD[kind]:
        answer = check(value)
        assert answer == value
        assert type(answer) in (int, float)


QUADRATIC = {"num_clients": 4, "dim": 3, "mu": 0.1, "smoothness": 1.0}
PROBLEM = fs.problems.quadratic(**QUADRATIC)
ASK = {"algorithm": fs.scaffold(), "problem": PROBLEM, "rounds": 2, "local_steps": 2, "lr": 0.1}
CLIENTS = [(np.eye(3)[:2] + i, np.array([0, 1])) for i in range(2)]
ROWS = {"X": np.vstack([np.eye(4)] * 3), "y": [0, 1] * 6, "clients": [0, 1, 2] * 4}


def fitted(**given):
    return fs.FederatedClassifier(**given).fit(**ROWS)


FUNCTIONS = {
    "simulate": (
        fs.simulate,
        ASK,
        {
            "rounds": "count",
            "local_steps": "count",
            "lr": "positive",
            "cohort": "share",
            "batch_size": "share",
            "seed": "seed",
            "evaluate_every": "count",
            "block": "count",
            "devices": "count",
        },
    ),
    "simulate, epochs": (fs.simulate, {**ASK, "local_steps": None}, {"local_epochs": "count"}),
    "sweep": (
        fs.sweep,
        {**ASK, "seeds": [0]},
        {"rounds": "count", "local_steps": "count", "lr": "positive", "evaluate_every": "count"},
    ),
    "richardson": (fs.richardson, ASK, {"lr": "positive", "rounds": "count"}),
    "quadratic": (
        fs.problems.quadratic,
        QUADRATIC,
        {
            "num_clients": "count",
            "dim": "count",
            "mu": "positive",
            "smoothness": "positive",
            "noise": "number",
            "seed": "seed",
        },
    ),
    "dialled": (
        fs.problems.dialled,
        QUADRATIC,
        {
            "num_clients": "count",
            "dim": "count",
            "mu": "positive",
            "smoothness": "positive",
            "seed": "seed",
            "gradient_dissimilarity": "number",
            "hessian_dissimilarity": "number",
            "noise": "number",
        },
    ),
    "lower_bound_pair": (fs.problems.lower_bound_pair, {}, {"mu": "positive"}),
    "two_datasets": (
        fs.problems.two_datasets,
        {"kind": "linear", "num_clients": 2, "records": 5, "dim": 3},
        {"num_clients": "count", "records": "count", "dim": "count", "l2": "number"},
    ),
    "softmax": (fs.problems.softmax, {"clients": CLIENTS}, {"l2": "number", "classes": "count"}),
    "mlp": (
        fs.problems.mlp,
        {"clients": CLIENTS},
        {"hidden": "count", "l2": "number", "seed": "seed"},
    ),
    "linear": (fs.problems.linear, {"clients": CLIENTS}, {"l2": "number"}),
    "logistic": (fs.problems.logistic, {"clients": CLIENTS}, {"l2": "number"}),
    "garnet": (
        fs.problems.garnet,
        {"num_states": 3, "branching": 2},
        {"num_states": "count", "num_actions": "count", "branching": "count", "seed": "seed"},
    ),
    "scaffold": (fs.scaffold, {}, {"option": "count", "server_lr": "positive"}),
    "fedavg": (fs.fedavg, {}, {"server_lr": "positive"}),
    "ca2fl": (fs.ca2fl, {}, {"server_lr": "positive"}),
    "fedexp": (fs.fedexp, {}, {"eps": "positive"}),
    "fedprox": (fs.fedprox, {}, {"mu": "number"}),
    "feddyn": (fs.feddyn, {}, {"alpha": "positive", "server_lr": "positive"}),
    "dane": (fs.dane, {}, {"mu": "number", "server_lr": "positive"}),
    "mime": (fs.mime, {}, {"beta": "number", "server_lr": "positive"}),
    "scaffold_m": (fs.scaffold_m, {}, {"beta": "positive", "server_lr": "positive"}),
    "fedavg_m": (fs.fedavg_m, {}, {"beta": "positive", "server_lr": "positive"}),
    "scafcom": (fs.scafcom, {}, {"beta": "positive", "server_lr": "positive"}),
    "ditto": (fs.ditto, {}, {"lam": "number", "server_lr": "positive"}),
    "scaffold_xi": (fs.scaffold_xi, {}, {"server_lr": "positive"}),
    "constant": (fs.delays.constant, {}, {"seconds": "number"}),
    "lognormal": (fs.delays.lognormal, {"median": 1.0, "sigma": 1.0}, {"median": "positive"}),
    "pareto": (fs.delays.pareto, {"least": 1.0, "shape": 1.0}, {"shape": "positive"}),
    "slow": (fs.delays.slow, {"share": 0.5, "factor": 2.0}, {"share": "positive"}),
    "decay": (stale.decay, {}, {"rate": "number"}),
    "drop": (stale.drop, {}, {"after": "count"}),
    "refresh": (stale.refresh, {}, {"after": "count"}),
    "quantise": (compression.quantise, {}, {"bits": "count"}),
    "top_k": (compression.top_k, {}, {"share": "positive"}),
    "random_k": (compression.random_k, {}, {"share": "positive"}),
    "plan": (
        fs.plan,
        {"problem": PROBLEM, "target": 0.1, "max_rounds": 10},
        {
            "target": "positive",
            "cost_of_round": "number",
            "cost_of_step": "number",
            "max_rounds": "count",
        },
    ),
    "heterogeneity": (
        fs.heterogeneity,
        {"problem": PROBLEM},
        {"lr": "positive", "local_steps": "count", "seed": "seed"},
    ),
    "advise": (
        advise,
        {"found": fs.heterogeneity(PROBLEM), "problem": PROBLEM},
        {"rounds": "count", "lr": "positive", "local_steps": "count"},
    ),
    "bias": (
        fs.theory.bias,
        {"problem": PROBLEM, "lr": 0.1, "local_steps": 2},
        {"lr": "positive", "local_steps": "count"},
    ),
    "contraction_rate": (
        fs.theory.contraction_rate,
        {"problem": PROBLEM, "lr": 0.1, "local_steps": 2},
        {"lr": "positive", "local_steps": "count"},
    ),
    "mean_squared_error": (
        fs.theory.mean_squared_error,
        {"problem": PROBLEM, "lr": 0.1, "local_steps": 2, "rounds": 2, "noise": 0.1},
        {"lr": "positive", "local_steps": "count", "rounds": "count", "noise": "number"},
    ),
    "speed_up": (
        speed_up,
        {"eigenvalues": [0.1, 1.0], "lr": 0.1, "local_steps": 2},
        {"lr": "positive", "local_steps": "count"},
    ),
    "split": (
        fs.data.split,
        {"spec": "iid", "labels": [0, 1] * 5, "num_clients": 2, "seed": 0},
        {"num_clients": "count", "seed": "seed"},
    ),
    "classifier": (
        fitted,
        {"rounds": 1, "local_epochs": 1},
        {
            "rounds": "count",
            "local_epochs": "count",
            "lr": "positive",
            "cohort": "share",
            "batch_size": "share",
            "l2": "number",
        },
    ),
}
CASES = [(name, key) for name, (_, _, keys) in FUNCTIONS.items() for key in keys]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_what_is_no_number_of_its_kind_is_refused_in_python(name, key):
    function, base, keys = FUNCTIONS[name]
    for value in BAD[keys[key]]:
        if callable(value) and key == "lr" and name in ("simulate", "classifier"):
            continue  # a schedule
        if (
            key in ("lr", "noise")
            and isinstance(value, (list, np.ndarray))
            and name in ("sweep", "quadratic", "dialled")
        ):
            continue  # a grid; a covariance, whose shape is refused elsewhere
        with pytest.raises(InputError) as error:
            function(**{**base, key: value})
        one_line(error)


def keys_of(model, prefix=""):
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{name}.")
        else:
            yield prefix + name


TOML = {
    "count": (
        "true",
        "1.5",
        "5.0",
        "1e9",
        "nan",
        "inf",
        "0",
        "-1",
        '"5"',
        "[]",
        "{}",
        str(2**63),
        "9" * 40,
        "2020-01-01",
    ),
    "seed": ("true", "1.5", "1e9", "nan", "-1", '"5"', "[]", str(2**63), "9" * 40),
    "positive": ("true", "0", "-1", "0.0", "nan", "inf", '"0.1"', "[]", "{}", "9" * 400),
    "number": ("true", "-1", "nan", "inf", "-inf", '"0.1"', "[]", "9" * 400),
    "share": ("true", "0", "-1", "0.0", "1.5", "2.0", "nan", "inf", '"0.1"', "[]", str(2**63)),
    "text": ("true", "5", '""', '" "', "[]", "{}", '"a\\u0000b"'),
    "word": ("true", "5", '""', '"other"', "[]"),
    "steps": ("true", "1.5", "0", "[1, true]", "[1, 2.0]", "[0]", '"5"', "[[1]]", "[[]]"),
    "lr": ("true", "0", "-1", "nan", "inf", '"auto"', "[]"),
    "texts": ("true", "5", '"loss"', "[5]", '[""]'),
    "flag": ("1", "0", "1.5", "nan", '"true"', '""', "[]", "{}"),
}
CONFIG = {
    "count": (
        "rounds",
        "evaluate_every",
        "block",
        "problem.clients",
        "problem.dim",
        "local.epochs",
        "output.checkpoint_every",
        "cohort.buffer",
    ),
    "seed": ("seed", "problem.seed"),
    "positive": (
        "problem.mu",
        "problem.smoothness",
        "server.lr",
        "local.clip_norm",
        "privacy.clip",
        "privacy.noise",
        "privacy.delta",
        "privacy.stop_at_epsilon",
    ),
    "number": ("problem.l2", "problem.noise", "local.momentum", "server.momentum"),
    "share": ("local.batch_size", "cohort.size"),
    "text": (
        "stop_at",
        "stale",
        "compression",
        "problem.dataset",
        "problem.split",
        "problem.model",
        "problem.data",
        "algorithm.name",
        "cohort.availability",
        "cohort.delays",
        "cohort.staleness",
        "output.dir",
        "robust",
    ),
    "word": (
        "weights",
        "precision",
        "client_state",
        "local.draw",
        "local.optimizer",
        "server.optimizer",
        "privacy.unit",
        "privacy.sampling",
    ),
    "steps": ("local.steps",),
    "lr": ("local.lr",),
    "texts": ("metrics",),
    "flag": ("local.drop_last",),
}


def test_every_key_of_the_configuration_is_in_the_table():
    assert sorted(keys_of(config_file.Config)) == sorted(
        key for keys in CONFIG.values() for key in keys
    )


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in CONFIG.items() for key in keys]
)
def test_what_is_no_value_of_its_kind_is_refused_in_a_configuration(kind, key):
    for value in TOML[kind]:
        for text, sets in ((f"{key} = {value}", []), ("", [f"{key}={value}"])):
            with pytest.raises(InputError) as error:
                config_file.parse(text, sets)
            one_line(error, key)


SETTINGS = {
    "count": (
        "rounds",
        "evaluate_every",
        "local.steps",
        "local.epochs",
        "deploy.max_records",
        "deploy.buffer",
    ),
    "seed": ("seed", "deploy.retries"),
    "positive": ("local.lr", "deploy.deadline", "deploy.clip"),
    "number": ("local.momentum", "deploy.wait"),
    "share": ("local.batch_size", "cohort.size", "deploy.quorum"),
    "word": (
        "weights",
        "precision",
        "local.draw",
        "local.optimizer",
        "local.buffers",
        "deploy.state",
        "deploy.mode",
        "algorithm.name",
    ),
}


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in SETTINGS.items() for key in keys]
)
def test_what_is_no_value_of_its_kind_is_refused_in_a_deployment(kind, key):
    for value in TOML[kind]:
        with pytest.raises(InputError) as error:
            settings.parse(f"{key} = {value}")
        one_line(error)


LINES = {
    "a digit too many": ("rounds = " + "9" * 5000, "over 4300 digits"),
    "lists in lists": ("rounds = " + "[" * 5000 + "]" * 5000, "nested too deep"),
    "tables in tables": ("rounds = " + "{a=" * 5000 + "1" + "}" * 5000, "nested too deep"),
}


@pytest.mark.parametrize("case", LINES)
def test_toml_that_python_cannot_read_is_refused_in_one_line(case):
    text, said = LINES[case]
    asked = [
        lambda: config_file.parse(text),
        lambda: config_file.parse("", [text]),
        lambda: settings.parse(text),
    ]
    for ask in asked:
        with pytest.raises(InputError) as error:
            ask()
        one_line(error, said)


def made(text):
    found = config_file.parse(text).algorithm
    return algorithms.make(found.name, **found.parameters)


@pytest.mark.parametrize("depth", [50, 200, 400, 800])
def test_nesting_that_can_be_read_is_refused_for_what_it_is(depth):
    for key in ("rounds", "algorithm.name", "algorithm.mu", "metrics", "local.steps", "other"):
        text = "[" * depth + "]" * depth
        with pytest.raises(InputError) as error:
            made(f"{key} = {text}")
        one_line(error)
    with pytest.raises(InputError) as error:
        config_file.parse("", [".".join(["algorithm"] + ["a"] * depth) + "=1", "rounds=0"])
    one_line(error, "rounds")


def test_two_keys_in_one_set_are_refused():
    with pytest.raises(InputError, match="one line"):
        config_file.parse("", ["rounds=3\nseed=5"])


SCHEDULES = {
    "half a client": ([[0.5], [0]], "got 0.5"),
    "a client as a float": ([[1.0], [0]], "got 1.0"),
    "true for a client": ([[True], [0]], "got True"),
    "a mixture": ([[0, True], [0]], "got True"),
    "names": ([["a"], ["b"]], "got 'a'"),
    "nobody knows": ([[None], [0]], "got None"),
    "below": ([[-1], [0]], "0 to 3"),
    "above": ([[0], [4]], "in round 2"),
    "far above": ([[2**63], [0]], "0 to 3"),
    "twice": ([[1, 1], [0]], "once a round"),
    "too few": ([[0]], "all 2 rounds"),
    "none": ([], "all 2 rounds"),
    "no rows": ([0, 1], "in round 1"),
    "a number": (3, "got 3"),
    "a word": ("all", "got 'all'"),
    "a function": (lambda r: [0], "got <function"),
    "a generator": (([0] for _ in range(2)), "got <generator"),
    "a dict": ({0: [0]}, "got {0: [0]}"),
    "an array of fractions": (np.array([[0.5], [0.5]]), "in round 1"),
    "an array of bools": (np.array([[True], [False]]), "in round 1"),
    "an array of three dimensions": (np.zeros((2, 1, 1), int), "in round 1"),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_of_cohorts_that_is_none(case):
    cohorts, said = SCHEDULES[case]
    with pytest.raises(InputError) as error:
        fs.simulate(**ASK, cohorts=cohorts)
    one_line(error, "cohorts must", said)


@pytest.mark.parametrize(
    "cohorts", [[(3,), []], np.array([[0, 1], [2, 3]], np.uint8), [np.array([0]), range(4)]]
)
def test_a_schedule_of_cohorts_in_any_kind_of_row(cohorts):
    run = fs.simulate(**ASK, cohorts=cohorts)
    assert run.rounds == 2
    assert run.residual < 1e-6


ARRAYS = {
    "local_steps": (
        [1, 2, 3],
        [1, 2, 3, True],
        [1, 2, 3, 4.0],
        [1, 2, 3, 0],
        [[1, 2], [3]],
        [[1, 2, 3, 4]],
        [1, 2, 3, None],
        np.ones(4),
        np.ones(4, bool),
        np.array([1, 2, 3, 2**31]),
        lambda i: 2,
        {},
        [],
        2**31,
        2**31 + 0.5,
    ),
    "availability": (
        [[1, 0]],
        [1, 0, 2, 1],
        [[1, 0, 1, 1], [1]],
        [["a", "b", "c", "d"]],
        np.full((2, 4), nan),
        lambda r: 1,
        lambda: 1,
        {},
        [],
        [[0, 0, 0, 0]],
        [None] * 4,
        np.ones((1, 1, 4)),
    ),
    "weights": (
        [1, 2],
        [1, 2, 3, -1],
        [0, 0, 0, 0],
        [1, nan, 1, 1],
        [1, inf, 1, 1],
        ["a"] * 4,
        [True, True, False, True],
        [[1], [2, 3]],
        lambda: 1,
        {},
        None,
        5,
        "some",
        [1, 2, 3, None],
        [10**400, 1, 1, 1],
        [1j, 1, 1, 1],
    ),
    "stop_at": (
        "loss",
        "loss:x",
        ("loss", True),
        ("loss", nan),
        {"loss": 1, "gap": 2},
        5,
        ("other", 1),
        ("loss", None),
        [],
        "loss:inf",
    ),
    "metrics": ("loss", ["other"], [5], 5, [None]),
    "stale": (
        "decay",
        "decay:x",
        "decay:2",
        "drop:0",
        "drop:1.5",
        "drop:" + "9" * 5000,
        "other",
        5,
        None,
        "drop:nan",
        "refresh:1e400",
    ),
    "compression": (
        "top_k",
        "top_k:2",
        "quantise:1.5",
        "quantise:99",
        "other",
        5,
        "random_k:nan",
        np.array([1, 2]),
        {},
    ),
    "x0": (5, "a", [1.0], np.full(3, nan), np.zeros(2), lambda: 0, ["a", "b", "c"], {}),
    "precision": ("float16", 32, None, True),
    "draw": ("other", 5, True),
    "lr": (
        lambda k: nan,
        lambda k: -1,
        lambda k: "a",
        lambda k: True,
        [0.1],
        None,
        5e-324,
        1e-40,
        1e39,
        1e308,
        10**30 * 1e9,
        lambda k: 1e-40,
        lambda k: 1e39,
        lambda round: 1e-50,
        lambda round: 1e39,
    ),
    "client_state": ("other", 5, None),
    "evaluate_every": (2**31, 2**62),
    "server_optimizer": ("adam", {}, set(), 5, lambda: 0),
    "local_optimizer": ("adam", {}, set(), 5, lambda: 0),
    "sampling": (
        lambda round: [0],
        lambda: [0],
        lambda round, rng, more: [0],
        lambda round, rng: 1,
        lambda round, rng: None,
    ),
    "progress": (5, "", "no", 1.0, np.array([True, False]), []),
}


@pytest.mark.parametrize("where", ["records", "noise"])
def test_numbers_that_overflow_the_precision_of_a_run_are_refused(where):
    """As infinities they would be reported as divergence, with advice on the step size."""
    if where == "noise":
        problem = fs.problems.quadratic(**QUADRATIC | {"noise": 1e100})
    else:
        records = (np.array([[1.0], [-1e39]]), np.array([0.0, 1.0]))
        problem = fs.problems.linear([records, records])
    with pytest.raises(InputError) as error:
        fs.simulate(**{**ASK, "problem": problem, "metrics": []})
    one_line(error, where, "too large for float32")
    assert (
        fs.simulate(
            **{**ASK, "problem": problem, "metrics": [], "lr": 1e-100, "precision": "float64"}
        ).rounds
        == 2
    )


@pytest.mark.parametrize("key", ARRAYS)
def test_rows_and_words_that_are_none_are_refused_in_one_line(key):
    for value in ARRAYS[key]:
        with pytest.raises(InputError) as error:
            fs.simulate(**{**ASK, key: value})
        one_line(error)


def test_very_large_weights_are_shares_too():
    np.testing.assert_allclose(
        weights_of(PROBLEM, [1e308, 1e308, 1e308, 3e307]), np.array([1, 1, 1, 0.3]) / 3.3
    )


def test_true_is_not_one_even_where_one_was_asked_for_before():
    stale.drop(1)
    fs.scaffold(1)
    for ask in (
        lambda: stale.drop(True),
        lambda: stale.drop(1.0),
        lambda: fs.scaffold(True),
        lambda: fs.scaffold(1.0),
    ):
        with pytest.raises(InputError):
            ask()
    assert fs.scaffold(1) is fs.scaffold(1)


FORECASTS = {
    "a dimension": lambda: fs.problems.quadratic(dim=99_999_999_999),
    "clients": lambda: fs.problems.quadratic(num_clients=99_999_999_999),
    "a dialled one": lambda: fs.problems.dialled(dim=99_999_999_999),
    "features": lambda: fs.problems.two_datasets("linear", 2, dim=99_999_999_999),
    "records": lambda: fs.problems.two_datasets("logistic", 2, records=99_999_999_999),
    "a hidden layer": lambda: fs.problems.mlp(CLIENTS, 99_999_999_999_999),
    "classes": lambda: fs.problems.softmax(CLIENTS, classes=99_999_999_999_999),
    "states": lambda: fs.problems.garnet(99_999_999),
    "batches": lambda: fs.simulate(**{**ASK, "local_steps": 2**31 - 1}, batch_size=2**20),
    "a schedule": lambda: fs.simulate(**{**ASK, "local_steps": 2**31 - 1, "lr": lambda k: 0.1}),
}


@pytest.mark.parametrize("case", FORECASTS)
def test_what_does_not_fit_the_memory_is_refused_before_it_is_made(case):
    with pytest.raises(InputError, match="GB of memory, and this machine has") as error:
        FORECASTS[case]()
    one_line(error)
