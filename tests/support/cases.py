"""Products of settings: a sharp subset for `make test`, the whole for `make soak`."""

import pytest


def sharp(every, kept):
    """Return all cases as parameters of a test; those that are not kept are marked `soak`.

    Args:
        every: The cases; a tuple is one of several parameters.
        kept: Those that `make test` runs, or a function that says whether it runs one.
    """
    every, is_kept = list(every), kept if callable(kept) else kept.__contains__
    if not callable(kept):
        assert all(case in every for case in kept), "a case that there is not"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if is_kept(case) else pytest.mark.soak,
        )
        for case in every
    ]
