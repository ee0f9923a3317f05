"""`FederatedClassifier`: softmax or logistic regression, or a network, on data of clients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.estimators.federated import Federated, Rows
from fedscaffold.estimators.training import TrainingState
from fedscaffold.estimators.weighted_rows import Client, weighted_problem
from fedscaffold.problems import Problem

__all__ = ["FederatedClassifier"]


class FederatedClassifier(ClassifierMixin, Federated):  # type: ignore[misc] # scikit-learn has no types
    """Federated classifier with scikit-learn's interface.

    `fit(X, y, clients=...)` takes the owner of each row.

    Args:
        algorithm: a name such as "scaffold" or "fedavg", or an algorithm such as
            `fs.fedprox(mu=0.1)`.
        PARAMETERS

    After `fit`: `classes_`, `clients_`, `params_` (the model's arrays), `history_` (columns by
    round), `residual_` (|c - sum p_i c_i|: more than rounding is a bias), `n_iter_` (rounds),
    `seed_`.

    >>> import fedscaffold as fs
    >>> X, y = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array(["no", "no", "yes", "yes"])
    >>> model = fs.FederatedClassifier(rounds=20).fit(X, y, clients=["a", "a", "b", "b"])
    >>> model.predict([[3.0]]), model.score(X, y), model.clients_
    (array(['yes'], dtype='<U3'), 1.0, array(['a', 'b'], dtype='<U1'))
    """

    classes_: NDArray[Any]

    PARAMETERS: ClassVar[dict[str, tuple[Any, str]]] = {
        "model": (
            "softmax",
            '"softmax", "mlp:WIDTH" (a hidden layer with ReLU), or "logistic" (two classes)',
        ),
        "class_weight": (
            None,
            'weights of the classes: a dict, "balanced" (over all rows, as if pooled), or None',
        ),
    }

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: ArrayLike | None = None,
        clients: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Train one more round, or the first one.

        A client seen before keeps its control variate, whichever rows it holds now; a new client
        starts at 0.

        Args:
            X: (rows, features), dense or sparse.
            y: (rows,) labels.
            classes: All classes; needed at the first call if `y` does not contain all of them.
            clients: (rows,) owner of each row; None if a single client holds all rows.
            sample_weight: (rows,) weights of the rows; a row of weight 0 does not count.
        """
        before: TrainingState | None = getattr(self, "_training", None)
        rows = self._rows(X, y, clients, sample_weight, before)
        return self._train(rows, before, once=True, classes=classes)

    def decision_function(self, X: Any) -> NDArray[Any]:
        """Return (rows, classes) scores; of two classes, (rows,) of the second over the first."""
        scores = self._scores(X)
        over: NDArray[Any] = scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores
        return over

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return (rows, classes) probabilities, in the order of `classes_`."""
        likely: NDArray[Any] = softmax(self._scores(X), axis=1)
        return likely

    def predict_log_proba(self, X: Any) -> NDArray[Any]:
        """Return the logarithms of `predict_proba`, without underflow."""
        likely: NDArray[Any] = log_softmax(self._scores(X), axis=1)
        return likely

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row."""
        best = self._scores(X).argmax(axis=1)
        found: NDArray[Any] = self.classes_[best]
        return found

    @property
    def coef_(self) -> NDArray[Any]:
        """(classes, features) weights of linear models.

        Of two classes, (1, features) for the second over the first.
        """
        return self._linear()[0]

    @property
    def intercept_(self) -> NDArray[Any]:
        """(classes,) intercepts of linear models; of two classes, (1,)."""
        return self._linear()[1]

    def _linear(self) -> tuple[NDArray[Any], NDArray[Any]]:
        check_is_fitted(self)
        if not isinstance(self.params_, dict) and self.model != "logistic":
            raise AttributeError(f"model {self.model!r} has no coef_ and intercept_")
        if self.model == "logistic":
            held = np.asarray(self.params_, np.float64)
            return held[None, :-1], held[-1:]
        w, b = (np.asarray(self.params_[name], np.float64) for name in ("w", "b"))
        return (w, b) if len(b) > 2 else (w[1:] - w[:1], b[1:] - b[:1])

    def _scores(self, X: Any) -> NDArray[Any]:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        if self.model == "logistic":
            score = X @ self.params_[:-1] + self.params_[-1]
            return np.stack([np.zeros_like(score), score], axis=1)
        layers = [self.params_] if isinstance(self.params_, dict) else self.params_
        for layer in layers[:-1]:
            X = np.maximum(X @ np.asarray(layer["w"]).T + np.asarray(layer["b"]), 0)
        scores = X @ np.asarray(layers[-1]["w"]).T + np.asarray(layers[-1]["b"])
        return np.asarray(scores, np.float64)

    def _train(
        self,
        rows: Rows,
        before: TrainingState | None,
        *,
        once: bool,
        classes: ArrayLike | None = None,
    ) -> Self:
        y, weights = rows.y, rows.weights
        check_classification_targets(y)
        known = self._known_classes(y[weights > 0], classes, before)
        if self.class_weight is not None:
            weights = weights * _class_weights(self.class_weight, known, y, weights)
        rows = rows._replace(y=np.searchsorted(known, y), weights=weights)
        self._learn(partial(self._model, len(known)), rows, before, once)
        self.classes_ = known
        return self

    def _known_classes(
        self, y: NDArray[Any], classes: ArrayLike | None, before: TrainingState | None
    ) -> NDArray[Any]:
        """Return all classes; raise InputError if labels are not among them, or they change."""
        known: NDArray[Any] = (
            self.classes_
            if before is not None
            else np.unique(y if classes is None else np.asarray(classes))
        )
        strange = np.setdiff1d(y, known)
        if strange.size:
            raise InputError(
                f"y has labels that are not among the classes {known.tolist()}: "
                f"{strange.tolist()}; "
                "name all in classes at the first partial_fit"
            )
        if (
            before is not None
            and classes is not None
            and not np.array_equal(np.unique(classes), known)
        ):
            raise InputError(f"classes must stay those of the first partial_fit, {known.tolist()}")
        if len(known) < 2:
            raise InputError(
                f"a classifier needs rows of at least two classes, got one class: {known.tolist()}"
            )
        return known

    def _model(self, classes: int, clients: list[Client], seed: int) -> Problem:
        name, _, width = str(self.model).partition(":")
        checks.choice("model", name, ("logistic", "mlp", "softmax"))
        hidden = checks.whole("the width in model 'mlp:WIDTH'", checks.written(width or "300"))
        if name == "logistic" and classes != 2:
            raise InputError(
                f"model 'logistic' is for two classes, got {classes}; use model='softmax'"
            )
        l2 = checks.number("l2", self.l2, at_least=0)
        return weighted_problem(name, clients, l2=l2, classes=classes, hidden=hidden, seed=seed)


def _class_weights(
    given: Any, known: NDArray[Any], y: NDArray[Any], weights: NDArray[Any]
) -> NDArray[Any]:
    """Return the weight of each row's class.

    >>> known, y = np.array(["a", "b"]), np.array(["a", "b", "b", "b"])
    >>> _class_weights("balanced", known, y, np.ones(4)) * [1, 3, 3, 3]  # equal sums
    array([2., 2., 2., 2.])
    """
    place = np.clip(np.searchsorted(known, y), 0, len(known) - 1)
    if isinstance(given, str) and given == "balanced":
        totals = np.bincount(place, weights, len(known))
        present = totals > 0
        by_class = weights.sum() / (present.sum() * np.where(present, totals, 1))
    elif isinstance(given, Mapping):
        for label in given:
            if label not in known:
                raise InputError(f"class_weight has {label!r}, which is not among {known.tolist()}")
        by_class = np.array(
            [checks.number("class_weight", given.get(c, 1.0), at_least=0) for c in known.tolist()]
        )
    else:
        raise InputError(f"class_weight must be a dict, 'balanced' or None, got {given!r}")
    by_row: NDArray[Any] = by_class[place]
    return by_row
