# Every target sets itself up on a fresh clone: it makes .venv, installs torch first, then this project.
# VENV=path (or an active virtual environment) is used exactly as it is; nothing is installed into it.

ifdef VENV
else ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := .venv
SETUP := .venv/.ready
endif
BIN := $(abspath $(VENV))/bin
WORKERS ?= 2
# Test workers share the cores: an idle OpenMP thread must not spin on them.
export OMP_WAIT_POLICY ?= PASSIVE
export PATH := $(BIN):$(PATH)

.PHONY: setup demo test test-long faults check bench bench-gpu golden

setup: $(SETUP)

.venv/.ready: pyproject.toml scripts/setup.sh
	scripts/setup.sh .venv
	@touch $@

demo: $(SETUP)  ## the whole product on a real model and real text, at most 15 minutes on 2 cores
	$(BIN)/python scripts/demo/run.py

test: $(SETUP)  ## at most 20 minutes on 2 cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not long and not gpu"

test-long: $(SETUP)  ## the full numbers, and the demonstration with 20 decoded prompts
	FAULTS_SCALE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not gpu"
	DEMO_PROMPTS=20 $(BIN)/python scripts/demo/run.py

faults: $(SETUP)  ## damage of every kind, the full numbers with totals, at most 15 minutes on 2 cores
	FAULTS_SCALE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/faults

check: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

bench: $(SETUP)
	$(BIN)/python scripts/bench/cpu.py

bench-gpu: $(SETUP)  ## the train step every way, and the target, on one GPU
	PYTHONPATH=scripts $(BIN)/python scripts/bench/gpu.py
	PYTHONPATH=scripts $(BIN)/python scripts/bench/gpu_target.py

golden: $(SETUP)  ## writes artifacts/golden/<torch minor>/; the only way they change
	$(BIN)/python scripts/golden.py
