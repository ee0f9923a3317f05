"""Use a partitioner of Flower Datasets, on a data set in memory or from the Hugging Face hub.

    python examples/flower_datasets.py

This script downloads nothing. `FederatedDataset(dataset=NAME, partitioners={"train": partitioner})`
downloads a data set from the hub and passes it to the partitioner.
"""

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits

import fedscaffold as fs

pictures, digits = load_digits(return_X_y=True)
test = np.arange(len(digits)) % 5 == 0
partitioner = DirichletPartitioner(
    num_partitions=10, partition_by="label", alpha=0.3, min_partition_size=20, seed=0
)
partitioner.dataset = Dataset.from_dict({"picture": pictures[~test] / 16, "label": digits[~test]})

parts = [
    partitioner.load_partition(i).with_format("numpy") for i in range(partitioner.num_partitions)
]
clients = [(part["picture"][:], part["label"][:]) for part in parts]

problem = fs.problems.softmax(clients, test=(pictures[test] / 16, digits[test]))
run = fs.simulate(
    fs.scaffold(),
    problem,
    rounds=30,
    local_epochs=2,
    batch_size=20,
    lr=0.3,
    weights="records",
    evaluate_every=10,
)

print(problem, problem.counts)
print(f"accuracy {run.history['accuracy'][-1]:.3f}, gauge {run.residual:.0e}")
