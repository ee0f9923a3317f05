"""The order of tests for `pytest --dist worksteal`: long files first on every worker, short tests last."""

# Files of more than about 20 s of CPU time, the longest first. Those of a group use what one of them has made: the runs
# of all mistakes, torch's exporter, which takes seconds to import, or a fork server, which imports all there is.
LONGEST = (
    ("tests/deploy/test_federation.py",),
    (
        "tests/problems/test_torch_module.py",
        "tests/problems/test_torch_architectures.py",
        "tests/deploy/test_export_model.py",
        "docs/torch-modules.md",
        "docs/own-model.md",
        "docs/torch-apps.md",
        "src/fedscaffold/problems/torch_module.py",
    ),
    (
        "tests/papers/test_reproduce.py",
        "tests/docs/test_docs.py",
        "tests/papers/test_exercises.py",
        "tests/simulation/test_distributed.py",
        "tests/cli/test_cli.py",
        "tests/simulation/test_own_metrics.py",
        "tests/runs/test_compare_resume.py",
        "tests/simulation/test_forecast.py",
        "tests/simulation/test_resume_crashes.py",
        "tests/simulation/test_threads.py",
        "tests/simulation/test_notebook.py",
        "tests/runs/test_owner.py",
        "tests/runs/test_theatre.py",
        "tests/cli/test_face.py",
        "tests/deploy/test_private_cli.py",
        "tests/deploy/test_private_crashes.py",
    ),
    (
        "tests/conformance/test_conformance.py",
        "tests/conformance/test_peers.py",
        "docs/conformance.md",
        "src/fedscaffold/conformance/diagnosis.py",
    ),
    ("tests/problems/test_convolutions.py",),
    ("tests/theory/test_heterogeneity.py", "docs/heterogeneity.md"),
    ("tests/estimators/test_estimator.py",),
    ("tests/docs/test_site.py",),
    ("tests/privacy/test_records.py", "docs/privacy.md"),
    ("tests/theory/test_plan.py",),
    ("tests/problems/test_coupled_losses.py",),
    ("tests/simulation/test_blocks.py",),
    ("tests/docs/test_examples.py",),
    ("tests/simulation/test_conforms.py",),
    ("tests/theory/test_exact.py",),
    ("tests/deploy/test_faults.py",),
    ("tests/simulation/test_engine.py",),
    ("tests/grids/test_grid.py",),
    ("tests/simulation/test_random_losses.py",),
    ("tests/problems/test_state.py",),
    ("tests/algorithms/test_methods.py",),
    ("tests/cli/test_grids.py",),
    ("tests/algorithms/test_additions.py",),
    ("tests/algorithms/test_family.py",),
)


def dealt(files, workers, together):
    """Order files for workers that get equal, contiguous parts of all tests and steal from each other's end.

    Args:
        files: Number of tests by file, named from the root of the checkout.
        workers: Number of workers.
        together: Whether a file is one of those that had better not alternate with others.

    Returns:
        Names of all files. A worker's part begins with its share of `LONGEST`; then come files of few tests, which
        are longer than those of files of many.
    """
    groups = [[name for name in group if name in files] for group in LONGEST]
    hands = [[] for _ in range(workers)]
    for group in filter(None, groups):
        min(hands, key=len).extend(group)
    firsts = [len(hand) for hand in hands]
    rest = files.keys() - {name for group in groups for name in group}
    for name in sorted(rest, key=lambda name: (-files[name], name)):
        min(hands, key=lambda hand: sum(files[name] for name in hand)).append(name)
    for hand, first in zip(hands, firsts, strict=True):
        hand[first:] = sorted(
            hand[first:], key=lambda name: (not together(name), files[name], name)
        )
    return [name for hand in hands for name in hand]
