# make generate   set up this machine and run the main job (no GPU, no key)
# make test       set up and run the fast tests
# make lint       ruff and the type checker
# make proof      the long proofs; their results are committed and go stale with what they covered
PYTHON ?= python3
VENV   ?= .venv
FAMILY ?= attn_res
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.kernelmill-installed
PACKAGES := agents kernels specs verify
TYPES  := build/types/kernelmill

.PHONY: install generate test lint format proof clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"kernelmill needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

generate: install
	$(BIN)/kernelmill generate $(FAMILY)

test: install lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

# The type checker cannot see setuptools' package-dir mapping; it reads the same folders through links that give them
# their import names.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p $(TYPES)
	@for p in $(PACKAGES); do ln -sfn ../../../$$p $(TYPES)/$$p; done
	MYPYPATH=build/types $(BIN)/mypy $(foreach p,$(PACKAGES),-p kernelmill.$(p))

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proof: install
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
