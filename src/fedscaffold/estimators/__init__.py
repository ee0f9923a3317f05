"""scikit-learn estimators on top of the simulator."""

from fedscaffold.estimators.classifier import FederatedClassifier
from fedscaffold.estimators.regressor import FederatedRegressor

__all__ = ["FederatedClassifier", "FederatedRegressor"]
