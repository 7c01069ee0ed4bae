# make demo    build the default recipe and let the model speak (no torch)
# make test    lint, types and the test suite
# make bench   measure that recipe's bundle; bench-peers measures it beside llama.cpp, OpenVINO and ONNX Runtime
.PHONY: demo test lint types bench bench-peers asan

PYTHON ?= python3
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEV := .venv/.installed
DEMO := .venv-demo/.installed
PROMPT ?= Why is the sky blue?
RECIPE := recipes/smollm2-135m.yaml
BUNDLE := artifacts/smollm2-135m
PEERS ?= $(HOME)/.cache/plankiln/peers
BENCH ?=

demo: $(DEMO)
	.venv-demo/bin/build $(RECIPE)
	.venv-demo/bin/plankiln run $(BUNDLE) "$(PROMPT)" --chat --max-tokens 128

test: lint types
	.venv/bin/pytest -n 2

lint: $(DEV)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(DEV)
	.venv/bin/mypy

bench: $(DEV)
	.venv/bin/build $(RECIPE)
	.venv/bin/plankiln bench $(BUNDLE) $(BENCH)

# Everyone starts from the recipe's own GGUF file. The first call takes ten minutes more; a run takes an hour of two cores.
bench-peers: $(DEV)
	.venv/bin/build $(RECIPE)
	bench/peers/setup.sh $(PEERS) $(RECIPE)
	.venv/bin/python bench/compare.py $(BUNDLE) --peers $(PEERS) $(BENCH)

# The CPU kernels under AddressSanitizer and UBSan; leaks are Python's own.
asan: $(DEV)
	PLANKILN_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so)" \
	  .venv/bin/pytest -p no:cacheprovider tests/test_cpu*.py

$(DEV): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) -e '.[dev]'
	touch $@

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python $(PIP_INSTALL) -e '.[build]'
	touch $@
