# Two commands for a newcomer: `make demo` and `make test`. Both make their own environment in .venv first.
# test-gpu and bench run in the Python they are started with, where the GPU build of torch is.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2
ARGS   ?=
# Each test worker gets one core; more threads than cores only wait for each other.
CPU_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST_CPU := $(CPU_ENV) $(BIN)/python -m pytest -n $(WORKERS) --timeout 600 -q

.DEFAULT_GOAL := help
.PHONY: help install test test-slow compile-table test-transformers sweep-transformers test-quantised sweep lint format demo docs notebooks test-gpu sanitize soak random-calls bench clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

install: $(STAMP) ## the environment alone

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "ffpa_hf needs Python 3.10 to 3.13; say which: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

test: $(STAMP) ## the whole suite on the CPU, Triton kernels in Triton's interpreter
	$(PYTEST_CPU) -m "not slow" $(ARGS)

test-slow: $(STAMP) ## the large grids, every example and notebook; installs TRL and Jupyter first
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,trl,notebooks]'
	$(PYTEST_CPU) -m slow $(ARGS)

compile-table: $(STAMP) ## every Triton kernel for every kind of GPU, ahead of time: the table of docs/kernels.md
	PYTHONPATH=$(CURDIR) $(CPU_ENV) $(BIN)/python tests/kernels/triton_ahead.py table

# The same environment with another transformers, and what that needs, laid over it.
TRANSFORMERS ?= 5.17.0
OVERLAY := .overlay/$(TRANSFORMERS)
$(OVERLAY)/.complete: | $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check --target $(OVERLAY) transformers==$(TRANSFORMERS)
	@touch $@

test-transformers: $(OVERLAY)/.complete ## the transformers tests against TRANSFORMERS=5.17.0 (or another release)
	PYTHONPATH=$(CURDIR)/$(OVERLAY) $(PYTEST_CPU) -m "not slow" tests/patches tests/test_demo.py $(ARGS)

sweep-transformers: $(OVERLAY)/.complete ## 45 families on TRANSFORMERS=..., and what changed since the recorded releases
	$(CPU_ENV) PYTHONPATH=$(CURDIR)/$(OVERLAY) $(BIN)/python scripts/transformers_sweep.py $(ARGS)

test-quantised: $(STAMP) ## diffusers models with torchao and bitsandbytes layers, laid over the environment
	test -e .overlay/quantised/.complete || { $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
		--target .overlay/quantised torchao bitsandbytes && touch .overlay/quantised/.complete; }
	PYTHONPATH=$(CURDIR)/.overlay/quantised $(PYTEST_CPU) -m quantised tests/processors/test_quantised.py $(ARGS)

sweep: $(STAMP) ## every model class of the installed diffusers; renews docs/diffusers-models.json and its table
	$(CPU_ENV) $(BIN)/python -W ignore tests/processors/sweep.py $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# passive: on a machine that is busy with other work, spinning threads would wait for each other for minutes
demo: $(STAMP) ## a photograph and a fine-tuning run, with and without ffpa_hf; writes demo-report/index.html
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive $(BIN)/ffpa-hf demo $(ARGS)

docs: $(STAMP) ## renew the made parts of docs/ and build the site into site/, strictly
	PYTHONPATH=$(CURDIR) $(CPU_ENV) $(BIN)/python scripts/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

notebooks: $(STAMP) ## run notebooks/*.py and keep each with its outputs as .ipynb
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,notebooks]'
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/run_notebooks.py $(ARGS)

test-gpu: ## the suite with real kernels, and the GPU-only tests; ARGS="-n 16" where there are cores and memory for it
	$(CPU_ENV) PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -q -m "not slow" $(ARGS)

sanitize: ## compute-sanitizer over small calls of every kernel, on a GPU; e.g. make sanitize ARGS="--tools memcheck"
	PYTHONPATH=$(CURDIR) $(PYTHON) scripts/sanitize.py $(ARGS)

soak: ## 10,000 mixed calls: flat memory, nothing compiled late
	PYTHONPATH=$(CURDIR) $(PYTHON) scripts/soak.py $(ARGS)

random-calls: ## 20,000 random calls on a GPU against float64, in chunks; again resumes
	PYTHONPATH=$(CURDIR) $(PYTHON) scripts/random_calls.py --output random-calls.json $(ARGS)

bench: ## ffpa-hf bench, e.g. make bench ARGS="--cases d512_self_8k"
	PYTHONPATH=$(CURDIR) $(PYTHON) -m ffpa_hf bench $(ARGS)

clean: ## drop the environment and what was built
	rm -rf $(VENV) .overlay build dist site demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
