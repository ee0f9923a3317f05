"""Softmax regression on one Parquet file per client, with labels as strings.

    python examples/parquet_clients.py [FOLDER]

FOLDER contains one file per client. Without it, the script writes three files from scikit-learn's
wine data.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_wine

import fedscaffold as fs

LABEL = "cultivar"


def sample():
    """Three cellars by strength: yours are there already."""
    folder, wine = Path(tempfile.mkdtemp()), load_wine()
    x = (wine.data - wine.data.mean(axis=0)) / wine.data.std(axis=0)
    words = np.array(["barolo", "grignolino", "barbera"])[wine.target]
    for site, rows in zip(
        ("hill", "lake", "town"), np.array_split(np.argsort(x[:, 0]), [40, 90]), strict=True
    ):
        columns = {name: x[rows, j] for j, name in enumerate(wine.feature_names)}
        pq.write_table(pa.table({**columns, LABEL: words[rows]}), folder / f"{site}.parquet")
    return folder


folder = Path(sys.argv[1]) if len(sys.argv) > 1 else sample()

paths = sorted(folder.glob("*.parquet")) or sys.exit(f"{folder} holds no Parquet files")
tables = [pq.read_table(path) for path in paths]
features = [name for name in tables[0].column_names if name != LABEL]
classes = sorted({word for table in tables for word in table[LABEL].to_pylist()})


def arrays(table):
    x = np.column_stack(
        [table[name].to_numpy() for name in features]
    )  # by name, so any order will do
    return x, np.searchsorted(classes, table[LABEL].to_pylist())


problem = fs.problems.softmax([arrays(table) for table in tables], classes=len(classes), l2=0.1)
run = fs.simulate(
    fs.scaffold(),
    problem,
    rounds=200,
    local_steps=10,
    lr=0.1,
    weights="records",
    precision="float64",
    metrics=["accuracy", "grad_norm"],
)

print(problem, classes)
print(f"accuracy {run.history['accuracy'][-1]:.3f}, gradient {run.history['grad_norm'][-1]:.0e}")
