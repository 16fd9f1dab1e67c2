# NexusKV: one command from a clean checkout to a demo, the tests or the benchmarks.
#
#   make demo [DEMO_S=30]   replay a request trace through a real daemon, every byte verified
#   make test               all tests but those that need a GPU, minutes, or an engine
#   make test-engines       the tests against real engines, each in its own environment
#   make soak               the tests that run for minutes: chaos, a hundred kills
#   make check              ruff, mypy, basedpyright, the layout and import rules
#   make bench              every benchmark beside its limit
#   make setup              only install: what each of the above does first
#   make clean              remove whatever these commands made
#
# Variables: PYTHON (>= 3.11; default python3), TORCH_INDEX (where pip finds torch's CPU builds).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
DEMO_S ?=
BENCH_TOPICS := shm control index start hitrate ssd restart
# Fewer engine tests than this is a failure: an engine that does not import must not pass by silence.
VLLM_TESTS_MIN := 86

# ---------------------------------------------------------------------------------------------
# An environment is left alone while its stamp carries the hash of what went into it. The project
# is installed in place, so only its metadata and its C sources count.
hash = $(shell cat $(sort $(1)) 2>/dev/null | sha256sum | cut -c1-16)
PROJECT_HASH := $(call hash,pyproject.toml setup.py $(wildcard dataplane/_*.c dataplane/_*.h))
VLLM_REQUIREMENTS := tests/engines/vllm.txt

PROJECT_STAMP := .venv/stamp-project-$(PROJECT_HASH)
VLLM_STAMP := .venv-vllm/stamp-requirements-$(call hash,$(VLLM_REQUIREMENTS))
VLLM_PROJECT_STAMP := .venv-vllm/stamp-project-$(PROJECT_HASH)

# Downloads fail now and then: three tries, then the error stands.
define TRY
say() { echo "make: $$*" >&2; }; \
try() { local n; for n in 1 2 3; do "$$@" && return 0; say "try $$n of 3 failed: $$*"; \
  [ $$n = 3 ] || sleep $$((5 * n)); done; return 1; }
endef

# What has to be on the machine, each by the Debian package that brings it: `need PACKAGE CHECK…`
# notes the package when its check fails, `install_missing` brings those and nothing else.
define PACKAGES
missing=(); \
need() { local package=$$1; shift; "$$@" >/dev/null 2>&1 || missing+=("$$package"); }; \
header() { local folder; for folder in /usr/include /usr/local/include /usr/include/*-linux-gnu; do \
  [ -e "$$folder/$$1" ] && return 0; done; return 1; }; \
python_header() { [ -e "$$($(PYTHON) -c \
  'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; }; \
library() { $(PYTHON) -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$$1"; }; \
install_missing() { \
  [ $${#missing[@]} -gt 0 ] || return 0; \
  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
    say "this machine lacks what these Debian packages bring; run:"; \
    say "  sudo apt-get install -y $${missing[*]}"; \
    return 1; \
  fi; \
  say "installing Debian packages: $${missing[*]}"; \
  export DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes; \
  try apt-get update -qq && \
  try apt-get install -y -qq --no-install-recommends "$${missing[@]}" >/dev/null; \
}
endef

.PHONY: help setup demo test soak test-engines test-vllm check bench clean \
  system-packages vllm-packages

help:
	@sed -n '3,12s/^# \{0,1\}//p' Makefile

setup: $(PROJECT_STAMP)

demo: setup
	@.venv/bin/nexuskv demo $(if $(DEMO_S),--seconds $(DEMO_S))

test: setup
	@echo "make: tests, without gpu, soak and engine" >&2
	@.venv/bin/pytest -m "not gpu and not soak and not engine"

soak: setup
	@echo "make: tests that run for minutes" >&2
	@.venv/bin/pytest -m soak -s

check: setup
	@echo "make: ruff" >&2
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@echo "make: mypy" >&2
	@.venv/bin/mypy
	@echo "make: basedpyright" >&2
	@.venv/bin/basedpyright
	@echo "make: layout and import rules" >&2
	@.venv/bin/pytest -q tests/test_layout.py tests/test_imports.py

bench: setup
	@for topic in $(BENCH_TOPICS); do \
	  echo "make: bench $$topic" >&2; .venv/bin/nexuskv bench $$topic; done

# One line an engine: its own environment, its own least number of tests.
test-engines: test-vllm

test-vllm: vllm-packages $(VLLM_PROJECT_STAMP)
	@echo "make: tests against the real vLLM" >&2
	@mkdir -p build && rm -f build/engine-vllm.xml
	@.venv-vllm/bin/pytest -m engine -W default tests/adapters --junitxml=build/engine-vllm.xml
	@$(PYTHON) tests/engines/enough.py build/engine-vllm.xml --least $(VLLM_TESTS_MIN)

# ---------------------------------------------------------------------------------------------
system-packages:
	@$(TRY); $(PACKAGES); \
	need python3-venv $(PYTHON) -c 'import ensurepip, venv'; \
	need python3-dev python_header; \
	need gcc command -v gcc; \
	need libc6-dev header stdio.h; \
	need libxxhash-dev header xxhash.h; \
	install_missing; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { say "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 …"; exit 1; }

vllm-packages: system-packages
	@$(TRY); $(PACKAGES); \
	need libnuma1 library libnuma.so.1; \
	install_missing

# A stale .so would be used silently, so it goes before the build and the stamp comes after it.
$(PROJECT_STAMP): | system-packages
	@$(TRY); say "installing NexusKV into .venv"; \
	.venv/bin/python -m pip --version >/dev/null 2>&1 || { rm -rf .venv; $(PYTHON) -m venv .venv; }; \
	rm -f .venv/stamp-project-* dataplane/_native*.so; \
	export NEXUSKV_NATIVE=require; \
	try .venv/bin/pip install -qq -e '.[test,lint]'; \
	touch $@

# The list is complete, so nothing is resolved: that keeps out the GPU and media packages vLLM
# names but does not need here. If pip as configured cannot find torch's CPU build, the second
# try looks at TORCH_INDEX too.
$(VLLM_STAMP): | setup
	@$(TRY); say "installing vLLM into .venv-vllm: minutes, and gigabytes"; \
	rm -rf .venv-vllm; $(PYTHON) -m venv .venv-vllm; \
	install=(.venv-vllm/bin/pip install -qq --no-deps -r $(VLLM_REQUIREMENTS)); \
	"$${install[@]}" || { \
	  say "pip's own indexes were not enough, adding $(TORCH_INDEX)"; \
	  try "$${install[@]}" --extra-index-url $(TORCH_INDEX); }; \
	touch $@

$(VLLM_PROJECT_STAMP): $(VLLM_STAMP) | setup
	@$(TRY); say "installing NexusKV into .venv-vllm"; \
	rm -f .venv-vllm/stamp-project-*; \
	export NEXUSKV_NATIVE=require; \
	try .venv-vllm/bin/pip install -qq --no-deps -e .; \
	touch $@

# A native module that was deleted is built again, whatever the stamp says.
ifeq ($(wildcard dataplane/_native*.so),)
.PHONY: $(PROJECT_STAMP)
endif

clean:
	@echo "make: removing environments, build products and caches" >&2
	@rm -rf .venv .venv-* build dist *.egg-info .coverage .hypothesis \
	  .mypy_cache .pytest_cache .ruff_cache dataplane/_native*.so
	@find nexuskv index dataplane tiers adapters tools tests -name __pycache__ -prune \
	  -exec rm -rf {} +
