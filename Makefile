# make run    measure everything in CONFIG on this machine's GPUs, through Slurm, or on the CPU, and show what came out
# make test   linters, types and every test that this machine can run
#
# Both make .venv from requirements.lock at the first call and when it changes. make run CONFIG=... SITE=... for other experiments and
# places; RESULTS=... for another folder than results/<name in the configuration>. Without a GPU,
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes the first call fetch less.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help run test kernels container lint gpu-test site test-packages clean

CONFIG ?= config/smoke.yaml
SITE ?= build/site.yaml
RESULTS ?=
TESTS ?= tests
IMAGE ?= containers/image.yaml
PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/installed
INTERPRETERS := $(if $(PYTHON),$(PYTHON),python3 python3.12 python3.11 python3.13 python3.14)

help:
	@sed -n '/^# make/,/^$$/p; /^SHELL/q' Makefile | sed '/^SHELL/d; s/^# \{0,1\}//'

$(BIN)/python:
	@for python in $(INTERPRETERS); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	    echo "Python 3.11 or newer is needed; tried: $(INTERPRETERS). Install one, or name it: make run PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$found has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi; \
	echo "environment: $(VENV), from $$("$$found" --version) ($$found)"; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

LOCKS := requirements.lock requirements-openfold3.lock

$(READY): $(LOCKS) requirements-cuda.lock | $(BIN)/python
	@echo "installing $(LOCKS) (minutes at the first time)"
	@$(BIN)/python containers/locked.py $(LOCKS)
	@# the checkout's own package, without a build: import turbopair works in this environment
	@echo '$(CURDIR)/kernels' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/turbopair.pth"
	@touch $@

# Without nvcc CMake says so and builds nothing: CPU tensors need no kernels.
kernels: $(READY)
	@$(BIN)/cmake -S kernels -B build/kernels -G Ninja -DCMAKE_MAKE_PROGRAM='$(CURDIR)/$(BIN)/ninja' \
	    -DPython3_EXECUTABLE='$(CURDIR)/$(BIN)/python' > build/kernels.log 2>&1 || { cat build/kernels.log; exit 1; }
	@grep -h -A2 'turbopair: ' build/kernels.log | grep -v '^-- [CG]' || true
	@$(BIN)/cmake --build build/kernels
kernels: | build
build:
	@mkdir -p build

# Where to run, found out anew each time; the file is only touched when the answer changed.
site: $(READY) | build
	@$(BIN)/python -m pipeline site --write build/site.yaml

# A shell word, whatever is in the text.
quoted = '$(subst ','\'',$(1))'

# As a shell word: without RESULTS the folder is that of `pipeline run`, by the name that is in the configuration, not by that of the file.
NAME := import sys; from pathlib import Path; from pipeline.config import read; print(read(Path(sys.argv[1])).name)
FOLDER = $(if $(RESULTS),$(call quoted,$(RESULTS)),results/"$$($(BIN)/python -c '$(NAME)' $(call quoted,$(CONFIG)))")

run: $(READY) kernels $(if $(filter build/site.yaml,$(SITE)),site)
	@$(foreach name,CONFIG SITE,$(if $($(name)),,$(error $(name) is empty: name a file, or leave it out)))
	@profile=local; if grep -qs '^executor: slurm' $(call quoted,$(SITE)); then profile=slurm; fi; \
	$(BIN)/python -m pipeline workflow --profile config/profiles/$$profile \
	    --config config=$(call quoted,$(CONFIG)) site=$(call quoted,$(SITE)) $(if $(RESULTS),results=$(call quoted,$(RESULTS))) || { status=$$?; \
	    if [ $$status = 1 ]; then \
	        folder=$(FOLDER); state=; \
	        if [ -e "$$folder/config.yaml" ]; then state=", its state: $(BIN)/python -m pipeline status $$(printf %q "$$folder")"; fi; \
	        echo "the workflow failed; its logs are in $$folder/jobs/logs$$state" >&2; \
	    fi; exit $$status; }  # 2: nothing began, 128 and more: stopped; both were said
	@folder=$(FOLDER); \
	$(BIN)/python -m pipeline show claims "$$folder"; \
	printf '%s\n' '' "tables:  $$folder/tables (Markdown, LaTeX, CSV)" "figures: $$folder/figures" "claims:  $$folder/claims.md" \
	    "report:  $$folder/report.html (open it in a browser)" \
	    "here:    $(BIN)/python -m pipeline show accuracy $$(printf %q "$$folder")"

# The image: SIF file or OCI archive in build/container, see containers/README.md. Nothing is built when nothing changed.
container: $(READY)
	@$(BIN)/python -m pipeline container build --config $(call quoted,$(IMAGE))

lint: $(READY)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . ; exit 1; }
	@$(BIN)/mypy

# One file of tests stays in one process: the Slurm tests share a cluster.
test: $(READY) test-packages lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

# The tests against a real Slurm start one of their own, those of the container build an image of their own; without their packages, or
# without root, they are skipped and say so. Debian 12 has no apptainer: a script makes a package of it from Debian's unstable suite.
TEST_PACKAGES = $(sort $(shell cat tests/workflow/slurm/apt.txt tests/workflow/container/apt.txt))

test-packages:
	@if [ "$$(dpkg-query -W -f '$${db:Status-Status}\n' $(TEST_PACKAGES) 2>/dev/null | grep -c '^installed$$')" = "$(words $(TEST_PACKAGES))" ] && \
	    command -v apptainer > /dev/null; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then \
	    echo "the tests of Slurm and of the container need root and the Debian packages $(TEST_PACKAGES) - where programs are missing they are skipped"; \
	    exit 0; \
	fi; \
	echo "installing for the tests of Slurm and of the container: $(TEST_PACKAGES)"; \
	apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(TEST_PACKAGES) > /dev/null; \
	bash tests/workflow/container/apptainer.sh || echo "apptainer could not be had; the tests that need it are skipped"

# On a Hopper GPU: every numerical test of the kernels; a whole passing run writes results/validation/<gpu>.json.
gpu-test: $(READY) kernels
	@$(BIN)/python -m pytest tests/gpu -m gpu

clean:
	rm -rf $(VENV) build .snakemake
