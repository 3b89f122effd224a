# `make demo` and `make test` install what they need; they require only python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := src tests examples docs benchmarks
PEERS := safetensors torch-checkpointing nvidia-resiliency-ext defusedxml
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Without written bytecode, each process of `unit` would compile all test modules and pytest's plug-ins.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup slurm chromium wheel soak test test-all test-torch test-faults test-outage test-gpu bench-gpu lint types collected unit docs demo demo-ray bench bench-peers bench-results format clean

help:
	@echo "make demo    train through slow, hung and killed ranks, lost nodes and a preemption, and prove the result"
	@echo "make demo-ray    train actors on Ray through killed, stopped and raising ones, and prove the result"
	@echo "make test    lint, types, docs, tests: eight minutes on two cores"
	@echo "make test-all    make test and the tests marked extended: long runs of adapters, Ray, Slurm, outages, benchmarks"
	@echo "make test-faults    run the long fault campaigns, of which make test runs samples; for releases"
	@echo "make test-outage MINUTES=15    train while the checkpoint directory or object store hangs for that time"
	@echo "make soak    train for ten minutes with a fault every five seconds, and prove that the result is unchanged"
	@echo "make test-integrations    test the adapters with packages that conflict with the pinned ones, and each extra alone"
	@echo "make test-torch TORCH=2.8.0    test launcher, checkpoints, sessions, in-process restarts with another torch (gigabytes)"
	@echo "make test-gpu    run the GPU tests, with an interpreter whose torch can use a GPU; installs nothing"
	@echo "make setup   only create $(VENV), with pinned packages"
	@echo "make slurm   install Slurm and munge, with which some tests start a cluster"
	@echo "make lint | types | unit | docs    run one part of make test"
	@echo "make bench   measure against the stock launcher and other checkpoint libraries"
	@echo "make bench-gpu RESULTS=FOLDER   measure on a GPU, with the same interpreter as make test-gpu, and store the results"
	@echo "make bench-peers   install more libraries, and compare in-process restarts and checkpoints with them"
	@echo "make bench-results   run all benchmarks and write the results for the docs (docs/results)"
	@echo "make wheel   build the sdist and the wheel into dist/, without a network"
	@echo "make format  format the code"
	@echo "make clean   remove environments, caches and build outputs"

setup: $(STAMP)

# torch is installed first and alone, so that its pin chooses the large wheel and no later package replaces it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "python cannot make virtual environments; install its venv module (Debian: python3-venv)" >&2; exit 1; }
	@echo "installing pinned packages into $(VENV) (the first time takes minutes)"
	$(PIP) torch==2.13.0
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[dev,docs,stacks,yaml]'
	$(PIP) --no-deps megatron-core==0.16.1
	@touch $(STAMP)

# The tests start a real Slurm cluster of three nodes as child processes in a temporary folder; the system's Slurm is not
# configured.
slurm:
	@PATH="$$PATH:/usr/sbin"; for tool in sbatch slurmctld slurmd munged; do command -v $$tool >/dev/null || missing=1; done; \
	[ -z "$$missing" ] && exit 0; \
	command -v apt-get >/dev/null || { echo "install Slurm and munge: the tests need slurmctld, slurmd, munged" >&2; exit 1; }; \
	echo "installing slurm-wlm and munge"; \
	[ "$$(id -u)" = 0 ] && sudo= || sudo="sudo -n"; \
	$$sudo apt-get update -qq && \
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null

# The tests drive the page of `outlast report` in a real browser.
chromium:
	@command -v chromedriver >/dev/null && exit 0; \
	command -v apt-get >/dev/null || { echo "install chromium and chromedriver; without them the tests of the report's page are skipped" >&2; exit 0; }; \
	echo "installing chromium and chromium-driver"; \
	[ "$$(id -u)" = 0 ] && sudo= || sudo="sudo -n"; \
	$$sudo apt-get update -qq && \
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null

# Two parts at a time; the tests begin last, so that the output ends with their summary.
test: setup slurm chromium
	@$(BIN)/python -c 'from outlast.runtime.device import why_absent; why = why_absent("gpu"); \
	print("make test: the GPU tests are skipped;", f"{why};" if why else "", "make test-gpu runs them on a GPU")'
	@$(MAKE) --no-print-directory -j2 lint types docs unit

# pytest compiles each test module for its assertions: once here instead of in each process of `unit`.
collected: setup
	@$(BIN)/python -m compileall -q src benchmarks
	-@$(BIN)/python -m pytest --collect-only -q >/dev/null

# Without a cache: the order of imports depends on files that may have been added or moved.
lint: setup
	$(BIN)/ruff check --no-cache $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: setup
	$(BIN)/mypy

# Eight processes run tests in parallel on two cores: most of the time a test waits.
unit: setup slurm chromium collected
	$(BIN)/python -m pytest -n 8 --dist loadscope --no-loadscope-reorder --durations=10

# `make test` and the tests marked `extended`.
test-all: setup slurm chromium lint types docs collected
	$(BIN)/python -m pytest -m 'not campaign and not gpu and not overlay' -n 8 --dist loadscope --no-loadscope-reorder \
	  --durations=10

# Twelve minutes: two nodes and two spares train through 120 faults of all kinds; the result is bit-identical.
soak: setup
	$(BIN)/outlast chaos soak

test-faults: setup slurm
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -m campaign -n 2 --dist loadscope --no-loadscope-reorder --durations=10

# A directory and an object store hang at the same time; needs root, bindfs and a few minutes more than MINUTES.
MINUTES ?= 15
test-outage: setup
	$(BIN)/python tests/places/outage.py --minutes $(MINUTES)

# Packages that conflict with the pinned ones are installed in a separate environment, which also sees the packages of
# $(VENV). NVIDIA's extension is in its own folder: tests that compare with it add the folder to their path.
OVERLAY := .venv-integrations
OVERLAY_STAMP := $(OVERLAY)/.installed
OVERLAY_PIP = $(OVERLAY)/bin/python -m pip install --quiet --disable-pip-version-check
$(OVERLAY_STAMP): $(STAMP)
	@$(OVERLAY)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(OVERLAY)
	@echo "installing packages that conflict with the pinned ones into $(OVERLAY)"
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(OVERLAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/under.pth"
	$(OVERLAY_PIP) nemo-run==0.11.1 leptonai==0.27.3 wandb==0.31.0 mlflow-skinny==3.17.2 kubernetes-validate==1.37.0
	$(OVERLAY_PIP) --constraint constraints.txt gcsfs gcp-storage-emulator==2026.7.19 'ray[default]'
	$(OVERLAY_PIP) --no-deps megatron-bridge==0.3.1
	$(OVERLAY_PIP) --no-deps --only-binary :all: --platform manylinux_2_39_$$(uname -m) --python-version \
	  $$($(OVERLAY)/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])') --upgrade --target $(OVERLAY)/nvrx \
	  nvidia-resiliency-ext==0.6.0 defusedxml httpx==0.27.2
	@touch $(OVERLAY_STAMP)

test-integrations: slurm $(OVERLAY_STAMP)
	@$(BIN)/python -m compileall -q src
	PATH="$(CURDIR)/$(OVERLAY)/bin:$(CURDIR)/$(BIN):$$PATH" \
	$(OVERLAY)/bin/python -m pytest -m 'overlay or campaign' -n 2 --dist loadscope --no-loadscope-reorder --durations=10 \
	  tests/integrations tests/examples tests/ray tests/dcp/test_gcs.py

# In a separate environment, with all pins except torch's. TORCH_PYTHON selects another interpreter.
TORCH ?= 2.8.0
TORCH_PYTHON ?= $(PYTHON)
TORCH_VENV = .venv-torch-$(TORCH)
TORCH_PIP = $(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir
TORCH_TESTS := $(addprefix tests/,launch checkpoint dcp replica inprocess session)
test-torch:
	@[ -x $(TORCH_VENV)/bin/python ] || $(TORCH_PYTHON) -m venv $(TORCH_VENV)
	@echo "installing torch $(TORCH) into $(TORCH_VENV) (gigabytes; remove the folder afterwards)"
	@grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_PIP) torch==$(TORCH)
	$(TORCH_PIP) --constraint $(TORCH_VENV)/constraints.txt setuptools PyYAML hypothesis 'moto[server]' py-spy pytest \
	  pytest-timeout pytest-xdist s3fs safetensors numpy xxhash msgspec click rich psutil fsspec nvidia-ml-py tomli_w
	$(TORCH_PIP) --no-build-isolation --no-deps --editable .
	PATH="$(CURDIR)/$(TORCH_VENV)/bin:$$PATH" $(TORCH_VENV)/bin/python -m pytest -n 1 --durations=10 $(TORCH_TESTS)

# Runs $(1) with the first interpreter whose torch can use a GPU. Nothing is installed, so no network is needed and torch
# for GPUs is not replaced by torch for CPUs. $(2): the packages needed in addition to torch, with =MODULE if the module has
# another name.
define ON_GPU
@export PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}"; lacking=; \
for python in "$(PYTHON)" $(wildcard $(BIN)/python); do \
  "$$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1 || continue; \
  missing=$$("$$python" -c 'import importlib.util, sys; names = [name.partition("=") for name in sys.argv[1:]]; \
    print(*(name for name, _, module in names if not importlib.util.find_spec(module or name)))' $(2)) || exit 2; \
  if [ -z "$$missing" ]; then exec "$$python" $(1); fi; \
  lacking="$${lacking:-$$python lacks $$missing: $$python -m pip install $$missing}"; \
done; \
if [ -n "$$lacking" ]; then echo "make $@: $$lacking" >&2; exit 2; fi; \
echo "make $@: torch cannot use a GPU on this machine; nothing was run"
endef
GPU_PACKAGES := numpy msgspec xxhash click rich psutil fsspec tomli_w
GPU_TESTS = $$(grep -rlE 'mark\.gpu\b' --include='test_*.py' tests)

# Modules that need other packages are not collected. Six processes at a time: small models share one GPU.
test-gpu: export OUTLAST_TESTS_COLD := 1
test-gpu:
	$(call ON_GPU,-m pytest -m gpu -W default -n 6 --dist loadscope --no-loadscope-reorder --durations=10 $(GPU_TESTS),\
	  $(GPU_PACKAGES) pytest pytest-timeout=pytest_timeout pytest-xdist=xdist hypothesis)

# RESULTS=docs/results also stores the result for the tables of the docs.
bench-gpu:
	$(call ON_GPU,-m benchmarks all --only gpu $(if $(RESULTS),--results $(RESULTS)) \
	  $(if $(REPEATS),--repeats $(REPEATS)),$(GPU_PACKAGES))

docs: setup
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

demo: setup
	$(BIN)/python examples/demo.py

demo-ray: setup
	@RAY_DEDUP_LOGS_SKIP_REGEX='A worker died or was killed' \
	$(BIN)/python examples/ray_ppo.py --fail kill@40,stop@80,exception@120 --compare

bench: setup
	$(BIN)/python -m benchmarks all

# Without their dependencies, which would replace torch by torch for CUDA; the needed ones are already installed.
bench-peers: setup
	@for peer in $(PEERS); do \
	  $(PIP) --no-deps $$peer || echo "bench-peers: $$peer is not available; it is skipped" >&2; done
	$(BIN)/python -m benchmarks inprocess
	$(BIN)/python -m benchmarks save
	$(BIN)/python -m benchmarks load
	$(BIN)/python -m benchmarks replica

# The committed results that the docs are generated from. Run nothing else on the machine; run bench-peers first.
# A missed target ends the first command with exit code 1; the tables are written nevertheless.
bench-results: setup
	-$(BIN)/python -m benchmarks all --results docs/results
	$(BIN)/python docs/generate.py

# Calls the build backend in $(VENV), which needs no network. build/ may contain modules that have been removed.
wheel: setup
	@rm -rf build dist
	@for kind in sdist wheel; do \
	  $(BIN)/python -c "from setuptools import build_meta; build_meta.build_$$kind('dist')" >/dev/null || exit 1; done
	@ls dist/*

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .venv-torch-* build dist site .mypy_cache .ruff_cache .hypothesis outlast-runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
