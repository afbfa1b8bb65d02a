# Two commands do everything: `make serve` and `make test`. Both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PORT ?= 8080
ARGS ?=

.PHONY: serve try check coverage test test-ranks test-cuda test-hpu test-gaudi-torch check-gaudi-torch check-gaudi-3 gaudi-torches lint format bench docs image clean help

help:  ## show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

serve: $(READY)  ## serve the embedded model (PORT=8080, ARGS="--max-total-tokens 2048 ...")
	@$(BIN)/text-generation-launcher --port $(PORT) $(ARGS)

try: $(READY)  ## answer a prompt with the embedded model
	$(BIN)/tgi generate --chat "Explain in three sentences why the sky is blue." -n 128

# Workers share the fast tests, a file at a time.
FAST_TESTS := tests/unit tests/properties
SHARED := -n 2 --dist loadfile --no-loadscope-reorder

check: lint  ## what to run before each commit: lint, then the fast tests (under 3 minutes on 2 cores)
	TGI_BUCKET_EXAMPLES=8 $(BIN)/python -m pytest $(SHARED) $(FAST_TESTS)  # `make test` has 25

# Not in the lock file: what it holds must be there for every platform, whether coverage is measured or not.
coverage: $(READY)  ## which lines tests reach (needs pytest-cov; TESTS="tests/unit tests/api ...")
	@$(BIN)/python -c 'import pytest_cov' 2>/dev/null || { echo "pytest-cov is missing: $(BIN)/pip install pytest-cov"; exit 1; }
	$(BIN)/python -m pytest --cov --cov-report=term --cov-report=xml $(if $(TESTS),$(TESTS),$(FAST_TESTS))

# Tests of the server start processes, and many of them measure time, send signals or fill memory: they want the machine
# for themselves. What only asks a server or an engine of its own for answers shares it with the others, a file at a time.
# Tests wait for real processes on a machine that may be busy: what fails is run once more, and must pass then.
AGAIN := --last-failed --last-failed-no-failures none
ANSWERS := $(wildcard $(patsubst %,tests/api/test_%.py,llm native documentation clients check_command settings \
	token_ids_as_text openai_* openapi_fuzz validation recorded_http bench_offline bench_report bad_input boards chat_apis \
	thinking pictures_http ranks_http hpu_emulated))
ALONE := $(filter-out $(ANSWERS),$(wildcard tests/api/test_*.py)) tests/faults tests/clients tests/ray_serve tests/page
TOGETHER := $(ANSWERS) tests/models tests/devices $(FAST_TESTS)

test: $(READY)  ## run all tests
	-@$(BIN)/python tests/clients/install.py
	-@$(BIN)/python tests/ray_serve/ray_environment.py
	-@$(BIN)/python tests/page/page_tools.py
	$(BIN)/python -m pytest $(ALONE) || $(BIN)/python -m pytest $(AGAIN) $(ALONE)
	$(BIN)/python -m pytest $(SHARED) $(TOGETHER) || $(BIN)/python -m pytest $(AGAIN) $(TOGETHER)

test-ranks: $(READY)  ## run the tests of the server with every model split over ranks (NUM_SHARD=2)
	NUM_SHARD=$(or $(NUM_SHARD),2) $(BIN)/python -m pytest tests/api || \
		NUM_SHARD=$(or $(NUM_SHARD),2) $(BIN)/python -m pytest $(AGAIN) tests/api

test-cuda:  ## run the device suite on a GPU (PYTHON: one with torch for CUDA, Triton and the test packages)
	PYTHONPATH=src $(PYTHON) -m pytest tests/devices --device cuda

test-hpu:  ## run the device suite on Gaudi cards, write hpu-report.txt (PYTHON: one with Intel's software and the test packages)
	$(PYTHON) tests/devices/hpu_report.py

# What CI runs of it, in seconds: every module is imported, a model answers in lazy mode, without it and in FP8.
GAUDI_TORCHES ?= 2.7.1 2.9.0
GAUDI_TESTS ?= tests/unit/test_gaudi_right.py tests/devices/test_hpu_stand_in.py tests/devices/test_hpu.py tests/devices/test_hpu_alone.py
GAUDI_CHECKS := tests/unit/test_gaudi_right.py tests/devices/test_hpu.py tests/devices/test_hpu_alone.py -k "gaudi_right or comes or fp8 or experts"
WITH_TORCH = PYTHONPATH=src $(BIN)/python tools/gaudi_torch.py .venv-torch-$* $*

test-gaudi-torch: $(addprefix test-with-torch-,$(GAUDI_TORCHES))  ## the stand-in's tests with the torch of Gaudi's releases and NumPy 1.26 (0.8 GB each; GAUDI_TORCHES="2.6.0 ...")

check-gaudi-torch: $(addprefix check-with-torch-,$(GAUDI_TORCHES))  ## a few of them, in seconds each

# Tests play a Gaudi 2, as it has the narrower numbers; a Gaudi 3 has another way through the softmax, and scales of its own.
check-gaudi-3: $(READY)  ## tokens and kernels on the stand-in of a Gaudi 3
	EMULATED_GAUDI=Gaudi3 $(BIN)/python -m pytest -p no:cacheprovider tests/devices/test_hpu.py -k "not without_lazy_mode and not came_eager"

gaudi-torches: $(addprefix install-torch-,$(GAUDI_TORCHES))  ## install these alone

test-with-torch-%: $(READY)
	$(WITH_TORCH) -m pytest $(GAUDI_TESTS)

check-with-torch-%: $(READY)
	$(WITH_TORCH) -m pytest -p no:cacheprovider $(GAUDI_CHECKS)

install-torch-%: $(READY)
	$(WITH_TORCH)

DEVICE ?= cpu
IMAGE ?= tgi-$(DEVICE)
PIP_ARGS ?=
BUILD_ARGS := $(foreach name,BASE_IMAGE HABANA_VERSION HABANA_BUILD PYTORCH_VERSION,$(if $($(name)),--build-arg $(name)=$($(name))))

image:  ## build a container image (DEVICE=cpu, cuda or gaudi; IMAGE=name, BASE_IMAGE=name:tag@sha256:..., PIP_ARGS for pip)
	docker build --ulimit nofile=4096 --file docker/$(DEVICE).Dockerfile --tag $(IMAGE) \
		$(if $(PIP_ARGS),--build-arg "PIP_ARGS=$(PIP_ARGS)") $(BUILD_ARGS) .

lint: $(READY)  ## style, types and import levels
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(READY)  ## rewrite sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## the figures of bench/RESULTS.md (takes minutes; wants a quiet machine)
	$(BIN)/python bench/cpu_engine.py
	$(BIN)/python bench/front_end.py
	$(BIN)/python bench/server.py

docs: $(READY)  ## the documentation as a site, in site/; links are checked
	$(BIN)/python tools/docs_site/build.py

# The lock files are complete, so nothing is resolved and nothing beyond them is installed; every file must have its hash.
# A torch without CUDA is taken where one is offered; torch for CUDA needs libraries that stand in a file of their own.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
LOCKS := requirements.lock requirements-cpu.lock requirements-cuda.lock

$(READY): $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11 to 3.13 is needed; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the packages of requirements.lock (torch is large: this can take some minutes) ..."
	@$(INSTALL) --require-hashes -r requirements-cpu.lock 2>$(VENV)/cpu.log || echo "No torch without CUDA is offered here"
	$(INSTALL) --require-hashes -r requirements.lock
	@if $(BIN)/python docker/needs_cuda.py; then $(INSTALL) --require-hashes -r requirements-cuda.lock; fi
	$(INSTALL) --no-build-isolation -e .
	@touch $(READY)

clean:  ## remove the environments
	rm -rf $(VENV) site .venv-torch-* .venv-clients .venv-ray tests/clients/node/node_modules tests/page/node_modules
