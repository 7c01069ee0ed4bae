# make demo    build the default recipe and let the model speak (no torch)
# make test    lint, types and the test suite
.PHONY: demo test lint types bench asan

PYTHON ?= python3
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEV := .venv/.installed
DEMO := .venv-demo/.installed
PROMPT ?= Why is the sky blue?

demo: $(DEMO)
	.venv-demo/bin/build recipes/smollm2-135m.yaml
	.venv-demo/bin/plankiln run artifacts/smollm2-135m "$(PROMPT)" --chat --max-tokens 128

test: lint types
	.venv/bin/pytest -n 2

lint: $(DEV)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(DEV)
	.venv/bin/mypy

bench: $(DEV)
	@for script in $(wildcard bench/*.py); do .venv/bin/python $$script || exit 1; done

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
