"""Settings of all tests: one thread for each of two workers, as the work is small."""

import os
import shutil

import pytest

for variable in ("PJRT_NPROC", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


@pytest.fixture
def folder():
    """A folder in memory where there is one."""
    from deploy_case import memory_folder

    path = memory_folder()
    yield path
    shutil.rmtree(path)
