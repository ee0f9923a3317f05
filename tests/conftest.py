"""Settings of all tests: one thread a worker, and programs that are compiled once in a run.

Most of the suite's time is JAX tracing and XLA compiling small programs. All workers and the processes
that they start share a cache of compiled programs, made for this run and removed after it. Outside
`EXACT`, the files whose subject is what the compiler makes of the arithmetic, programs are compiled
without most optimisations, which takes half the time. Programs carry no Python tracebacks, and Python's
cycles are collected less often: both save a tenth of the time of tracing. Files go to memory where there
is room: much of what is tested commits its state, and would wait for a disk.

XLA's older emitters of fused loops compile small programs in half the time, and a program that is not
split into parts for many threads is compiled in three quarters of the time. The simulator unrolls no local
steps where optimisations are off, so that each is compiled once instead of four times. `make soak` runs the whole
suite with what users have by default, and all optimisations: set FEDSCAFFOLD_DEFAULT_XLA.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

EXACT = {  # several programs that give one result to the bit
    f"tests/simulation/test_{name}.py" for name in ("scale",)
}
OPTIMISE_LESS = "JAX_DISABLE_MOST_OPTIMIZATIONS"
CACHE = "JAX_COMPILATION_CACHE_DIR"
SLOW_DOCTESTS = {
    "fedscaffold.conformance.diagnosis.diagnose",
    "fedscaffold.estimators.classifier.FederatedClassifier",
    "fedscaffold.experiments.compare.compare",
    "fedscaffold.grids.grid.grid",
    "fedscaffold.privacy.accounting.noise_for",
    "fedscaffold.problems.torch_module.torch_problem",
    "fedscaffold.simulation.canaries.audit_privacy",
    "fedscaffold.simulation.sweeps.sweep",
    "fedscaffold.theory.advice.advise",
    "fedscaffold.theory.planning.verify",
    "fedscaffold.theory.privacy.privacy_cost",
    "fedscaffold.theory.round_map.round_map",
    "papers.claims.reproduce",
}

os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
for variable in ("PJRT_NPROC", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

AS_USERS = bool(os.environ.get("FEDSCAFFOLD_DEFAULT_XLA"))
if not AS_USERS:
    QUICKER = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKER}".strip()

# processes that tests start find papers, benchmarks and tests.faults too, whatever folder they run in
ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])


# A shell that starts the tests in the background lets them ignore interrupts, and all processes that they start, which
# would then wait for one for minutes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_addoption(parser):
    parser.addoption(
        "--one-case", action="store_true", help="of the cases of a test, run the first one only"
    )


def pytest_configure(config):
    config.pluginmanager.register(Optimisation())
    if CACHE not in os.environ:  # workers inherit it
        place = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        config.own_folder = tempfile.mkdtemp(prefix="fedscaffold-tests-", dir=place)
        programs = Path(config.own_folder, "programs")
        programs.mkdir()
        os.environ[CACHE] = str(programs)
        # what code leaves in temporary folders goes with it; tests themselves have `tmp_path`
        os.environ["TMPDIR"] = tempfile.tempdir = config.own_folder
        # smaller programs are compiled again sooner than they are written and read
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure(config):
    if hasattr(config, "own_folder"):
        shutil.rmtree(config.own_folder, ignore_errors=True)
        del os.environ[CACHE], os.environ["TMPDIR"]
        tempfile.tempdir = None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.suffix == ".md" or item.name in SLOW_DOCTESTS:  # pages run whole
            item.add_marker("slow")
    done = yield  # what is not asked for has been taken out
    if config.getoption("--one-case"):
        firsts = {}
        for item in items:
            firsts.setdefault((item.parent, getattr(item, "originalname", item.name)), item)
        kept = set(firsts.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = firsts.values()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        from schedule import dealt

        files = {}
        for item in items:
            files.setdefault(item.path.relative_to(config.rootpath).as_posix(), []).append(item)
        order = dealt({name: len(own) for name, own in files.items()}, workers, is_exact)
        items[:] = [item for name in order for item in files[name]]
    return done


def pytest_collection_finish():
    """What has been imported stays: it need not be searched for cycles, and what is traced dies by itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def is_exact(name):
    """Whether a file's programs are compiled as users have them; every change between the two empties all caches."""
    return AS_USERS or name in EXACT


def forget():
    """Empty the package's own caches, which keep compiled programs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fedscaffold."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class Optimisation:
    """Chooses how programs are compiled: a plugin, as hooks of this file are not called for pages and doctests of `src`."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Choose for a test and for the processes that it starts."""
        exact = is_exact(item.path.relative_to(item.config.rootpath).as_posix())
        value = "0" if exact else "1"
        if os.environ.get(OPTIMISE_LESS) != value:
            os.environ[OPTIMISE_LESS] = value
            if jax := sys.modules.get("jax"):
                jax.config.update(OPTIMISE_LESS.lower(), value == "1")
                jax.clear_caches()
                forget()


@pytest.fixture
def folder():
    """A folder in memory where there is one."""
    from deploy_case import memory_folder

    path = memory_folder()
    yield path
    shutil.rmtree(path)
