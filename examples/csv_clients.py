"""Linear regression on one CSV file per client; the result equals the fit of the pooled files.

    python examples/csv_clients.py [FOLDER]

FOLDER contains one file per client, each with a header. Columns may be in any order; missing
columns are reported. Without FOLDER, the script writes files for three clinics from scikit-learn's
diabetes data.
"""

import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes

import fedscaffold as fs

RESPONSE = "progression"


def sample():
    """Write files for three clinics, split by age; the columns of the last are in another order."""
    folder, (x, y) = Path(tempfile.mkdtemp()), load_diabetes(return_X_y=True)
    names, table = (
        ["age", "sex", "bmi", "bp", RESPONSE],
        np.column_stack([x[:, :4] * len(x) ** 0.5, y]),
    )
    for site, rows in zip(
        ("east", "north", "west"), np.array_split(np.argsort(x[:, 0]), [100, 250]), strict=True
    ):
        order = [4, 3, 2, 1, 0] if site == "west" else [0, 1, 2, 3, 4]
        header = ",".join(names[j] for j in order)
        np.savetxt(
            folder / f"{site}.csv", table[rows][:, order], delimiter=",", header=header, comments=""
        )
    return folder


folder = Path(sys.argv[1]) if len(sys.argv) > 1 else sample()

paths = sorted(folder.glob("*.csv")) or sys.exit(f"{folder} holds no CSV files")
tables = [np.genfromtxt(path, delimiter=",", names=True, ndmin=1) for path in paths]
clients = [{name: table[name] for name in table.dtype.names} for table in tables]
features = [name for name in clients[0] if name != RESPONSE]


def loss(params, batch):
    expected = params["intercept"] + sum(params[name] * batch[name] for name in features)
    return 0.5 * jnp.mean((expected - batch[RESPONSE]) ** 2)


problem = fs.Problem(loss, dict.fromkeys([*features, "intercept"], 0.0), clients, name="diabetes")
run = fs.simulate(
    fs.scaffold(),
    problem,
    rounds=200,
    local_steps=10,
    lr=0.1,
    weights="records",
    precision="float64",
    metrics=["loss"],
)

print(problem)
print(", ".join(f"{name} {float(weight):.1f}" for name, weight in run.x.items()))
