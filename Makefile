# `make` alone lists the targets: the text after ## of each.
.DEFAULT_GOAL := help
.PHONY: help demo seeds test test-slow test-torch gpu-check bench lint clean

# A variable that is set but empty, as Compose and CI files pass it on, counts as not given.
GIVEN := PYTHON TORCH_VERSIONS TORCH_ENVIRONMENTS CONFIG NAME SEEDS TEST_WORKERS RUNS_DIR
GIVEN += GOMP_SPINCOUNT MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_
is_empty = $(if $(filter-out undefined,$(origin $(1))),$(if $(strip $($(1))),,yes))
$(foreach name,$(GIVEN),$(if $(call is_empty,$(name)),$(eval override undefine $(name))))

# The Python that makes the environment.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
TORCH_DEFAULT := 2.13.0
# The versions that requirements.txt promises. Each has its environment in a folder like TORCH_ENVIRONMENTS/2.13.0.
TORCH_VERSIONS ?= 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1
TORCH_ENVIRONMENTS ?= .venv-torch

CONFIG ?= $(shell nvidia-smi >/dev/null 2>&1 && echo configs/gpu_demo.env || echo configs/cpu_demo.env)
NAME ?= demo-$(shell date +%Y%m%d-%H%M%S)
NAME := $(NAME)
SEEDS ?= 1337 42 2025
TEST_WORKERS ?= 2
# Where a run writes: what the environment says, or else its settings.
WRITES = $(or $(shell sed -n 's/^RUNS_DIR=//p' "$(CONFIG)" 2>/dev/null),runs)
RUNS = $(or $(RUNS_DIR),$(WRITES))

# Make passes on the variables of its command line to every program. The script would ask whether SEEDS means SEED.
unexport SEEDS

help:
	@echo "make TARGET [NAME=value ...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{ printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# If $(PYTHON) has a torch that fits, that one is used, even from an active environment: active.pth lists its packages,
# because --system-site-packages only shows those of the base interpreter. Otherwise the default torch is installed.
$(READY): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is not Python 3.10 or later; name one, as in make demo PYTHON=python3.12"; exit 1; }
	@set -e; fitting='import torch; v = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2]); assert (2, 9) <= v < (2, 15)'; \
	if $(PYTHON) -c "$$fitting" 2>/dev/null; then \
		echo "creating $(VENV) (only once), with the torch that $(PYTHON) has"; $(PYTHON) -m venv --system-site-packages $(VENV); \
		$(PYTHON) -c 'import sysconfig as s; print(s.get_path("purelib")); print(s.get_path("platlib"))' > \
			"$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/active.pth"; \
	else \
		echo "creating $(VENV) (only once): installing torch $(TORCH_DEFAULT) and other packages takes minutes"; $(PYTHON) -m venv $(VENV); \
	fi; \
	if ! $(RUN) -c "$$fitting" 2>/dev/null; then \
		$(RUN) -m pip install --quiet --disable-pip-version-check "torch==$(TORCH_DEFAULT)"; \
	fi; \
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# These make CPU runs faster. Waiting OpenMP threads spin only for microseconds, because otherwise they take the cores
# from the loader and from other programs. The C library keeps freed memory, because each page that it gives back to
# the system is zeroed and mapped again in the next step.
demo seeds: export GOMP_SPINCOUNT ?= 3000
demo seeds: export MALLOC_MMAP_THRESHOLD_ ?= 33554432
demo seeds: export MALLOC_TRIM_THRESHOLD_ ?= 1073741824
demo: $(READY) ## train, quantize, score and generate text on this machine, in minutes (CONFIG=file NAME=run)
	@$(RUN) data/sample.py
	@sed -n 's/^# expect/expect/p' "$(CONFIG)"
	@CONFIG="$(CONFIG)" RUNS_DIR="$(RUNS)" RUN_ID="$(NAME)" $(RUN) train_gpt.py
	@$(RUN) -m tools plot "$(RUNS)/$(NAME)"
	@echo; $(RUN) -m tools summary "$(RUNS)/$(NAME)"
	@echo; $(RUN) -m tools generate "$(RUNS)/$(NAME)/model.bin" "The function returns"
	@echo; echo "next: source $(VENV)/bin/activate; python -m tools try SMEAR_GATE_ENABLED=0    # does the model need this part?"

seeds: $(READY) ## the same run with several seeds, ready to pack; continues if stopped (SEEDS="1 2 3" CONFIG=file NAME=run)
	@$(RUN) data/sample.py
	@mkdir -p "$(RUNS)"
	@printf 'seeds: %s\n%s: CONFIG="%s"\n' "$(SEEDS)" "$(NAME)" "$(CONFIG)" > "$(RUNS)/$(NAME).sweep"
	@$(RUN) -m tools sweep "$(RUNS)/$(NAME).sweep" --folder "$(RUNS)"
	@echo "pack them: $(RUN) -m tools pack $(RUNS)/$(NAME)-seed* --name MyRecord --track track_mine"

# Tests start hundreds of programs, several at once. Spinning threads would take time from the others, and without
# cached bytecode each program would compile everything again.
test test-slow test-torch: export GOMP_SPINCOUNT ?= 0
test test-slow test-torch: export PYTHONDONTWRITEBYTECODE :=
test: $(READY) ## ruff and the fast tests, which every change must pass (TEST_WORKERS=2)
	@$(RUN) -m ruff check .
	@$(RUN) -m pytest -q -n $(TEST_WORKERS) --dist loadfile

test-slow: $(READY) ## the tests that take minutes each
	@$(RUN) -m pytest -q -m slow

# An environment that has its version and pytest is used as it is. The others are created, with 1 to 7 GB each.
# PIP_EXTRA_INDEX_URL, which pip reads by itself, may name an index of CPU builds of torch.
test-torch: ## trace the GPU graphs on every supported torch (TORCH_VERSIONS="2.11.0 2.12.1" TORCH_ENVIRONMENTS=folder)
	@failed=; for version in $(TORCH_VERSIONS); do \
		folder=$(TORCH_ENVIRONMENTS)/$$version; python=$$folder/bin/python; \
		fitting="import pytest_timeout, torch, xdist; assert torch.__version__.split('+')[0] == '$$version'"; \
		$$python -c "$$fitting" 2>/dev/null || { \
			echo "installing torch $$version into $$folder"; $(PYTHON) -m venv $$folder && \
			$$python -m pip install --quiet --disable-pip-version-check "torch==$$version" -r requirements-dev.txt; \
		} || { failed="$$failed $$version"; continue; }; \
		echo "torch $$version"; \
		$$python -m pytest -q -n $(TEST_WORKERS) -m "slow or not slow" tests/script/test_gpu_step.py || \
			failed="$$failed $$version"; \
	done; \
	test -z "$$failed" || { echo "failed on torch$$failed"; exit 1; }

gpu-check: $(READY) ## does this GPU run the script as it should? ten minutes, one page, PASS or FAIL
	@$(RUN) data/sample.py
	@$(RUN) benchmarks/gpu_check.py

bench: $(READY) ## time steps with and without prefetching, in turns
	@$(RUN) data/sample.py
	@$(RUN) benchmarks/loader.py --turns 12

lint: $(READY) ## ruff and mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy train_gpt.py data tools

clean: ## remove the environments and caches, but not data or runs
	rm -rf $(VENV) .venv-torch .pytest_cache .mypy_cache .ruff_cache .hypothesis
