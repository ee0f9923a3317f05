"""Data, batches and steps as torch users write them, at a site: equal to plain NumPy and to the simulator."""

import logging
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from deploy_case import RECORDS, SITES, START, data, gradient, learner, settings

import fedscaffold as fs
from fedscaffold.algorithms import reference, scaffold
from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.app_imports import PREFIX
from fedscaffold.deploy.audit import read_verified
from fedscaffold.deploy.client import Work, greeting
from fedscaffold.deploy.schema import digest_of
from fedscaffold.deploy.settings import Local

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset  # noqa: E402

from fedscaffold.deploy.torch_client import PlainSGD, TorchLearner  # noqa: E402
from fedscaffold.deploy.torch_data import open_records  # noqa: E402

SHIFT = np.array([0.3, -0.2])


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(START))


def loss(module, batch):
    a, b = batch
    return (a * (module.w - b) ** 2).sum(dim=1).mean() / 2


def of_dict(module, batch):
    return loss(module, (batch["a"], batch["of"][0]))


def tensors(site):
    return tuple(torch.from_numpy(a) for a in data(site))


def point(loss=loss, data=tensors, **more):
    return TorchLearner(Point, loss, data, precision="float64", **more)


def run(config, one, folder, rounds=3):
    server = Server(config, one.schema, one.start, folder, buffers=one.buffers)
    return server, drive(server, InProcess(one, config, folder), rounds, sleep=lambda s: None)


def train(one, site="elk", shift=SHIFT, round=1, **local):
    work = Work(one.start, shift, scaffold(), Local(**local), 5, one.buffers, None, round)
    return one.site(site).train(work)


# Data


class Pairs(NamedTuple):
    a: object
    b: object


class Rows(Dataset):
    def __init__(self, site):
        self.columns = data(site)

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, row):
        return tuple(column[row] for column in self.columns)


GIVEN = {
    "arrays": (loss, data),
    "named": (lambda m, b: loss(m, (b.a, b.b)), lambda site: Pairs(*tensors(site))),
    "dict": (of_dict, lambda site: {"a": data(site)[0], "of": (tensors(site)[1],)}),
    "dataset": (loss, Rows),
    "tensor dataset": (loss, lambda site: TensorDataset(*tensors(site))),
    "list of records": (loss, lambda site: list(TensorDataset(*tensors(site)))),
    "single": (lambda m, b: loss(m, (b[:, :2], b[:, 2:])), lambda s: torch.cat(tensors(s), dim=1)),
}


LOCAL = ["epochs = 2\nbatch_size = 2", "steps = 4\nbatch_size = 3", ""]
# arrays with each kind of work, other records with one of them in turn: they are read before any batch is drawn
KINDS_OF_WORK = [
    pytest.param(kind, local, marks=() if k == 0 or j == k % 3 else pytest.mark.soak)
    for k, kind in enumerate(GIVEN)
    for j, local in enumerate(LOCAL)
]


@pytest.mark.parametrize(("kind", "local"), KINDS_OF_WORK)
def test_records_of_any_kind_are_the_same_run(kind, local, folder):
    config = settings(local=f"{local}\nlr = 0.1", algorithm="name = 'scaffold'\noption = 1")
    mine, said = run(config, point(*GIVEN[kind]), folder / "torch")
    plain, other = run(config, learner(), folder / "numpy")
    np.testing.assert_allclose(mine.state.x, plain.state.x, rtol=0, atol=1e-12)
    assert said.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-12)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(*tensors("elk")))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Stream(), "is an IterableDataset.*give list"),
        (DataLoader(Stream(), 2), "is an IterableDataset.*give list"),
        (list(tensors("elk")), "list of tensors.*tuple"),
        ((torch.ones(3), torch.ones(4)), r"one row per record each, got lengths \[3, 4\]"),
        ((torch.ones(3), "words"), "got str among them: give a tuple or dict"),
        (iter([1]), "is of type list_iterator: give a tuple or dict of tensors"),
        ({}, "holds no records"),
        (TensorDataset(torch.zeros(0, 2)), "holds no records"),
    ],
)
def test_data_that_cannot_be_batched_is_refused_by_name(given, said):
    with pytest.raises(InputError, match=said) as refusal:
        point(data=lambda site: given).site("elk")
    assert "\n" not in str(refusal.value)


def ragged(batch):
    """Columns first, as recurrent networks take them, so that lengths are not numbers of records."""
    a, b = torch.utils.data.default_collate(batch)
    return {"a": a, "of": [b.T, ["words"] * len(a)]}


def test_a_loader_with_its_own_collation_is_weighed_by_records():
    def turned(module, batch):
        return loss(module, (batch["a"], batch["of"][0].T))

    one = point(turned, lambda s: DataLoader(TensorDataset(*tensors(s)), 4, collate_fn=ragged))
    measured = one.site("elk").evaluate(one.start, {})
    whole = point().site("elk").evaluate(one.start, {})
    assert RECORDS["elk"] % 4
    assert measured["loss"] == pytest.approx(whole["loss"], abs=1e-13)
    work = Work(one.start, SHIFT, scaffold(option=1), Local(steps=1, lr=0.1), 5, {})
    np.testing.assert_allclose(
        one.site("elk").train(work).walk.gradient,
        gradient({"w": START}, data("elk"))["w"],
        atol=1e-13,
    )


def test_records_that_cannot_be_counted_are_refused():
    by_hand = [[0, 1, 2], [3, 4, 5]]
    one = point(
        data=lambda s: DataLoader(
            TensorDataset(*tensors(s)), batch_sampler=by_hand, collate_fn=ragged
        )
    )
    with pytest.raises(InputError, match=r"cannot be counted: its tensors have \[2, 3\] rows"):
        one.site("elk").evaluate(one.start, {})


# a loader's workers are forked, and JAX, which sites with torch do not import, warns of that
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_drops_records_is_measured_on_all(workers):
    def loader(site):
        more = {"shuffle": True, "drop_last": True, "num_workers": workers}
        return DataLoader(TensorDataset(*tensors(site)), 4, **more)

    one = point(data=loader)
    assert one.site("elk").evaluate(one.start, {})["loss"] == pytest.approx(
        point().site("elk").evaluate(one.start, {})["loss"], abs=1e-13
    )


# Evaluation


def test_evaluation_is_in_batches_and_exact():
    rows, seen = 1000, []
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(rows, 2)) ** 2, rng.normal(size=(rows, 2))

    def watched(module, batch):
        seen.append(len(batch["a"]))
        return of_dict(module, batch)

    def metrics(module, batch):
        return {"sign": (batch["a"][:, 0] > 0.5).double().mean().item()}

    one = point(watched, lambda site: {"a": a, "of": [b]}, metrics=metrics)
    measured = one.site("elk").evaluate(one.start, {})
    assert max(seen) <= 256
    expected = (a * (START - b) ** 2).sum(axis=1).mean() / 2
    assert measured["loss"] == pytest.approx(expected, rel=1e-13)
    assert measured["sign"] == pytest.approx((a[:, 0] > 0.5).mean(), rel=1e-13)


def test_a_metric_that_small_batches_do_not_have_is_measured_at_once():
    rows = 700
    x, y = torch.randn(rows, 2, dtype=torch.float64), torch.arange(rows) % 50 == 0

    def recall(module, batch):
        if not batch[1].any():
            raise ValueError("no such record")
        return {"recall": (batch[0][batch[1]][:, 0] > 0).double().mean().item()}

    def square(module, batch):
        return ((module.w - batch[0]) ** 2).mean()

    one = point(square, lambda site: (x, y), metrics=recall)
    found = one.site("elk").evaluate(one.start, {})["recall"]
    assert found == pytest.approx((x[y][:, 0] > 0).double().mean().item(), rel=1e-13)


@pytest.mark.parametrize(
    ("kind", "rows"), [("tensors", 700), ("dataset", 700), ("loader", 700), ("loader", 90)]
)
def test_what_couples_records_is_measured_at_once_and_says_so(kind, rows, caplog):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 2)), rng.integers(0, 2, rows)
    weights = torch.tensor([1.0, 5.0], dtype=torch.float64)

    def weighed(module, batch):
        x, y = batch
        return nn.functional.cross_entropy(x * module.w, y, weight=weights)

    def given(site):
        pair = torch.from_numpy(x), torch.from_numpy(y)
        made = {"tensors": lambda: pair, "dataset": lambda: TensorDataset(*pair)}
        return made.get(kind, lambda: DataLoader(TensorDataset(*pair), 64, shuffle=True))()

    one = point(weighed, given)
    with caplog.at_level(logging.WARNING, "fedscaffold"):
        found = one.site("elk").evaluate(one.start, {})["loss"]
    expected = weighed(one.module, (torch.from_numpy(x), torch.from_numpy(y))).item()
    assert found == pytest.approx(expected, rel=1e-13)
    assert f"no mean over records (loss): {rows} records are measured all at once" in caplog.text
    declared = point(weighed, given, coupled=False).site("elk").evaluate(one.start, {})["loss"]
    assert abs(declared - expected) > 1e-6


@pytest.mark.parametrize("norm", [False, True])
def test_the_gradient_over_all_records_is_in_batches_where_that_is_exact(norm):
    rows, seen = 600, []
    made = torch.Generator().manual_seed(0)
    pair = [torch.randn(rows, n, generator=made, dtype=torch.float64) for n in (4, 1)]

    def watched(module, batch):
        seen.append(len(batch[0]))
        return squares(module, batch)

    model = normed if norm else lambda: nn.Linear(4, 1)
    one = TorchLearner(model, watched, lambda site: tuple(pair), precision="float64")
    buffers = {name: one.buffers[name] for name, *_ in one.schema.buffers}
    zero = np.zeros_like(one.start)
    local = Local(steps=1, batch_size=5, lr=0.1)
    done = one.site("elk").train(Work(one.start, zero, scaffold(option=1), local, 5, buffers))
    fresh = TorchLearner(model, squares, lambda site: tuple(pair), precision="float64").module
    squares(fresh.train(), pair).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in fresh.parameters()]).numpy()
    np.testing.assert_allclose(done.walk.gradient, expected, rtol=0, atol=1e-13)
    assert (max(seen) == rows) == norm


# Steps


def by_hand(batches, lrs, clip=None, advance=None):
    """The local steps from START with SHIFT, by the reference; returns y and the mean of g + SHIFT."""

    def clipped(d, lr):
        norm = np.linalg.norm(d)
        d = d if norm <= clip else d * clip / norm
        return lr * d if advance is None else advance(d, lr)

    walk = reference.descend(
        scaffold(),
        lambda y, batch: gradient({"w": y}, batch)["w"],
        START,
        START,
        SHIFT,
        lrs=lrs,
        batches=batches,
        advance=advance if clip is None else clipped,
    )
    return walk.y, walk.d


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "own"])
@pytest.mark.parametrize("most", [0.7, 1e6])
def test_clipping_scales_steps_and_leaves_the_mean_direction(optimizer, most):
    advance = {"momentum": reference.heavy_ball(0.9), "adam": reference.adam()}.get(optimizer)
    y, d = by_hand([data("elk")] * 5, [0.1] * 5, most, advance)
    local = {"steps": 5, "lr": 0.1, "clip_norm": most, "optimizer": optimizer}
    one = point(optimizer=lambda module, lr: torch.optim.SGD(module.parameters(), lr))
    for learner_ in (one,) if optimizer == "own" else (one, learner()):
        done = train(learner_, **local)
        np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)
    if most < 1:
        moved = np.linalg.norm(START - y)
        assert optimizer != "sgd" or moved <= 5 * 0.1 * most * (1 + 1e-12)
        assert np.linalg.norm(d) > most


@pytest.mark.parametrize("keeper", ["server", "client"])
def test_clipped_federations_agree_and_keep_c(keeper, folder):
    config = settings(
        local="epochs = 2\nbatch_size = 2\nlr = 0.1\nclip_norm = 0.5", deploy=f"state = '{keeper}'"
    )
    mine, _ = run(config, point(), folder / "torch", rounds=5)
    plain, _ = run(config, learner(), folder / "numpy", rounds=5)
    np.testing.assert_allclose(mine.state.x, plain.state.x, rtol=0, atol=1e-12)
    assert keeper == "client" or mine.residual < 1e-12


@pytest.mark.parametrize("kind", ["tensors", "dataset"])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("draw", ["shuffle", "replacement"])
def test_accumulated_batches_are_one_large_batch(kind, drop, draw):
    """6 records, 2 batches of 2 to a step: as batches of 4, with the rest of the epoch by itself."""
    given = {"tensors": tensors, "dataset": Rows}[kind]
    local = {"epochs": 2, "lr": 0.1, "draw": draw, "drop_last": drop}
    mine = train(point(data=given, accumulate=2), batch_size=2, **local)
    large = train(learner(), batch_size=4, **(local | {"drop_last": False}))
    assert mine.steps == large.steps == 4
    np.testing.assert_allclose(mine.walk.y, large.walk.y, rtol=0, atol=1e-13)
    np.testing.assert_allclose(mine.walk.d, large.walk.d, rtol=0, atol=1e-12)


def test_accumulation_weighs_unequal_batches_by_records_and_a_loaders_too():
    def loader(site):
        return DataLoader(TensorDataset(*tensors(site)), 4)

    one = point(data=loader, accumulate=3)
    done = train(one, epochs=3, lr=0.1)  # batches of 4 and 2 to a step: all records
    y, d = by_hand([data("elk")] * 3, [0.1] * 3)
    assert done.steps == 3
    np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-13)
    np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


def test_accumulation_with_a_scaler_and_a_skipped_batch():
    def picky(module, batch):
        return None if len(batch[0]) == 2 else loss(module, batch)

    def loader(site):
        return DataLoader(TensorDataset(*tensors(site)), 4)

    first = tuple(column[:4] for column in data("elk"))
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=8.0)
    done = train(point(picky, loader, accumulate=2, scaler=scaler), epochs=2, lr=0.1)
    y, d = by_hand([first] * 2, [0.1] * 2)
    np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-13)
    np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


def test_accumulation_without_batches_is_refused():
    with pytest.raises(InputError, match=r"accumulate needs the batches of local\.batch_size"):
        train(point(accumulate=2), steps=3, lr=0.1)


def test_incomplete_batches_are_dropped_everywhere_alike(folder):
    config = settings(local="epochs = 2\nbatch_size = 2\nlr = 0.1\ndrop_last = true")
    mine, _ = run(config, point(), folder / "torch")
    plain, _ = run(config, learner(), folder / "numpy")
    np.testing.assert_allclose(mine.state.x, plain.state.x, rtol=0, atol=1e-12)
    assert train(point(), site="dog", epochs=2, batch_size=2, drop_last=True).steps == 4  # of 5
    assert train(point(), site="dog", epochs=2, batch_size=2).steps == 6


@pytest.mark.parametrize("torch_", [True, False])
def test_a_site_with_fewer_records_than_a_batch_is_told_what_to_do(torch_, folder):
    config = settings(local="epochs = 1\nbatch_size = 3\nlr = 0.1\ndrop_last = true")
    _, summary = run(config, point() if torch_ else learner(), folder)
    assert list(summary.missed) == ["ant"]
    said = summary.missed["ant"]["sentence"]
    assert "its 2 records are fewer than a batch of 3" in said
    assert "take a smaller local.batch_size" in said


def test_a_loader_without_batches_is_refused_rather_than_asked_for_ever():
    one = point(data=lambda s: DataLoader(TensorDataset(*tensors(s)), 64, drop_last=True))
    with pytest.raises(InputError, match="its DataLoader makes no batch of its 6 records"):
        train(one, steps=3, lr=0.1)


def test_workers_that_cannot_import_the_apps_modules_are_refused():
    class Rows(TensorDataset):
        __module__ = f"{PREFIX}0123.myrows"

    def loader(workers, context):
        rows = Rows(*tensors("bee"))
        return DataLoader(rows, 2, num_workers=workers, multiprocessing_context=context)

    said = r"workers by 'spawn', and they cannot import its dataset from the app's own myrows\.py"
    with pytest.raises(InputError, match=said):
        open_records("bee", loader(1, "spawn"))
    for fine in (loader(0, None), loader(1, "fork")):
        assert open_records("bee", fine).number == len(tensors("bee")[0])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "own"])
@pytest.mark.parametrize("keeper", ["server", "client"])
def test_step_sizes_by_rounds_are_the_simulators(optimizer, keeper, folder):
    table = "{ 1 = 0.2, 3 = 0.05 }"
    config = settings(
        local=f"steps = 3\nlr = {table}\noptimizer = '{optimizer}'", deploy=f"state = '{keeper}'"
    )
    own = point(optimizer=lambda module, lr: torch.optim.SGD(module.parameters(), lr))
    mine, _ = run(config, own, folder / "torch", rounds=5)
    if optimizer == "momentum":
        plain, _ = run(config, learner(), folder / "numpy", rounds=5)
        expected = plain.state.x
    else:
        problem = fs.Problem(
            lambda p, b: (b[0] * (p["w"] - b[1]) ** 2).sum(axis=1).mean() / 2,
            {"w": START},
            [data(site) for site in SITES],
        )
        lr = lambda round: 0.2 if round < 3 else 0.05  # noqa: E731
        more = {"rounds": 5, "local_steps": 3, "lr": lr, "precision": "float64"}
        expected = fs.simulate(fs.scaffold(), problem, **more, metrics=()).vector
    np.testing.assert_allclose(mine.state.x, expected, rtol=0, atol=1e-12)
    assert keeper == "client" or mine.residual < 1e-12


def test_a_scheduler_steps_with_the_optimiser():
    def optimizer(module, lr, round):
        made = torch.optim.SGD(module.parameters(), lr / round)
        return made, torch.optim.lr_scheduler.ExponentialLR(made, 0.5)

    one = point(optimizer=optimizer)
    done = train(one, steps=4, lr=0.2, optimizer="own", round=2)
    y, d = by_hand([data("elk")] * 4, [0.1, 0.05, 0.025, 0.0125])
    np.testing.assert_allclose(done.walk.y, y, rtol=0, atol=1e-13)
    np.testing.assert_allclose(done.walk.d, d, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ("lr = { 2 = 0.1 }", "begin with round 1"),
        ("lr = {}", "begin with round 1"),
        ("lr = { 1 = 0.1, 01 = 0.2 }", "name each once"),
        ("lr = { first = 0.1 }", "table of rounds such as"),
        ("lr = { 1 = -0.1 }", "local.lr of round 1 must be a number above 0, got -0.1"),
        ("clip_norm = 0", "local.clip_norm must be a number above 0, got 0"),
        ("drop_last = 1", "local.drop_last must be true or false, got 1"),
        ("drop_last = true", "local.drop_last needs local.batch_size"),
        ("schedule = []", "unknown key 'local.schedule'"),
    ],
)
def test_mistakes_in_the_settings_are_one_line(local, said):
    with pytest.raises(InputError, match=said) as refusal:
        settings(local=local)
    assert "\n" not in str(refusal.value)


def test_an_algorithm_of_plain_steps_refuses_clipping():
    with pytest.raises(InputError, match=r"needs no local\.clip_norm"):
        settings(local="clip_norm = 1.0", algorithm="name = 'scafcom'\nbeta = 0.3")


# Sites that are not like the others


def normed():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).mean()


def of_width(site, width=4, rows=8):
    made = torch.Generator().manual_seed(SITES.index(site))
    return torch.randn(rows, width, generator=made), torch.randn(rows, 1, generator=made)


def test_a_batch_of_one_record_under_batch_normalisation_is_said_with_the_way_out(folder):
    one = TorchLearner(
        normed, squares, lambda s: of_width(s, rows=9 if s == "bee" else 8), precision="float64"
    )
    local = "epochs = 1\nbatch_size = 4\nlr = 0.1"
    _, summary = run(settings(local=local), one, folder / "kept")
    assert list(summary.missed) == ["bee"]
    said = summary.missed["bee"]["sentence"]
    assert "step 3 has a batch of one record" in said
    assert "local.drop_last = true" in said
    _, dropped = run(settings(local=f"{local}\ndrop_last = true"), one, folder / "dropped")
    assert dropped.missed == {}


@pytest.mark.slow
def test_the_simulator_refuses_the_same_batch_with_the_way_out():
    problem = fs.problems.torch(normed, squares, [of_width("ant", rows=9), of_width("bee")])
    with pytest.raises(InputError, match=r"batch of one record.*batch_size"):
        fs.simulate(fs.scaffold(), problem, rounds=1, local_epochs=1, batch_size=4, lr=0.1)


@pytest.mark.parametrize("odd", ["ant", "cow"])
def test_another_width_is_the_sites_own_error(odd, folder):
    one = TorchLearner(
        normed, squares, lambda s: of_width(s, 5 if s == odd else 4), precision="float64"
    )
    _, summary = run(settings(local="epochs = 1\nbatch_size = 4\nlr = 0.1"), one, folder)
    assert summary.rounds == 3
    assert list(summary.missed) == [odd]
    assert summary.missed[odd]["never_counted"]
    assert f"{odd} never counted" in summary.missed[odd]["sentence"]


def test_a_gradient_of_another_width_is_the_sites_own_error_in_numpy(folder):
    """One number would be added to every entry of the model."""

    def narrow(params, batch):
        made = gradient(params, batch)["w"]
        return {"w": made[:1] if len(batch[0]) == RECORDS["bee"] else made}

    _, summary = run(settings(), learner(gradient=narrow), folder)
    assert list(summary.missed) == ["bee"]


# Resumed with another step size


def events(folder, kind):
    return [one for one in read_verified(folder / "audit.jsonl") if one["event"] == kind]


@pytest.mark.parametrize("keeper", ["server", "client"])
def test_a_step_size_may_change_for_the_rounds_to_come_on_purpose(keeper, folder):
    def config(lr, more=""):
        return settings(local=f"steps = 3\nlr = {lr}\n{more}", deploy=f"state = '{keeper}'")

    run(config("0.2"), learner(), folder / "one", rounds=2)
    for lr in ("0.05", "{ 1 = 0.05 }", "{ 1 = 0.2, 2 = 0.05 }"):
        with pytest.raises(InputError, match=r"write lr = \{ 1 = 0\.2, 3 = 0\.05 \}$"):
            run(config(lr), learner(), folder / "one", rounds=4)
    table = "{ 1 = 0.2, 3 = 0.05 }"
    with pytest.raises(InputError, match="another algorithm or local settings"):
        run(config(table, "momentum = 0.5"), learner(), folder / "one", rounds=4)
    mine, _ = run(config(table), learner(), folder / "one", rounds=4)
    planned, _ = run(config(table), learner(), folder / "two", rounds=4)
    assert mine.state.x.tobytes() == planned.state.x.tobytes()
    (event,) = events(folder / "one", "settings")
    assert event["note"] == (
        "after round 2 local.lr is { 1 = 0.2, 3 = 0.05 }, where it was { 1 = 0.2 }"
    )
    assert events(folder / "two", "settings") == []
    run(config(table), learner(), folder / "one", rounds=5)
    assert len(events(folder / "one", "settings")) == 1


def test_states_of_settings_without_the_newer_keys_are_still_theirs():
    """The digest of version 0.1.0: eight keys of [local], and nothing of those that came later."""
    config = settings(local="epochs = 2\nbatch_size = 2\nlr = 0.1")
    words = [config.seed, config.precision, config.algorithm, list(config.local)[:8], "server"]
    assert config.digest == digest_of(words)
    for newer in ("clip_norm = 1.0", "drop_last = true", "draw = 'shuffle'"):
        other = settings(local=f"epochs = 2\nbatch_size = 2\nlr = 0.1\n{newer}")
        assert other.digest != config.digest


def test_before_the_first_round_any_step_size_will_do(folder):
    one = learner()
    first = Server(settings(local="lr = 0.2"), one.schema, one.start, folder)
    first.hello("ant", greeting(one, first.settings, "ant"))
    again = Server(settings(local="lr = 0.1"), one.schema, one.start, folder)
    assert (again.state.round, list(again.roster)) == (0, ["ant"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_sgd_has_the_bits_of_torchs(dtype):
    """From gradients of all sizes; torch's own is imported only where something else is asked for."""
    torch.manual_seed(0)
    start = torch.randn(1000).to(dtype) * 10.0 ** torch.randint(-3, 4, (1000,))
    ours, theirs = (torch.nn.Parameter(start.to(dtype).clone()) for _ in range(2))
    steps, optimizer = PlainSGD([ours], 0.3), torch.optim.SGD([theirs], lr=0.3)
    done = []
    steps.register_step_post_hook(lambda: done.append(1))
    for _ in range(5):
        ours.grad = torch.randn(1000).to(dtype)
        theirs.grad = ours.grad.clone()
        steps.step()
        optimizer.step()
    assert torch.equal(ours, theirs)
    assert len(done) == 5
