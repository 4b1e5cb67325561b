# Twodoor's developer commands. Each target sets up all it needs on a bare machine; a second run takes seconds.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Names in the order of preference; any of them may be missing. `make PYTHON=/path/to/python setup` overrides.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
BIN := .venv/bin
STAMP := .venv/.installed
TRITON_STAMP := .venv-triton/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONWARNINGS :=

ROUNDS ?= 50
SEED ?= 1
EXTERNAL ?=
# Every warning is an error: a link or an anchor that leads nowhere is one.
SPHINX := --fail-on-warning --fresh-env --quiet --nitpicky --doctree-dir build/doctrees

.PHONY: help setup demo up test check bench peers gpu-check chaos lock proto docs clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 11

setup: $(STAMP) $(TRITON_STAMP) ## Both environments, Kafka, the default models
	@$(BIN)/python -m local_stack install
	@$(BIN)/python -m model_builder build

demo: setup ## Real stack; /predict, topic and job over real text at once; last line `demo: ok …`
	@$(BIN)/twodoor demo

up: setup ## The stack in the foreground until Ctrl-C
	@$(BIN)/twodoor up

check: $(STAMP) ## Format, lint, types, import rules, unit tests
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > .import_linter.log || { cat .import_linter.log; exit 1; }
	@$(BIN)/python -m serving.settings_doc --check
	@$(BIN)/python -m gateway.openapi_doc --check
	@$(BIN)/python -m pytest -q -n 2 tests/unit

test: setup ## All of check, and contract, integration and e2e tests against the real parts
	@$(MAKE) --no-print-directory check
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/integration
	@$(BIN)/python -m pytest -q tests/contract tests/e2e

bench: setup ## The benchmark report with pictures, in benchmarks/results/
	@$(BIN)/python -m benchmarks

peers: setup ## The same model and sentences behind what others use, each in an environment of its own
	@$(BIN)/python -m benchmarks.peers install
	@$(BIN)/python -m benchmarks.peers

gpu-check: setup ## On a machine with an NVIDIA GPU: FP16 models, both doors and the mix
	@$(BIN)/python -m benchmarks.gpu_check

chaos: setup ## Faults against the real stack, invariants after each round, planted faults found: ROUNDS=, SEED=
	@$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED)

proto: $(STAMP) ## Generate serving/v1 again
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. serving/v1/bulk.proto

docs: $(STAMP) ## Write the generated pages again and build the site in site/; EXTERNAL=1 also asks for each outer link
	@$(BIN)/python -m serving.settings_doc
	@$(BIN)/python -m gateway.openapi_doc
	@$(BIN)/python -m sphinx $(SPHINX) -b html docs site
	@if [ -n "$(EXTERNAL)" ]; then $(BIN)/python -m sphinx $(SPHINX) -b linkcheck docs build/linkcheck; fi

lock: $(STAMP) ## Resolve the requirement locks again (no address enters them)
	@requirements/lock.sh $(BIN)/uv
	@requirements/peers/lock.sh $(BIN)/uv

clean: ## Remove everything that setup made
	rm -rf .venv .venv-triton .venv-peers .kafka .twodoor .models-cache .import_linter.log site build
	find model_repository -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +

$(STAMP): requirements/cpu.lock pyproject.toml
	@deploy/venv.sh "$(PYTHON)" .venv requirements/cpu.lock
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(TRITON_STAMP): requirements/triton.lock
	@deploy/venv.sh "$(PYTHON)" .venv-triton requirements/triton.lock
	@touch $@
