"""The page on the reader's own model: its excerpts are the files', and mistakes with one's own model get one clear line."""

import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import InputError
from fedscaffold.deploy import JaxLearner, TorchLearner

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8")
EXTEND = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
EXCERPTS = re.findall(r"^<!-- (examples/\S+) -->\n```\w+\n(.*?)^```", PAGE + EXTEND, re.M | re.S)


def test_the_excerpts_are_what_the_files_say():
    for name, text in EXCERPTS:
        whole = (ROOT / name).read_text(encoding="utf-8")
        for part in text.split("\n...\n"):  # where lines are left out
            assert part.strip("\n") in whole, (name, part)
    shown = {name for name, _ in EXCERPTS}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py")}
    told = {name for name in there if name.startswith("examples/lora/")}  # in docs/torch-apps.md
    assert there - told <= shown, there - shown
    others = [
        text
        for text in re.findall(r"^```(?:python|toml)\n(.*?)^```", PAGE + EXTEND, re.M | re.S)
        if ">>>" not in text
    ]
    assert others == [text for _, text in EXCERPTS]  # no code but the files' and what doctest runs


CLIENTS = [(np.ones((4, 2)), np.ones(4)), (np.ones((4, 2)), np.zeros(4))]
RAGGED = [CLIENTS[0], (np.ones((3, 2)), np.zeros(3))]


def mean(w, batch):
    return ((batch[0] @ w - batch[1]) ** 2).mean()


def keyed(w, batch, key):
    if key is None:
        raise ValueError("no key")
    return mean(w, batch)


def vector(w, batch):
    return (batch[0] @ w - batch[1]) ** 2


def tried(loss, clients):
    fs.simulate(
        fs.scaffold(), fs.Problem(loss, np.zeros(2), clients), rounds=1, local_steps=2, lr=0.1
    )


def problem(params):
    return fs.Problem(mean, params, CLIENTS)


def deployed(learner, loss, array):
    """A site's loss is measured."""
    one = learner(loss, lambda site: tuple(array(part) for part in CLIENTS[0]))
    one.site("here").evaluate(one.start, one.buffers)


def by_torch():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 1).double()
    model = partial(TorchLearner, lambda: module, precision="float64")
    deployed(model, lambda module, batch: module(batch[0])[:, 0] - batch[1], torch.from_numpy)


class Frame(np.ndarray):
    """A table whose columns have names, as far as the library looks at it."""

    @classmethod
    def of(cls, names):
        made = np.ones((3, len(names))).view(cls)
        made.columns = names
        return made


VECTOR = "loss(params, batch) must be one number, the mean over the batch's records, got shape ({},); end it with .mean()"
FLOATS = "params must hold floating-point numbers only, got {}; write 0.0 for 0, and keep what is not trained out of params"
SHAPES = "the clients' arrays must all have the same structure and row shape: "
NO_RECORDS = "client 1 holds no records; every client needs at least one, so leave it out"
EMPTY = [CLIENTS[0], (np.ones((0, 2)), np.ones(0))]
WORDS = [CLIENTS[0], (np.ones((2, 2)), np.array(["well", "ill"]))]
MISTAKES = {
    "a vector for a loss": (lambda: tried(vector, CLIENTS), VECTOR.format(4)),
    "a vector for a loss, clients unequal": (lambda: tried(vector, RAGGED), VECTOR.format(4)),
    "a loss of three arguments": (
        lambda: fs.Problem(lambda params, x, y: 0.0, np.zeros(2), CLIENTS),
        "loss must take (params, batch), and may take weights, key, state and train by name, got (params, x, y); unpack the batch inside it: x, y = batch",
    ),
    "a loss of three arguments, deployed": (
        lambda: JaxLearner(lambda params, x, y: 0.0, np.zeros(2), lambda site: CLIENTS[0]),
        "loss must take (params, batch), and may take weights, key, state and train by name, got (params, x, y); unpack the batch inside it: x, y = batch",
    ),
    "a loss that needs its key": (
        lambda: fs.Problem(keyed, np.zeros(2), CLIENTS).kinds,
        "loss must run with key=None, as it is measured without randomness: draw random numbers only where key is not None; "
        "it said ValueError: no key",
    ),
    "a vector for a loss, deployed": (
        lambda: deployed(
            lambda loss, data: JaxLearner(loss, np.zeros(2), data), vector, np.asarray
        ),
        VECTOR.format(4),
    ),
    "a vector for a loss, in torch": (by_torch, VECTOR.format(4).replace("params", "module")),
    "whole numbers": (lambda: problem({"w": np.zeros(2, int)}), FLOATS.format("int64 in ['w']")),
    "a whole number": (lambda: problem([np.zeros(2), 3]), FLOATS.format("int64 in [1]")),
    "a function among the arrays": (
        lambda: problem({"w": np.zeros(2), "f": abs}),
        FLOATS.format("builtin_function_or_method in ['f']"),
    ),
    "a random key": (
        lambda: problem({"w": np.zeros(2), "key": jax.random.key(0)}),
        FLOATS.format("key<fry> in ['key']"),
    ),
    "no arrays": (
        lambda: problem({}),
        "params must hold at least one array of floating-point numbers, got none",
    ),
    "no records": (lambda: fs.Problem(mean, np.zeros(2), EMPTY), NO_RECORDS),
    "no records, linear": (lambda: fs.problems.linear(EMPTY), NO_RECORDS),
    "no records, logistic": (lambda: fs.problems.logistic(EMPTY), NO_RECORDS),
    "no records, softmax": (lambda: fs.problems.softmax(EMPTY), NO_RECORDS),
    "no records, mlp": (lambda: fs.problems.mlp(EMPTY), NO_RECORDS),
    "nobody": (
        lambda: fs.problems.linear([]),
        "clients must hold at least one client, got an empty list",
    ),
    "a column less": (
        lambda: fs.problems.linear([CLIENTS[0], (np.ones((4, 1)), np.ones(4))]),
        SHAPES + "client 1 holds rows of shape (1,) in [0], client 0 of shape (2,)",
    ),
    "a column that is called otherwise": (
        lambda: fs.Problem(mean, np.zeros(2), [{"age": np.ones(2)}, {"Age": np.ones(2)}]),
        SHAPES + "client 1 lacks ['age'], which client 0 has",
    ),
    "a column more": (
        lambda: fs.Problem(
            mean, np.zeros(2), [{"age": np.ones(2)}, {"age": np.ones(2), "id": np.ones(2)}]
        ),
        SHAPES + "client 1 has ['id'], which client 0 lacks",
    ),
    "columns in another order": (
        lambda: fs.problems.linear(
            [(Frame.of(["age", "bmi"]), np.ones(3)), (Frame.of(["bmi", "age"]), np.ones(3))]
        ),
        "client 1 has the columns ['bmi', 'age'], client 0 has ['age', 'bmi']; give all the same, in the same order: frame[names]",
    ),
    "columns in another order, one's own loss": (
        lambda: fs.Problem(mean, np.zeros(2), [Frame.of(["age", "bmi"]), Frame.of(["age", "BMI"])]),
        "client 1 has the columns ['age', 'BMI'], client 0 has ['age', 'bmi']; give all the same, in the same order: frame[names]",
    ),
    "words for labels": (
        lambda: fs.problems.softmax(WORDS),
        "the data of client 1 must be numbers, got 'well' in [1]; encode what is not a number, or leave it out",
    ),
    "words for labels, one's own loss": (
        lambda: fs.Problem(mean, np.zeros(2), [WORDS[1]]),
        "the clients' data must be numbers, got 'well' in [1]; encode what is not a number, or leave it out",
    ),
    "labels of two columns": (
        lambda: fs.problems.softmax([(np.ones((2, 2)), np.ones((2, 2)))]),
        "clients must be a list of (x, y) with x of shape (records, features) and y of shape (records,), "
        "got [(2, 2), (2, 2)] of client 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_ones_own_model_gets_one_clear_line(mistake):
    wrong, line = MISTAKES[mistake]
    with pytest.raises(InputError) as refusal:
        wrong()
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    "said", re.findall(r"^\| .* \| (.*) \|$", PAGE.split("## When something is wrong")[1], re.M)[1:]
)
def test_what_the_page_says_is_said(said):
    assert any(line.endswith(said) for _, line in MISTAKES.values())


def test_tables_with_columns_are_clients_as_they_are():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 2)), rng.normal(size=9)
    frames = [pandas.DataFrame(x[rows], columns=["age", "bmi"]) for rows in (slice(4), slice(4, 9))]
    held = [
        (frame, pandas.Series(part)) for frame, part in zip(frames, (y[:4], y[4:]), strict=True)
    ]
    plain = fs.problems.linear([(x[:4], y[:4]), (x[4:], y[4:])])
    np.testing.assert_allclose(fs.problems.linear(held).optimum(), plain.optimum(), rtol=1e-13)
    np.testing.assert_array_equal(fs.Problem(mean, np.zeros(2), held).records[0], x)
    mixed = [
        (frame.assign(smokes=frame.age > 0), part) for frame, part in held
    ]  # to NumPy these are objects
    assert (
        fs.problems.linear(mixed).records[0][:, 2].tolist() == (x[:, 0] > 0).astype(float).tolist()
    )
    assert fs.Problem(mean, np.zeros(3), mixed).records[0].dtype == np.float64
    with pytest.raises(InputError, match=r"client 1 has the columns \['bmi', 'age'\]"):
        fs.problems.linear([held[0], (frames[1][["bmi", "age"]], held[1][1])])
