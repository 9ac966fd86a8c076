# demo: the whole job on this machine · test: the fast suite · bench: the measured tables · soak: a long run under faults · lint: style and types
.DEFAULT_GOAL := help
.PHONY: help docs demo seeds test test-slow bench soak lint clean
PYTHON ?= python3
TORCH_DEFAULT := 2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready
TEST_WORKERS ?= 2
export GOMP_SPINCOUNT ?= 0
SECONDS ?= 1200
SEEDS ?= 1337 42 2025
CONFIG ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 \
	&& echo configs/gpu_demo.env || echo configs/cpu_demo.env)
NAME ?= demo-$(shell date +%Y%m%d-%H%M%S)

help:
	@sed -n '1s/^# //p' Makefile

# An environment that has a fitting torch is used as it is; elsewhere the default version is installed.
$(STAMP): requirements.txt requirements-dev.txt
	@set -e; fitting='import torch; v = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2]); assert (2, 9) <= v < (2, 14)'; \
	if $(PYTHON) -c "$$fitting" 2>/dev/null; then \
		echo "using the torch that $(PYTHON) has"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		echo "installing torch $(TORCH_DEFAULT) into $(VENV)"; $(PYTHON) -m venv $(VENV); \
		$(RUN) -m pip install --quiet --disable-pip-version-check "torch==$(TORCH_DEFAULT)"; \
	fi; \
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

demo: $(STAMP)
	@$(RUN) data/sample.py
	@CONFIG=$(CONFIG) RUN_ID=$(NAME) $(RUN) train_gpt.py
	@$(RUN) -m tools generate runs/$(NAME)/model.bin "The function returns"
	@$(RUN) -m tools plot runs/$(NAME) --out runs/$(NAME)/loss.png
	@echo "loss curve: runs/$(NAME)/loss.png"

seeds: $(STAMP)
	@$(RUN) data/sample.py
	@for seed in $(SEEDS); do CONFIG=$(CONFIG) SEED=$$seed RUN_ID=$(NAME)-seed$$seed $(RUN) train_gpt.py || exit 1; done
	@echo "pack them: $(RUN) -m tools pack runs/$(NAME)-seed* --name NAME --track TRACK"

test: $(STAMP)
	@$(RUN) -m ruff check .
	@$(RUN) -m pytest -q -n $(TEST_WORKERS)

test-slow: $(STAMP)
	@$(RUN) -m pytest -q -m slow

soak: $(STAMP)
	@SECONDS=$(SECONDS) $(RUN) tests/faults/soak.py

bench: $(STAMP)
	@$(RUN) data/sample.py
	@for bench in loader coder speed; do $(RUN) benchmarks/$$bench.py --keep || exit 1; done
	@CONFIG=configs/cpu_demo.env $(RUN) benchmarks/checkpoint.py --keep
	@$(RUN) benchmarks/kernels.py --keep || test $$? -eq 2  # 2: no GPU, and it says so

lint: $(STAMP)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy train_gpt.py data tools

docs: $(STAMP)
	@$(RUN) -m tools.settings_table
	@$(RUN) -m tools.results_table
	@$(RUN) -m tools board
	@$(RUN) benchmarks/results.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
