# `make demo` and `make test` set up what they need on a fresh machine with Python 3.11, `make demo-gpu` on a GPU host with
# Python 3.12. GPU_PYTHON=python3 uses an interpreter that has everything already, such as that of an engine's image.
PYTHON ?= python3.11
VENV ?= .venv
CUDA := $(VENV)-cuda
GPU_PYTHON ?= $(CUDA)/bin/python
GPU_READY := $(if $(filter $(CUDA)/bin/python,$(GPU_PYTHON)),$(CUDA)/.ready)
SGLANG := $(VENV)-sglang
CUDA_SGLANG := $(abspath $(CUDA)-sglang)
# on GPUs too SGLang has an interpreter of its own
SGLANG_PYTHON ?= $(CUDA_SGLANG)/bin/python
SGLANG_READY := $(if $(filter $(CUDA_SGLANG)/bin/python,$(SGLANG_PYTHON)),$(CUDA_SGLANG)/.ready)
FP8 := $(VENV)-fp8
TRACKING := $(VENV)-tracking
BRIDGE := $(VENV)-bridge
VERIFIERS := $(VENV)-verifiers
OPENENV := $(VENV)-openenv
REMOTE := $(VENV)-remote
JAX := $(VENV)-jax
JAX_PYTHON ?= python3.12
BIN := $(VENV)/bin
LOCK := deploy/locks/cpu.txt
# test processes: one more than the least number of cores, since tests wait for services half of their time
JOBS ?= 3
SEED ?= 1
MINUTES ?= 2
# the others import what the GPU environment does not have
GPU_TESTS = $(shell grep -rlE 'mark\.gpu|TWO_GPUS' tests --include='test_*.py')
FP8_TESTS := tests/trainer/layers/test_fp8.py
CONTRACT := tests/rollout/engines/test_contract.py
# engines of the contract suite at once: four on each GPU, each with a tenth of its memory
GPU_LANES ?= $(shell echo $$((4 * $$(nvidia-smi -L 2>/dev/null | wc -l))))
# a report of each suite, under the name of the commit, for `make guarantees`
REPORT = -o junit_suite_name=$(shell git describe --always --dirty 2>/dev/null || echo unknown) --junitxml=runs/junit
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Compiled modules are kept: every service is a process of its own, and imports them sooner.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo demo-gpu test pytest test-slow test-gpu test-gpu-engines test-one-gpu test-two-gpus check docs bench bench-check bench-trainer bench-generation bench-gpu chaos soak test-compose test-containers guarantees clean

setup: $(VENV)/.ready $(SGLANG)/.ready

$(VENV)/.ready: $(LOCK) pyproject.toml deploy/setup.sh
	PYTHON=$(PYTHON) bash deploy/setup.sh $(VENV)
	touch $@

# SGLang on a CPU, for tests alone
$(SGLANG)/.ready: $(VENV)/.ready deploy/locks/sglang-cpu.txt deploy/setup_layer.sh
	bash deploy/setup_layer.sh $(VENV) $(SGLANG) deploy/locks/sglang-cpu.txt
	touch $@

# torchao, for tests of `trainer.fp8`
$(FP8)/.ready: $(VENV)/.ready deploy/locks/fp8.txt deploy/setup_layer.sh
	bash deploy/setup_layer.sh $(VENV) $(FP8) deploy/locks/fp8.txt
	touch $@

# the trackers wandb, mlflow and trackio, for slow tests alone
$(TRACKING)/.ready: $(VENV)/.ready deploy/locks/tracking.txt deploy/setup_layer.sh
	bash deploy/setup_layer.sh $(VENV) $(TRACKING) deploy/locks/tracking.txt
	touch $@

# megatron-bridge, with which slow tests compare conversions; its wheels ask for Python 3.12 and run on 3.11
$(BRIDGE)/.ready: $(VENV)/.ready deploy/locks/bridge.txt deploy/setup_layer.sh
	PIP_IGNORE_REQUIRES_PYTHON=1 bash deploy/setup_layer.sh $(VENV) $(BRIDGE) deploy/locks/bridge.txt
	touch $@

# environment servers of `verifiers`, for a slow test; it needs older versions of openai and mcp
$(VERIFIERS)/.ready: $(VENV)/.ready deploy/locks/verifiers.txt deploy/setup_layer.sh
	bash deploy/setup_layer.sh $(VENV) $(VERIFIERS) deploy/locks/verifiers.txt
	touch $@

# a server of OpenEnv, for a slow test
$(OPENENV)/.ready: $(VENV)/.ready deploy/locks/openenv.txt deploy/setup_layer.sh
	bash deploy/setup_layer.sh $(VENV) $(OPENENV) deploy/locks/openenv.txt
	touch $@

# clients of remote sandboxes, for slow tests: `$(REMOTE)/bin/python -m pytest -m slow tests/rollout/sandboxes/remote`
$(REMOTE)/.ready: $(VENV)/.ready deploy/locks/remote-sandboxes.txt deploy/setup_layer.sh
	bash deploy/setup_layer.sh $(VENV) $(REMOTE) deploy/locks/remote-sandboxes.txt
	touch $@

# sglang-jax on a CPU, for slow tests; nothing of it can live in Python 3.11
$(JAX)/.ready: deploy/locks/sglang-jax.txt deploy/setup.sh
	PYTHON=$(JAX_PYTHON) bash deploy/setup.sh $(JAX) sglang-jax
	touch $@

$(CUDA)/.ready: deploy/locks/cuda.txt pyproject.toml deploy/setup.sh
	PYTHON=python3.12 bash deploy/setup.sh $(CUDA) cuda
	touch $@

$(CUDA_SGLANG)/.ready: deploy/locks/sglang-cuda.txt pyproject.toml deploy/setup.sh
	PYTHON=python3.12 bash deploy/setup.sh $(CUDA_SGLANG) sglang-cuda
	touch $@

demo: $(VENV)/.ready
	rm -rf runs/demo
	$(BIN)/tether up deploy/configs/demo.toml --run-dir runs/demo
	$(BIN)/tether verify runs/demo

# the same job on the GPUs there are
demo-gpu: $(GPU_READY)
	rm -rf runs/demo-gpu
	$(GPU_PYTHON) -m services.cli up deploy/configs/demo.toml --run-dir runs/demo-gpu
	$(GPU_PYTHON) -m services.cli verify runs/demo-gpu

# checks run beside the tests, and while SGLang's environment is made
test: $(VENV)/.ready
	$(MAKE) --jobs 2 check pytest

# pytest ends with 5 where no test of FP8 runs by default
pytest: setup $(FP8)/.ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations 30 $(REPORT)/pytest.xml -m "not slow and not gpu"
	$(FP8)/bin/python -m pytest $(REPORT)/fp8.xml -m "changed and not gpu" $(FP8_TESTS) || [ $$? -eq 5 ]

test-slow: setup $(TRACKING)/.ready $(BRIDGE)/.ready $(VERIFIERS)/.ready $(OPENENV)/.ready $(REMOTE)/.ready $(JAX)/.ready $(FP8)/.ready
	$(BIN)/python -m pytest $(REPORT)/slow.xml -m slow
	$(FP8)/bin/python -m pytest -m "not gpu" $(FP8_TESTS)
	$(REMOTE)/bin/python -m pytest -m slow tests/rollout/sandboxes/remote

# engines, then a process for each GPU, then what needs two; with -k (--keep-going) also if one fails
test-gpu: test-gpu-engines test-one-gpu test-two-gpus

test-gpu-engines: $(GPU_READY) $(SGLANG_READY)
	SGLANG_PYTHON=$(SGLANG_PYTHON) $(GPU_PYTHON) -m pytest -v -n $(GPU_LANES) --dist loadgroup --durations 20 $(REPORT)/gpu-engines.xml -m "gpu and not two_gpus" $(CONTRACT)

test-one-gpu: $(GPU_READY) $(SGLANG_READY)
	SGLANG_PYTHON=$(SGLANG_PYTHON) $(GPU_PYTHON) -m pytest -v -n auto --dist loadgroup --durations 20 $(REPORT)/one-gpu.xml -m "gpu and not two_gpus" $(GPU_TESTS)

test-two-gpus: $(GPU_READY) $(SGLANG_READY)
	SGLANG_PYTHON=$(SGLANG_PYTHON) $(GPU_PYTHON) -m pytest -v --durations 20 $(REPORT)/two-gpus.xml -m two_gpus $(GPU_TESTS) $(CONTRACT)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house.check
	$(MAKE) docs

# build/site/index.html; not --quiet, which hides dead links from --strict
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

chaos: $(VENV)/.ready
	$(BIN)/python -m tests.trials.chaos.run --seed $(SEED) --minutes $(MINUTES)

soak: $(VENV)/.ready
	$(BIN)/python -m tests.trials.soak.run --minutes 15 --rollouts 200 --rewards 8 --out runs/soak.json

bench: $(VENV)/.ready
	$(BIN)/python -m tests.benchmarks.run --out runs/bench.json

# what a CPU can of bench and bench-trainer, its ratios against the recorded ones
bench-check: $(VENV)/.ready
	$(BIN)/python -m tests.benchmarks.check

bench-trainer: $(VENV)/.ready
	$(BIN)/python -m tests.benchmarks.trainer.run --out runs/bench-trainer.json $(FLAGS)

# FLAGS=--tiny GPU_PYTHON=.venv/bin/python SGLANG_PYTHON=.venv-sglang/bin/python rehearses it on a CPU
bench-generation: $(GPU_READY) $(SGLANG_READY)
	SGLANG_PYTHON=$(SGLANG_PYTHON) $(GPU_PYTHON) -m tests.benchmarks.generation.run --out runs/bench-generation.json $(FLAGS)

# TRL is compared with where it is installed; FLAGS="--tiny" rehearses the first part
bench-gpu: $(GPU_READY)
	$(GPU_PYTHON) -m tests.benchmarks.gpu.run --out runs/bench-gpu.json $(FLAGS)
	$(GPU_PYTHON) -m tests.benchmarks.gpu_trainer.run --out runs/bench-trainer-gpu.json
	$(GPU_PYTHON) -m tests.benchmarks.gpu_trainer.prefixes --out runs/bench-prefixes-gpu.json
	$(GPU_PYTHON) -m tests.benchmarks.gpu_loop.run --out runs/bench-loop-gpu.json

# the column "last run" of docs/guarantees.md, from the reports that the suites left here
guarantees: $(VENV)/.ready
	$(BIN)/python docs/guarantees.py $(wildcard runs/junit/*.xml)

test-compose: $(VENV)/.ready
	bash deploy/docker/test_compose.sh

# sandboxes in containers of Docker and of Podman
test-containers: $(VENV)/.ready
	bash deploy/docker/test_containers.sh

clean:
	rm -rf $(VENV) $(SGLANG) $(TRACKING) $(BRIDGE) $(VERIFIERS) $(JAX) $(CUDA) $(CUDA_SGLANG) runs
