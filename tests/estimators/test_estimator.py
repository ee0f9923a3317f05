"""The estimators: scikit-learn's own checks, models known otherwise, and rounds that go on where they stopped."""

import pickle  # noqa: TID251 (users pickle estimators)

import jax
import numpy as np
import pytest
import scipy.sparse
import sklearn
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import fedscaffold as fs
from fedscaffold import InputError

RNG = np.random.default_rng(0)
OWNERS = RNG.permutation(np.repeat(["north", "east", "west"], [12, 18, 30]))
X = RNG.normal(size=(60, 3)) + np.where(OWNERS == "east", 0.5, 0.0)[:, None]
Y = X @ [1.0, -2.0, 0.5] + 0.3 + np.where(OWNERS == "west", 1.0, 0.0) + 0.1 * RNG.normal(size=60)
WORDS = np.array(["bad", "fair", "good"])[np.digitize(Y, [-0.7, 1.2])]
L2 = 0.1


def scikit_learn_checks():
    """All checks of the classifier, and those that regressors alone have; `make soak`: all of both.

    What both are checked for is in the class that they share.
    """
    known = set()
    for estimator in (
        fs.FederatedClassifier(rounds=200, local_steps=5, precision="float64"),
        fs.FederatedRegressor(rounds=20, local_steps=5, precision="float64"),
    ):
        for own, check in estimator_checks_generator(estimator):
            words = f"{getattr(check, 'func', check).__name__}{getattr(check, 'keywords', '')}"
            marks = pytest.mark.soak if words in known else ()
            yield pytest.param(own, check, marks=marks, id=f"{type(own).__name__}-{words}")
            known.add(words)


# The checks of pandas and of the array API skip themselves where these are not installed.
@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "check"), [*scikit_learn_checks()])
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
    # the penalty is data there and a constant here: equal but for rounding
    np.testing.assert_allclose(model.params_["w"], run.x["w"], rtol=0, atol=1e-13)
    np.testing.assert_allclose(model.history_["loss"], run.history["loss"], rtol=1e-13)
    given = sampled(rounds=6, weights="equal", algorithm=fs.scaffold()).fit(
        X, WORDS, clients=OWNERS
    )
    again = clone(given).fit(X, WORDS, clients=OWNERS)
    np.testing.assert_array_equal(again.params_["w"], model.params_["w"])


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


# Weights of rows and classes

WEIGHTS = np.tile([0.0, 1.0, 2.0, 0.5], 15)


@pytest.mark.slow
def test_weighted_rows_have_the_weighted_optimum():
    model = regressor().fit(X, Y, clients=OWNERS, sample_weight=WEIGHTS)
    pooled = LinearRegression().fit(X, Y, sample_weight=WEIGHTS)
    np.testing.assert_allclose(model.coef_, pooled.coef_, atol=1e-8)
    assert model.intercept_ == pytest.approx(pooled.intercept_, abs=1e-8)
    scaled = regressor().fit(X, Y, clients=OWNERS, sample_weight=8 * WEIGHTS)
    np.testing.assert_allclose(scaled.coef_, model.coef_, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["softmax", "logistic"])
def test_a_weight_of_two_is_a_row_twice_and_of_zero_none(model):
    weights = np.tile([0, 1, 2, 1], 15)
    rows = np.repeat(np.arange(60), weights)
    two = WORDS == "good"
    ask = {"model": model, "lr": 0.1, "rounds": 50}
    weighted = classifier(**ask).fit(X, two, clients=OWNERS, sample_weight=weights)
    twice = classifier(**ask).fit(X[rows], two[rows], clients=OWNERS[rows])
    np.testing.assert_allclose(weighted.coef_, twice.coef_, atol=1e-7)  # rows are in float32
    balanced = classifier(class_weight="balanced", **ask)
    one = clone(balanced).fit(X, two, clients=OWNERS, sample_weight=weights)
    other = clone(balanced).fit(X[rows], two[rows], clients=OWNERS[rows])
    np.testing.assert_allclose(one.coef_, other.coef_, atol=1e-7)


@pytest.mark.slow
def test_weights_of_classes_are_weights_of_their_rows():
    by_class = {"bad": 0.5, "good": 3.0}
    ask = {"rounds": 30}
    one = classifier(class_weight=by_class, **ask).fit(X, WORDS, clients=OWNERS)
    rows = np.array([by_class.get(word, 1.0) for word in WORDS])
    other = classifier(**ask).fit(X, WORDS, clients=OWNERS, sample_weight=rows)
    np.testing.assert_array_equal(one.params_["w"], other.params_["w"])
    counts = {word: np.sum(word == WORDS) for word in one.classes_}
    balanced = classifier(class_weight="balanced", **ask).fit(X, WORDS, clients=OWNERS)
    same = {word: 60 / (3 * count) for word, count in counts.items()}
    again = classifier(class_weight=same, **ask).fit(X, WORDS, clients=OWNERS)
    np.testing.assert_allclose(balanced.params_["w"], again.params_["w"], atol=1e-12)


@pytest.mark.parametrize(
    ("given", "weights", "said"),
    [
        ("fair", None, "class_weight must be a dict, 'balanced' or None, got 'fair'"),
        ({"odd": 1.0}, None, "class_weight has 'odd', which is not among"),
        ({"bad": -1.0}, None, "class_weight must be a number of at least 0"),
        (dict.fromkeys(["bad", "fair", "good"], 0.0), None, "the weights of all rows are zero"),
        (None, -np.ones(60), "Negative values in data passed to `sample_weight`"),
    ],
)
def test_weights_that_are_none_are_refused(given, weights, said):
    with pytest.raises(ValueError, match=said):
        classifier(class_weight=given).fit(X, WORDS, clients=OWNERS, sample_weight=weights)


# Conventions of linear classifiers


@pytest.mark.parametrize(
    ("model", "target"), [("softmax", 3), ("softmax", 2), ("logistic", 2), ("mlp:4", 3)]
)
def test_scores_and_probabilities_agree(model, target):
    y = WORDS if target == 3 else WORDS == "good"
    found = classifier(model=model, rounds=20, lr=0.1).fit(X, y, clients=OWNERS)
    scores, likely = found.decision_function(X), found.predict_proba(X)
    assert scores.shape == ((60, 3) if target == 3 else (60,))
    np.testing.assert_allclose(np.exp(found.predict_log_proba(X)), likely, rtol=1e-12)
    best = scores.argmax(axis=1) if target == 3 else (scores > 0).astype(int)
    np.testing.assert_array_equal(found.predict(X), found.classes_[best])
    np.testing.assert_allclose(
        np.diff(np.log(likely), axis=1),
        np.diff(scores, axis=1) if target == 3 else scores[:, None],
        atol=1e-9,
    )
    if model == "mlp:4":
        assert not hasattr(found, "coef_")
        return
    assert found.coef_.shape == (3 if target == 3 else 1, 3)
    np.testing.assert_allclose(
        X @ found.coef_.T + found.intercept_, scores.reshape(60, -1), atol=1e-12
    )


def test_sparse_rows_are_rows():
    zeros = np.where(np.abs(X) < 0.5, 0.0, X)
    sparse = scipy.sparse.csr_array(zeros)
    for model, y in ((regressor(rounds=5), Y), (classifier(rounds=5), WORDS)):
        dense = clone(model).fit(zeros, y, clients=OWNERS)
        model.fit(sparse, y, clients=OWNERS)
        np.testing.assert_array_equal(model.coef_, dense.coef_)
        if y is Y:
            np.testing.assert_allclose(model.predict(sparse), model.predict(zeros), rtol=1e-12)
        else:
            np.testing.assert_allclose(
                model.predict_proba(sparse), model.predict_proba(zeros), rtol=1e-12
            )
    huge = scipy.sparse.csr_array((2, 2**50))
    with pytest.raises(InputError, match=r"sparse X of shape .* made dense, would take"):
        regressor().fit(huge, [0.0, 1.0])


# Searches


@pytest.mark.slow
@pytest.mark.parametrize("model", ["softmax", "mlp:5", "logistic"])
def test_another_penalty_or_weight_does_not_compile(model):
    compiled = []

    def listen(name, seconds, **more):
        if "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for l2 in (0.0, 0.1, 0.5):
            compiled.clear()
            ask = {"model": model, "l2": l2, "rounds": 3, "lr": 0.01, "local_steps": 7}
            weights = 1 + l2 * WEIGHTS
            twice = np.hstack([X, X])  # a shape that no other test has compiled
            classifier(**ask).fit(twice, WORDS == "bad", clients=OWNERS, sample_weight=weights)
            assert bool(compiled) == (l2 == 0.0), l2
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_the_penalty_is_that_of_ridge_regression():
    centred, target = X - X.mean(axis=0), Y - Y.mean()
    model = regressor(l2=0.3).fit(centred, target, clients=OWNERS)
    ridge = Ridge(alpha=0.3 * 60).fit(centred, target)
    np.testing.assert_allclose(model.coef_, ridge.coef_, atol=1e-8)


def test_a_cohort_of_more_clients_than_a_fold_has_is_all_of_them():
    there = OWNERS != "north"
    ask = {"rounds": 5, "lr": 0.1}
    some = regressor(cohort=3, **ask).fit(X[there], Y[there], clients=OWNERS[there])
    both = regressor(cohort=1.0, **ask).fit(X[there], Y[there], clients=OWNERS[there])
    np.testing.assert_array_equal(some.coef_, both.coef_)
    with pytest.raises(InputError, match="cohort must be"):
        regressor(cohort=0, **ask).fit(X, Y, clients=OWNERS)


@pytest.mark.slow
def test_an_estimator_that_holds_an_algorithm_is_pickled():
    model = classifier(algorithm=fs.fedprox(mu=0.3), rounds=4).fit(X, WORDS, clients=OWNERS)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.algorithm.name == "fedprox"
    for one in (model, again):
        one.partial_fit(X, WORDS, clients=OWNERS)
    np.testing.assert_array_equal(again.params_["w"], model.params_["w"])
