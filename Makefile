# Each target sets up `.venv` by itself on a machine with Python 3.11 and pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
FOR_DEMO := .venv/ready-for-demo
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# modules are compiled once, not in each of the many processes that tests start
ALONE := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# more workers than the two cores that it is measured on, as some tests wait for other processes
PYTEST := $(ALONE) -n 4 --dist worksteal
CODE := src papers tests tools examples benchmarks

.PHONY: demo test quick soak lint all-tests fast-tests papers bench tables architecture arguments docs clean

demo: $(FOR_DEMO)
	$(BIN)/fedscaffold demo --out runs/demo

# lint runs beside the tests, as mypy is one long process and would keep one core only; what it says comes after theirs
define BESIDE_LINT
	@said=$$(mktemp); $(MAKE) --no-print-directory lint >$$said 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory $(1); tests=$$?; wait $$lint; lint=$$?; cat $$said; rm $$said; \
	test $$tests -eq 0 && test $$lint -eq 0 || { echo "make $@: tests end with code $$tests, lint with $$lint"; exit 1; }
endef

test: $(READY)
	$(call BESIDE_LINT,all-tests)

quick: $(READY)
	$(call BESIDE_LINT,fast-tests)

# tests that failed are run once more, alone: the target fails if one of them fails again, or if anything else is wrong;
# only then are assertions rewritten to say what they compared: four workers would each do that for all files
all-tests: $(READY)
	@$(PYTEST) --cache-clear --assert=plain || { code=$$?; test $$code -eq 1 || exit $$code; \
	  echo "Some tests failed: now each of them once more, alone. The target fails if one fails again."; \
	  $(ALONE) --last-failed --last-failed-no-failures none; }

fast-tests: $(READY)
	$(ALONE) -n 2 --dist worksteal --one-case -m "not slow and not process and not browser and not soak"

soak: $(READY)
	FEDSCAFFOLD_DEFAULT_XLA=1 $(PYTEST) -m "soak or not soak"

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

papers: $(READY)
	$(BIN)/python -m papers --all --quick

tables: $(READY)
	PYTHONPATH=tests/support $(BIN)/python tests/conformance/test_conformance.py

architecture: $(READY)
	$(BIN)/python tools/architecture.py

arguments: $(READY)
	$(BIN)/python tools/arguments.py

docs: architecture arguments
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(FOR_DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[sim,cli]'
	touch $(FOR_DEMO)

$(READY): $(FOR_DEMO)
	$(INSTALL) -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache
