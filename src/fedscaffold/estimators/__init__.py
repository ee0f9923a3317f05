"""The simulator behind scikit-learn's conventions: fit, predict, score, clone, pipelines, grid searches."""

from fedscaffold.estimators.classifier import FederatedClassifier
from fedscaffold.estimators.regressor import FederatedRegressor

__all__ = ["FederatedClassifier", "FederatedRegressor"]
