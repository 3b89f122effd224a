# Everything sets itself up: `make demo` and `make test` need only python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := src tests examples docs benchmarks
PEERS := safetensors torch-checkpointing nvidia-resiliency-ext defusedxml
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Where bytecode is not written, each of the processes of `unit` compiles all test modules and pytest's plug-ins.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup slurm chromium wheel soak test test-all test-torch test-faults test-outage test-gpu bench-gpu lint types collected unit docs demo demo-ray bench bench-peers bench-results format clean

help:
	@echo "make demo    train through slow, hung and killed ranks, lost nodes and a preemption, and prove the result"
	@echo "make demo-ray    train actors on Ray through killed, stopped and raising ones, and prove the result"
	@echo "make test    lint, types, docs, tests: eight minutes on two cores"
	@echo "make test-all    make test, and the tests marked extended: long runs of adapters, Ray, Slurm, outages, benchmarks"
	@echo "make test-faults    the long campaigns of faults that make test runs samples of: before a release"
	@echo "make test-outage MINUTES=15    training while its directory, or its object store, hangs for so long"
	@echo "make soak    ten minutes of training under a fault every five seconds, and the proof that nothing changed"
	@echo "make test-integrations    the adapters on packages that clash with the pinned ones, each extra alone"
	@echo "make test-torch TORCH=2.8.0    launcher, checkpoints, sessions, restarts in process on another torch (gigabytes)"
	@echo "make test-gpu    what needs a GPU, with an interpreter whose torch can use one; installs nothing"
	@echo "make setup   only make $(VENV), with pinned packages"
	@echo "make slurm   install Slurm and munge, on which some tests start a cluster of their own"
	@echo "make lint | types | unit | docs    one part of make test"
	@echo "make bench   measure against the stock launcher and other checkpoint libraries"
	@echo "make bench-gpu RESULTS=FOLDER   measure on a GPU, with such an interpreter, and store the result"
	@echo "make bench-peers   install more libraries, and measure restarts in process and checkpoints beside them"
	@echo "make bench-results   measure everything and write the figures of the docs (docs/results)"
	@echo "make wheel   build the sdist and the wheel into dist/, without a network"
	@echo "make format  put the code into its form"
	@echo "make clean   remove what was made here"

setup: $(STAMP)

# torch goes first and alone, so that its large wheel is chosen by its own pin and nothing can replace it later.
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

# The tests start a real Slurm of three nodes, in a temporary folder and as their own children; nothing is configured.
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
	command -v apt-get >/dev/null || { echo "install chromium and chromedriver: the tests of the report's page are skipped without" >&2; exit 0; }; \
	echo "installing chromium and chromium-driver"; \
	[ "$$(id -u)" = 0 ] && sudo= || sudo="sudo -n"; \
	$$sudo apt-get update -qq && \
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null

# Two parts at a time; the tests begin last, so that their summary is what ends the output.
test: setup slurm chromium
	@$(BIN)/python -c 'from outlast.runtime.device import why_absent; why = why_absent("gpu"); \
	print("make test: the GPU tests are skipped;", f"{why};" if why else "", "make test-gpu runs them on a GPU")'
	@$(MAKE) --no-print-directory -j2 lint types docs unit

# pytest compiles each test module for its assertions: here once, and not in each of the processes of `unit`.
collected: setup
	@$(BIN)/python -m compileall -q src benchmarks
	-@$(BIN)/python -m pytest --collect-only -q >/dev/null

# Without a cache: where an import belongs depends on files that may have been added or moved since.
lint: setup
	$(BIN)/ruff check --no-cache $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: setup
	$(BIN)/mypy

# Ten processes run tests in parallel on two cores: most of the time a test waits.
unit: setup slurm chromium collected
	$(BIN)/python -m pytest -n 10 --dist loadscope --no-loadscope-reorder --durations=10

# What `make test` leaves out, too: the tests marked `extended`.
test-all: setup slurm chromium lint types docs collected
	$(BIN)/python -m pytest -m 'not campaign and not gpu and not overlay' -n 10 --dist loadscope --no-loadscope-reorder \
	  --durations=10

# Twelve minutes: two nodes and two spares train under 120 faults of all kinds, and end bit-identical.
soak: setup
	$(BIN)/outlast chaos soak

test-faults: setup slurm
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -m campaign -n 2 --dist loadscope --no-loadscope-reorder --durations=10

# A directory and an object store at once; needs root, bindfs and a few minutes more than MINUTES.
MINUTES ?= 15
test-outage: setup
	$(BIN)/python tests/places/outage.py --minutes $(MINUTES)

# Packages that clash with the pinned ones lie in an environment over $(VENV), which sees that one's packages, too. NVIDIA's
# extension lies apart: tests that compare with it put the folder on their path.
OVERLAY := .venv-integrations
OVERLAY_STAMP := $(OVERLAY)/.installed
OVERLAY_PIP = $(OVERLAY)/bin/python -m pip install --quiet --disable-pip-version-check
$(OVERLAY_STAMP): $(STAMP)
	@$(OVERLAY)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(OVERLAY)
	@echo "installing packages that clash with the pinned ones into $(OVERLAY)"
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

# In an environment of its own, with the packages' pins but torch's. TORCH_PYTHON names another interpreter.
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

# Runs $(1) with the first interpreter whose torch can use a GPU, as it is: nothing is installed, no network is needed, and
# no torch for CPUs comes over one for GPUs. What it needs beside torch: $(2), where the module has another name behind =.
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
echo "make $@: no GPU that torch can use is here; nothing was run"
endef
GPU_PACKAGES := numpy msgspec xxhash click rich psutil fsspec tomli_w
GPU_TESTS = $$(grep -rlE 'mark\.gpu\b' --include='test_*.py' tests)

# Modules that need other packages are not even collected. Six at a time: small models, on a GPU that all can share.
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

# Alone, without what they ask for: that would replace torch by one with CUDA. What is needed of it is here already.
bench-peers: setup
	@for peer in $(PEERS); do \
	  $(PIP) --no-deps $$peer || echo "bench-peers: $$peer is not available here; it is left out" >&2; done
	$(BIN)/python -m benchmarks inprocess
	$(BIN)/python -m benchmarks save
	$(BIN)/python -m benchmarks load
	$(BIN)/python -m benchmarks replica

# The committed results that the docs' figures come from. Leave the machine alone meanwhile; install the peers first.
# A missed bar ends the first command with 1: the tables are written all the same.
bench-results: setup
	-$(BIN)/python -m benchmarks all --results docs/results
	$(BIN)/python docs/generate.py

# The build backend itself, in $(VENV), with nothing fetched. build/ may hold modules that are no longer there.
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
