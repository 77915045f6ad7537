# Everything a user or developer runs. The environment is .venv, made by `make setup`, pip only.
# Another Python beside it: `make test PYTHON=python3.13 VENV=.venv-3.13`.
#
# TORCH_INDEX: PyTorch's own index for a build without CUDA, where pip would fetch the CUDA one:
#     make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.docs-installed
WORKERS ?= 5
TORCH  ?= 2.10.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-all test-again test-lowest test-torch test-cuda test-gcs check docs picture bench scale campaign campaign-nodes matrix fuzz build clean

help:      ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP)  ## Make .venv and install the package with what its tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(if $(TORCH_INDEX),$(BIN)/pip install --quiet -c constraints.txt --index-url $(TORCH_INDEX) torch)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## Train, kill, resume, rotate, lose the disk, stage, lose a node: the whole story, here or with MIRROR=gs://bucket/prefix
	$(BIN)/ckptmirror demo $(if $(MIRROR),--mirror '$(MIRROR)')

# In WORKERS processes, which often wait for others; files of long tests come first, so that short ones fill the end evenly.
# Threads of OpenMP would wait busily for processors that other workers have.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40

test: setup  ## Run the tests of minutes: unit, contract, slices of simulation and crash, each verb end to end
	$(PYTEST) -m 'short or not long'

test-long: setup  ## Run the tests that `make test` leaves out: example pages, roles, credentials, long matrices
	$(PYTEST) -m 'long and not short'

test-all: test test-long  ## Run every test once

test-again: setup  ## Run the tests that failed last, alone, and name them: does one fail only beside others?
	$(BIN)/python -m pytest -v --maxfail=1 --last-failed --last-failed-no-failures none

test-lowest:  ## Run what imports most with the lowest version of each dependency that pyproject.toml allows
	mkdir -p build
	$(PYTHON) tests/lowest.py > build/lowest.txt
	$(PYTHON) -m venv .venv-lowest
	$(if $(TORCH_INDEX),.venv-lowest/bin/pip install --quiet -c constraints.txt --index-url $(TORCH_INDEX) torch)
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -c build/lowest.txt -e '.[testing]' \
	    hypothesis psutil pytest-timeout
	.venv-lowest/bin/python -m pytest -q -m 'not long' tests/unit/core tests/unit/local tests/unit/stores tests/unit/formats \
	    tests/integration/test_save.py tests/integration/test_resume.py tests/integration/test_stage.py \
	    tests/integration/test_signed_runs.py tests/integration/test_cli.py tests/integration/test_tables.py

test-torch:  ## Run the tests of minutes with another PyTorch: TORCH=2.10.0, the oldest that pyproject.toml allows
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	    torch==$(TORCH)
	.venv-torch/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[dev]'
	.venv-torch/bin/python -m pytest -n $(WORKERS) --dist loadfile -m 'short or not long'

test-cuda: setup  ## Run the tests that need a GPU, which `make test` skips where there is none
	$(BIN)/python -m pytest tests/cuda

test-gcs: setup  ## Run the store contract suite in a bucket of yours: BUCKET=my-bucket
	$(BIN)/python -m tests.contract.in_bucket '$(BUCKET)'

check: setup  ## Lint, types, layers
	$(BIN)/ruff check ckptmirror deploy tests docs/site
	$(BIN)/ruff format --check ckptmirror deploy tests docs/site
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DOCS)  ## Build the site of the documentation in build/docs; a broken link is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env -c docs/site -d build/doctrees . build/docs

$(DOCS): $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

picture: $(DOCS)  ## Draw docs/timeline.png, the picture of the README, from a run of the demo
	mkdir -p build
	$(BIN)/ckptmirror demo --timeline build/timeline.svg
	$(BIN)/python docs/site/raster.py build/timeline.svg docs/timeline.png

bench: setup  ## Measure against what you would use instead, as ratios, beside the physical limit
	$(BIN)/python -m tests.bench

scale: setup  ## Count what a save and a start cost a job of 1 to 100 nodes of 8 ranks, and 1,000 where no job runs: NODES=100 for one size
	$(BIN)/python -m tests.scale $(if $(NODES),--nodes $(NODES))

campaign: setup  ## Kill at every crash point, play long histories: not only the slice that `make test` takes
	CKPTMIRROR_CAMPAIGN=full $(BIN)/python -m pytest tests/crash tests/simulation tests/unit/core/start \
	    tests/integration/test_random_loads.py tests/nodes/test_crash_points_on_nodes.py \
	    tests/nodes/test_kubernetes_job.py tests/nodes/test_links_between_nodes.py tests/nodes/test_zombies_on_nodes.py --timeout=3600

matrix: setup  ## Load what 1 to 8 ranks saved, of each kind and under each wrapper, or were killed after, on 1 to 8 ranks
	CKPTMIRROR_MATRIX=full $(BIN)/python -m pytest -v tests/integration/test_matrix.py --timeout=3600

campaign-nodes: setup  ## Random histories of jobs of 2 to 4 nodes on real processes: HISTORIES=300 SEED=7 (one is repeated by its own)
	nice $(BIN)/python -m tests.nodes.campaign --shorten $(if $(HISTORIES),--histories $(HISTORIES)) $(if $(SEED),--seed $(SEED))

fuzz: setup  ## Give every reader bytes that nobody meant to write, for an hour: SECONDS=600 READER=pickle
	$(BIN)/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(READER),--reader '$(READER)')

build:     ## Build the wheel, the source archive, and a CycloneDX list of what the wheel installs, in dist
	rm -rf .venv-build dist
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/pip install --quiet --disable-pip-version-check 'build>=1.2'
	.venv-build/bin/python -m build
	$(PYTHON) -m venv --clear .venv-build
	$(if $(TORCH_INDEX),.venv-build/bin/pip install --quiet -c constraints.txt --index-url $(TORCH_INDEX) torch)
	.venv-build/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(PYTHON) -m venv .venv-build/tool
	.venv-build/tool/bin/pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=5'
	.venv-build/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	    --output-file dist/ckptmirror.cdx.json .venv-build
	$(PYTHON) tests/listed.py dist/ckptmirror.cdx.json

clean:     ## Remove what the targets made
	rm -rf $(VENV) .venv-lowest .venv-torch .venv-build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
