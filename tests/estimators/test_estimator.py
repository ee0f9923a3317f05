"""The estimators: scikit-learn's own checks, models known otherwise, and rounds that go on where they stopped."""

import numpy as np
import pytest
import scipy.sparse
import sklearn
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedscaffold as fs
from fedscaffold import InputError

RNG = np.random.default_rng(0)
OWNERS = RNG.permutation(np.repeat(["north", "east", "west"], [12, 18, 30]))
X = RNG.normal(size=(60, 3)) + np.where(OWNERS == "east", 0.5, 0.0)[:, None]
Y = X @ [1.0, -2.0, 0.5] + 0.3 + np.where(OWNERS == "west", 1.0, 0.0) + 0.1 * RNG.normal(size=60)
WORDS = np.array(["bad", "fair", "good"])[np.digitize(Y, [-0.7, 1.2])]
L2 = 0.1


# What does not apply: there is no `sample_weight` (weights belong to clients), so scikit-learn leaves out the checks of
# it; sparse input is refused, which is what its checks ask of dense estimators; the checks of pandas and of the array
# API skip themselves where these are not installed.
@pytest.mark.slow
@parametrize_with_checks(
    [
        fs.FederatedClassifier(rounds=20, local_steps=5),
        fs.FederatedRegressor(rounds=20, local_steps=5),
    ]
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_accepts_them(estimator, check):
    check(estimator)


def regressor(**changes):
    usual = {"rounds": 300, "local_steps": 5, "precision": "float64"}
    return fs.FederatedRegressor(**{**usual, **changes})


def classifier(**changes):
    usual = {"rounds": 300, "local_steps": 5, "precision": "float64", "l2": L2}
    return fs.FederatedClassifier(**{**usual, **changes})


@pytest.mark.slow
def test_the_regressor_finds_the_line_that_pooled_rows_have():
    model = regressor().fit(X, Y, clients=OWNERS)
    pooled = LinearRegression().fit(X, Y)
    np.testing.assert_allclose(model.coef_, pooled.coef_, atol=1e-8)
    assert model.intercept_ == pytest.approx(pooled.intercept_, abs=1e-8)
    assert model.score(X, Y) == pytest.approx(pooled.score(X, Y), abs=1e-10)
    assert model.clients_.tolist() == ["east", "north", "west"]
    assert model.residual_ < 1e-12
    # FedAvg stops beside it: the parameter reaches the algorithm
    drifted = regressor(algorithm="fedavg").fit(X, Y, clients=OWNERS)
    assert np.abs(drifted.coef_ - pooled.coef_).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["records", "equal", [1.0, 0.0, 3.0]])
def test_the_classifier_ends_where_the_weighted_gradient_is_zero(weights):
    model = classifier(weights=weights).fit(X, WORDS, clients=OWNERS)
    counts = np.array([18, 12, 30])
    p = {"records": counts / 60, "equal": np.ones(3) / 3}.get(
        weights if isinstance(weights, str) else "", np.array([0.25, 0, 0.75])
    )
    share = (p / counts)[np.searchsorted(model.clients_, OWNERS)]
    error = share[:, None] * (model.predict_proba(X) - (WORDS[:, None] == model.classes_))
    gradient = error.T @ np.hstack([X, np.ones((60, 1))])
    held = np.hstack([model.params_["w"], model.params_["b"][:, None]])
    np.testing.assert_allclose(gradient, -L2 * held, atol=1e-6)  # rows are kept in float32


@pytest.mark.slow
def test_logistic_is_softmax_with_half_the_penalty_and_the_difference_of_the_scores():
    two = WORDS == "good"
    logistic = classifier(model="logistic").fit(X, two, clients=OWNERS)
    softmax = classifier(l2=2 * L2).fit(X, two, clients=OWNERS)
    np.testing.assert_allclose(logistic.predict_proba(X), softmax.predict_proba(X), atol=1e-5)
    with pytest.raises(InputError, match="two classes, got 3; use model='softmax'"):
        classifier(model="logistic").fit(X, WORDS)


@pytest.mark.slow
def test_a_network_learns_what_a_plane_cannot():
    angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    ring = np.tile([0.5, 1.5], 30)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    inside = np.tile([True, False], 30)
    owners = np.arange(60) // 20
    network = fs.FederatedClassifier(model="mlp:16", rounds=150, local_steps=5, lr=0.3).fit(
        ring, inside, clients=owners
    )
    assert network.score(ring, inside) == 1.0
    np.testing.assert_allclose(network.predict_proba(ring).sum(axis=1), 1.0)


def sampled(**changes):
    return classifier(cohort=2, batch_size=4, random_state=7, lr=0.1, **changes)


@pytest.mark.slow
def test_one_round_more_is_the_round_that_fit_would_have_run():
    whole = sampled(rounds=6).fit(X, WORDS, clients=OWNERS)
    parts = sampled(rounds=4).fit(X, WORDS, clients=OWNERS)
    for _ in range(2):
        parts.partial_fit(X, WORDS, clients=OWNERS)
    assert parts.n_iter_ == whole.n_iter_ == 6
    np.testing.assert_array_equal(parts.params_["w"], whole.params_["w"])
    for name in ("round", "loss", "bytes_up"):
        np.testing.assert_array_equal(parts.history_[name], whole.history_[name])
    alone = sampled()
    for _ in range(6):
        alone.partial_fit(X, WORDS, clients=OWNERS)
    np.testing.assert_array_equal(alone.params_["w"], whole.params_["w"])
    assert parts.fit(X, WORDS, clients=OWNERS).n_iter_ == 4  # fit forgets


def test_it_is_the_simulator_that_trains():
    model = sampled(rounds=6, weights="equal").fit(X, WORDS, clients=OWNERS)
    labels = np.unique(WORDS, return_inverse=True)[1]
    clients = [
        (X[rows], labels[rows]) for rows in (who == OWNERS for who in ("east", "north", "west"))
    ]
    problem = fs.problems.softmax(clients, classes=3, l2=L2)
    run = fs.simulate(
        fs.scaffold(),
        problem,
        rounds=6,
        local_steps=5,
        lr=0.1,
        cohort=2,
        batch_size=4,
        seed=7,
        precision="float64",
        metrics=["loss"],
    )
    np.testing.assert_array_equal(model.params_["w"], run.x["w"])
    np.testing.assert_array_equal(model.history_["loss"], run.history["loss"])
    given = sampled(rounds=6, weights="equal", algorithm=fs.scaffold()).fit(
        X, WORDS, clients=OWNERS
    )
    np.testing.assert_array_equal(
        clone(given).fit(X, WORDS, clients=OWNERS).params_["w"], run.x["w"]
    )


def test_clients_may_come_and_go_and_c_stays_the_mean():
    model = classifier(rounds=5).fit(X, WORDS, clients=OWNERS)
    kept = dict(zip(model.clients_, model._training.memory.c_i, strict=True))
    there = OWNERS != "north"
    moved = np.where(OWNERS == "west", "zenith", OWNERS)
    model.partial_fit(X[there], WORDS[there], clients=moved[there])
    assert model.clients_.tolist() == ["east", "zenith"]
    assert model.residual_ < 1e-14
    assert model.n_iter_ == 6
    assert not np.array_equal(model._training.memory.c_i[0], kept["east"])


def test_in_a_pipeline_each_row_keeps_its_owner():
    pipe = make_pipeline(StandardScaler(), regressor(rounds=20))
    pipe.fit(X, Y, federatedregressor__clients=OWNERS)
    by_hand = regressor(rounds=20).fit(StandardScaler().fit_transform(X), Y, clients=OWNERS)
    np.testing.assert_array_equal(pipe[-1].coef_, by_hand.coef_)
    with sklearn.config_context(enable_metadata_routing=True):
        routed = make_pipeline(StandardScaler(), regressor(rounds=20).set_fit_request(clients=True))
        routed.fit(X, Y, clients=OWNERS)
    np.testing.assert_array_equal(routed[-1].coef_, by_hand.coef_)


@pytest.fixture
def clinic():
    """Somebody's table: numbers and words, labels in words, an index of its own, twenty rows from each of three sites."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"age": 50 + 10 * X[:, 0], "bmi": 25 + 4 * X[:, 1], "sex": np.where(X[:, 2] > 0, "f", "m")}
    )
    frame.index = RNG.permutation(60) + 1000
    ill = pandas.Series(np.where(X[:, 0] - X[:, 1] > 0, "ill", "well"), index=frame.index)
    return frame, ill, pandas.Series(np.repeat(["north", "south", "west"], 20), index=frame.index)


def table_pipeline(**changes):
    columns = ColumnTransformer(
        [("n", StandardScaler(), ["age", "bmi"]), ("w", OneHotEncoder(), ["sex"])]
    )
    return Pipeline(
        [
            ("columns", columns),
            ("model", fs.FederatedClassifier(rounds=20, local_steps=5, **changes)),
        ]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::sklearn.exceptions.FitFailedWarning",
    "ignore:One or more of the test scores are non-finite",
)
def test_in_somebody_elses_pipeline(clinic):
    frame, ill, sites = clinic
    pipe = table_pipeline().fit(frame, ill, model__clients=sites)
    by_hand = np.column_stack(
        [StandardScaler().fit_transform(frame[["age", "bmi"]]), frame.sex == "f", frame.sex == "m"]
    )
    plain = fs.FederatedClassifier(rounds=20, local_steps=5).fit(
        by_hand, ill.to_numpy(), clients=sites.to_numpy()
    )
    np.testing.assert_array_equal(pipe.predict_proba(frame), plain.predict_proba(by_hand))
    assert pipe.classes_.tolist() == ["ill", "well"]
    assert pipe.score(frame, ill) > 0.9
    # whole sites kept apart: each fold is the other two, fitted by hand
    scores = cross_val_score(
        pipe, frame, ill, groups=sites, cv=GroupKFold(3), params={"model__clients": sites}
    )
    expected = []
    for site in ("west", "south", "north"):
        there = sites != site
        alone = table_pipeline().fit(frame[there], ill[there], model__clients=sites[there])
        assert alone[-1].clients_.tolist() == sorted({"north", "south", "west"} - {site})
        expected.append(alone.score(frame[~there], ill[~there]))
    assert sorted(scores) == sorted(expected)
    # the same by routing, and in a search over step sizes and algorithms, one of which diverges
    with sklearn.config_context(enable_metadata_routing=True):
        routed = table_pipeline()
        routed[-1].set_fit_request(clients=True)
        grid = {"model__lr": ["auto", 1e30], "model__algorithm": ["scaffold", fs.scaffold()]}
        search = GridSearchCV(routed, grid, cv=GroupKFold(3)).fit(
            frame, ill, clients=sites, groups=sites
        )
    assert search.best_params_["model__lr"] == "auto"
    found = search.cv_results_["mean_test_score"]
    np.testing.assert_array_equal(found[[0, 2]], np.mean(scores))
    assert np.isnan(found[[1, 3]]).all()


def test_owners_that_are_missing_or_of_two_kinds(clinic):
    frame, _, sites = clinic
    pandas = pytest.importorskip("pandas")
    for without in (
        sites.where(sites != "west", None),
        sites.astype("string").where(sites != "west", pandas.NA),
    ):
        with pytest.raises(
            InputError, match=r"of every row who holds it, got 20 without \(NaN or None\); give"
        ):
            regressor().fit(frame[["age"]], Y, clients=without)
    with pytest.raises(InputError, match="all of one kind, got int, str; make them str"):
        regressor().fit(frame[["age"]], Y, clients=pandas.Series([1, "two"] * 30))
    with pytest.raises(TypeError, match="Sparse data was passed for X, but dense data is required"):
        regressor().fit(scipy.sparse.csr_array(X), Y)


def test_a_mistake_loses_nothing():
    model = regressor(rounds=5).fit(X, Y, clients=OWNERS)
    coef, rounds = model.coef_, model.n_iter_
    model.set_params(lr=1e200)
    with pytest.raises(
        InputError, match=r"diverged at round \d: lr 1e\+200 is above 2/L = .*; try "
    ):
        model.partial_fit(X, Y, clients=OWNERS)
    with pytest.raises(InputError, match=r"each of the 60 rows who holds it, got shape \(59,\)"):
        model.partial_fit(X, Y, clients=OWNERS[1:])
    np.testing.assert_array_equal(model.coef_, coef)
    model.set_params(lr="auto").partial_fit(X, Y, clients=OWNERS)
    assert model.n_iter_ == rounds + 1
    words = classifier(rounds=5).fit(X, WORDS, clients=OWNERS)
    with pytest.raises(
        InputError, match=r"not among the classes \['bad', 'fair', 'good'\]: \['odd'\]"
    ):
        words.partial_fit(X, np.where(WORDS == "bad", "odd", WORDS))
    with pytest.raises(InputError, match="did you mean 'scaffold'"):
        regressor(algorithm="scafold").fit(X, Y)
    with pytest.raises(InputError, match="lr must be a number above 0 or 'auto', got 'fast'"):
        regressor(lr="fast").fit(X, Y)
    with pytest.raises(InputError, match=r"unknown parameter of fedprox 'muu' .did you mean 'mu'"):
        regressor(algorithm="fedprox", algorithm_params={"muu": 1.0}).fit(X, Y)
