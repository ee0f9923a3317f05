"""`FederatedClassifier`: softmax or logistic regression, or a network, trained on data held by clients."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedscaffold import checks, problems
from fedscaffold.checks import InputError
from fedscaffold.estimators.base import Federated
from fedscaffold.estimators.training import Client, TrainingState
from fedscaffold.problems import Problem
from fedscaffold.problems.models import logits

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
    }

    def fit(self, X: Any, y: Any, clients: ArrayLike | None = None) -> FederatedClassifier:
        """Train from the start.

        Args:
            X: (rows, features).
            y: (rows,) labels.
            clients: (rows,) owner of each row; None if a single client holds all rows.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        return self._train_classes(X, y, None, clients, None, once=False)

    def partial_fit(
        self, X: Any, y: Any, classes: ArrayLike | None = None, clients: ArrayLike | None = None
    ) -> FederatedClassifier:
        """Train one more round, or the first one.

        A client seen before keeps its control variate, whichever rows it holds now; a new client
        starts at 0.

        Args:
            X: (rows, features).
            y: (rows,) labels.
            classes: All classes; needed at the first call if `y` does not contain all of them.
            clients: (rows,) owner of each row; None if a single client holds all rows.
        """
        before: TrainingState | None = getattr(self, "_training", None)
        X, y = validate_data(self, X, y, dtype=np.float64, reset=before is None)
        return self._train_classes(X, y, classes, clients, before, once=True)

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return (rows, classes) probabilities, in the order of `classes_`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        if self.model == "logistic":
            score = X @ self.params_[:-1] + self.params_[-1]
            scores = np.stack([np.zeros_like(score), score], axis=1)
        else:
            scores = np.asarray(logits(self.params_, X), np.float64)
        likely: NDArray[Any] = softmax(scores, axis=1)
        return likely

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row."""
        likely = self.predict_proba(X)
        found: NDArray[Any] = self.classes_[likely.argmax(axis=1)]
        return found

    def _train_classes(
        self,
        x: NDArray[Any],
        y: Any,
        classes: ArrayLike | None,
        clients: ArrayLike | None,
        before: TrainingState | None,
        *,
        once: bool,
    ) -> FederatedClassifier:
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        known = (
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
        self._learn(
            partial(self._model, len(known)), x, np.searchsorted(known, y), clients, before, once
        )
        self.classes_ = known
        return self

    def _model(self, classes: int, clients: list[Client], seed: int) -> Problem:
        name, _, width = str(self.model).partition(":")
        checks.choice("model", name, ("logistic", "mlp", "softmax"))
        if name == "softmax":
            return problems.softmax(clients, classes=classes, l2=self.l2)
        if name == "mlp":
            hidden = checks.whole("the width in model 'mlp:WIDTH'", checks.written(width or "300"))
            return problems.mlp(clients, hidden, classes=classes, l2=self.l2, seed=seed)
        if classes != 2:
            raise InputError(
                f"model 'logistic' is for two classes, got {classes}; use model='softmax'"
            )
        return problems.logistic(with_intercept(clients), l2=self.l2)


def with_intercept(clients: list[Client]) -> list[Client]:
    """Append a column of ones to the features: the regressions have no intercept of their own.

    >>> with_intercept([(np.zeros((1, 1)), np.zeros(1))])[0][0]
    array([[0., 1.]])
    """
    return [(np.hstack([x, np.ones((len(x), 1))]), y) for x, y in clients]
