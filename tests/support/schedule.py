"""The order of tests for `pytest --dist worksteal`: long files first on every worker, short tests last."""

LONGEST = (  # files of more than about 25 s of CPU time, the longest first
    "tests/deploy/test_federation.py",
    "tests/problems/test_torch_module.py",
    "tests/papers/test_reproduce.py",
    "tests/docs/test_docs.py",
    "tests/estimators/test_estimator.py",
    "tests/simulation/test_distributed.py",
    "tests/conformance/test_conformance.py",
    "tests/problems/test_coupled_losses.py",
    "tests/cli/test_interrupts.py",
    "tests/papers/test_exercises.py",
    "tests/theory/test_heterogeneity.py",
    "tests/docs/test_examples.py",
    "tests/simulation/test_conforms.py",
    "tests/theory/test_exact.py",
    "tests/simulation/test_engine.py",
    "tests/docs/test_site.py",
    "tests/theory/test_plan.py",
    "tests/algorithms/test_family.py",
    "tests/simulation/test_random_losses.py",
    "tests/problems/test_state.py",
    "tests/simulation/test_own_metrics.py",
    "tests/simulation/test_gauge.py",
    "tests/cli/test_cli.py",
    "tests/runs/test_compare_resume.py",
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
    hands = [[] for _ in range(workers)]
    for k, name in enumerate(name for name in LONGEST if name in files):
        hands[k % workers].append(name)
    firsts = [len(hand) for hand in hands]
    for name in sorted(files.keys() - set(LONGEST), key=lambda name: (-files[name], name)):
        min(hands, key=lambda hand: sum(files[name] for name in hand)).append(name)
    for hand, first in zip(hands, firsts, strict=True):
        hand[first:] = sorted(
            hand[first:], key=lambda name: (not together(name), files[name], name)
        )
    return [name for hand in hands for name in hand]
