# Everything runs in a virtual environment of its own (VENV), made or reused.
# CPU-only machines: torch is pinned to a version whose CPU build is small; on a GPU machine set
# TORCH="torch" (or any version) before the first run.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# A random model of 221 million parameters, built the first time that it is wanted.
BENCH_MODEL ?= build/bench_model
BIN := $(VENV)/bin
# Environments of the clients that are tried: their packages stay out of our own.
CLIENTS := build/clients
STAMP := $(VENV)/.installed
# One thread a matrix product: tests run many small models, and two cores are shared.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help demo up test unit chaos browser images images-test images-lock fuzz-http clients check format proto exactness train evaluate bench clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(STAMP) ## Start all three services, ask about a picture in two ways, stop.
	@$(BIN)/chiasm demo

up: $(STAMP) ## Start all three services with the demo model and keep them running.
	@$(BIN)/chiasm up

test: unit ## Run all tests, with real servers on free ports.
	$(TEST_ENV) $(BIN)/python -m pytest -m families -n 2
	$(TEST_ENV) $(BIN)/python -m pytest -m system

unit: $(STAMP) ## Run the tests that need no whole system, two at a time.
	$(TEST_ENV) $(BIN)/python -m pytest -m "not system and not families and not chaos and not browser and not images" -n 2

chaos: $(STAMP) ## Kill, stop and restart services under load; prints figures (several minutes).
	$(TEST_ENV) $(BIN)/python -m pytest -m chaos

browser: $(STAMP) ## Try the page in a headless Chromium (Debian: apt install chromium).
	$(TEST_ENV) $(BIN)/python -m pytest -m browser

images: $(STAMP) ## Build the container images from the locks (buildah, mmdebstrap; docs/images.md).
	$(BIN)/python -m deploy.images build $(IMAGES)

images-test: $(STAMP) ## Run the images with podman: an answer, health, stopping, what is in them.
	$(TEST_ENV) $(BIN)/python -m pytest -m images

images-lock: $(STAMP) ## Lock the newest Debian and Python packages for the images.
	$(BIN)/python -m deploy.images lock

fuzz-http: $(STAMP) ## Send 10,000 requests made from the OpenAPI document (several minutes).
	$(BIN)/python -m tests.http_fuzz

clients: $(STAMP) $(CLIENTS)/.newest $(CLIENTS)/.older $(CLIENTS)/.node ## Try OpenAI's and others' clients against chiasm up.
	$(TEST_ENV) $(BIN)/python -m tests.clients

check: $(STAMP) ## Formatting, lint, types, import contracts, schema lint.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint

format: $(STAMP) ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP) ## Regenerate the stubs under chiasm/v1 from proto/.
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py

exactness: $(STAMP) ## Compare the split of every model family with the whole model; print a table.
	$(TEST_ENV) $(BIN)/python -m tests.families

train: $(STAMP) ## Train the demo model anew (under an hour on two cores).
	$(BIN)/python -m demo_model.train --out demo_model/checkpoint

evaluate: $(STAMP) ## Print how often the demo model answers rightly, by kind of question.
	$(BIN)/python -m demo_model.evaluate --model demo_model/checkpoint

bench: $(STAMP) ## Measure the tensor codec against a plain copy, the engine against memory's speed.
	$(BIN)/python -m benchmarks.codec
	@test -f $(BENCH_MODEL)/model.safetensors || $(BIN)/python -m benchmarks.engine checkpoint --out $(BENCH_MODEL)
	$(BIN)/python -m benchmarks.engine step --model $(BENCH_MODEL)

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# rows.c is compiled as the package is installed.
$(STAMP): pyproject.toml hatch_build.py llm_service/engine/native/rows.c llm_service/engine/native/build.py
	@echo "== virtual environment in $(VENV) (first time: some minutes, about 1.5 GB)"
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "Chiasm needs Python 3.11 to 3.13; this is %d.%d: run make PYTHON=python3.12" % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== torch"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --progress-bar on -q "$(TORCH)"
	@echo "== the other packages"
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $(STAMP)
	@echo "== installed"

$(CLIENTS)/.newest $(CLIENTS)/.older: $(CLIENTS)/.%: tests/clients/requirements/%.txt | $(STAMP)
	@echo "== clients in $(CLIENTS)/$*"
	@$(BIN)/python -m venv --clear $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install -q -r $<
	@touch $@

# npm brings the Node that runs them, as the clients want a newer one than many machines have.
$(CLIENTS)/.node: tests/clients/node/package.json tests/clients/node/package-lock.json
	@command -v npm >/dev/null || { echo "make clients needs npm: on Debian, apt install nodejs npm"; exit 1; }
	@echo "== clients in $(CLIENTS)/node"
	@mkdir -p $(CLIENTS)/node && cp $^ $(CLIENTS)/node
	@cd $(CLIENTS)/node && npm ci --no-audit --no-fund --loglevel=error
	@touch $@
