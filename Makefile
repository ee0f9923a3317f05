# Each target sets up `.venv` by itself on a machine with Python 3.11 and pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/fedscaffold demo --out runs/demo

test: lint
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/fedscaffold bench

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache
