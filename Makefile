# Every target sets up .venv by itself; nothing has to be installed first but python3 (>= 3.11).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.installed
DEMO := $(VENV)/.demo
PEERS := $(VENV)/.peers
BENCH := runs/bench
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Threads of a matrix product wait for each other busily only for a moment: where another program has one
# of the cores, the default wait makes every product many times slower; where none has, this costs nothing.
export GOMP_SPINCOUNT ?= 1000

# The tests run in so many processes of one thread each: their matrices are too small for more.
CORES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --dist worksteal

# The mathematics and what one step does, without compilers, processes, browsers and whole training runs.
QUICK := $(addprefix tests/,paper solvers config layers stepping recording reporting) \
	$(addprefix tests/promises/,test_architecture.py test_backprop_identity.py test_equations.py test_readme.py)

.DEFAULT_GOAL := help
.PHONY: help demo quick lint test test-distributed coverage check fuzz mutate soak matrix docs bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO) ## train four optimizers side by side on a small deep autoencoder, draw demo.png
	$(BIN)/python -m torch_locoprop.study.demo

quick: $(DEV) ## run the tests of the mathematics and of one step: under 90 seconds on two cores
	$(PYTEST) $(QUICK) -q -k "not compile"

lint: $(DEV) ## check lint, formatting and types, and change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

test: $(DEV) ## run all tests but those of test-distributed: under 12 minutes on two cores
	$(PYTEST)

test-distributed: $(DEV) ## run the longer tests with several processes, which `make test` leaves out
	$(PYTEST) tests -m distributed

coverage: $(DEV) ## run the tests of `make test` and count lines: half as long again; fails below 95% of src
	$(PYTEST) --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

check: lint ## run lint, then the tests with coverage: what a change has to pass
	$(MAKE) --no-print-directory coverage

fuzz: $(DEV) ## compare random training programs with an oracle until Ctrl-C
	cd tests && PYTHONPATH=. OMP_NUM_THREADS=1 ../$(BIN)/python -m fuzz.endless

mutate: $(DEV) ## change operators and constants of the mathematics one by one: do the tests notice?
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutation --minutes 25 --out runs/mutation.json

soak: $(DEV) ## hours: kill and resume runs, count memory over many steps and optimizers
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak --out runs/soak.json

matrix: $(DEV) ## run the core tests on the oldest, a middle and the newest PyTorch, each in its own environment
	$(BIN)/python -m benchmarks.matrix --out runs/matrix.md $(QUICK)

docs: $(DEV) ## build the documentation into docs/_build/html; a warning is an error
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(DEV) $(PEERS) ## time LocoProp beside its matrix products and other optimizers, draw its growth
	$(BIN)/python -m benchmarks.steps --device cpu --threads 2 --out $(BENCH)/steps.json --figure $(BENCH)/steps.png
	$(BIN)/python -m benchmarks.steady --threads 2 --out $(BENCH)/steady.json
	$(BIN)/python -m benchmarks.growth --quick --device cpu --threads 1 \
		--out $(BENCH)/growth.json --figure $(BENCH)/growth.png

clean: ## remove the environment, caches and outputs
	rm -rf $(VENV) dist build runs docs/_build docs/auto_gallery \
		.coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last: an interrupted installation is taken up again by the next call.
$(DEV): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[dev]"
	@touch $@

# What the demo needs, and nothing else.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[demo]"
	@touch $@

# Other people's optimizers, for `make bench`: without them it goes on, and says which rows it has not.
$(PEERS): $(DEV)
	-$(INSTALL) -e ".[peers]" locoprop==0.1.0 && touch $@
