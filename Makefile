# Each target sets up `.venv` by itself on a machine with Python 3.11 and pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
CODE := src tests tools examples benchmarks

.PHONY: demo test lint bench docs clean

demo: $(READY)
	$(BIN)/fedscaffold demo --out runs/demo

test: lint
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/fedscaffold bench

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache
