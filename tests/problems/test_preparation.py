"""What making a problem does besides: garbage is collected afterwards, as it was before."""

import gc

import pytest

from fedscaffold.problems.torch_export import collect_later


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_later_and_as_before(collecting):
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with collect_later():
            assert not gc.isenabled()
        assert gc.isenabled() == collecting
        with pytest.raises(OSError, match="an export"), collect_later():
            raise OSError("an export that fails")
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()
