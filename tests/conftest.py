"""Settings of all tests: one thread for JAX (the work is small), a compile cache of the test run's own."""

import os

os.environ.setdefault("PJRT_NPROC", "1")
