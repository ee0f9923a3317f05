"""Settings of all tests: one thread for each of two workers, as the work is small."""

import os

for variable in ("PJRT_NPROC", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
