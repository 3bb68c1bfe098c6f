# make run | make sft | make up | make down | make doctor | make test | make chaos | make check | make docs | make gpu-check | make setup | make wheel | make lock | make clean
# Everything lives in .venv; a second `make` installs nothing.
PY := .venv/bin/python
REQUIREMENTS := requirements/cpu.txt
INSTALLED = .venv/.installed-$(basename $(notdir $(REQUIREMENTS)))
ARGS ?=

.PHONY: run sft up down doctor test chaos check docs setup wheel lock clean gpu-check
.DEFAULT_GOAL := run

run: RECIPE ?= arithmetic-cpu
run: setup  ## the main job: GRPO on this machine's CPU (RECIPE=name, ARGS="steps=20 ...")
	@$(PY) -m flows.console run --recipe $(RECIPE) $(ARGS)

sft: RECIPE ?= sft-cpu
sft: setup  ## supervised fine-tuning on this machine's CPU (RECIPE=name, ARGS="steps=20 ...")
	@$(PY) -m flows.console sft --recipe $(RECIPE) $(ARGS)

up: setup  ## Prefect server, Ray, work pool, worker and all deployments on this machine (ARGS="--host ADDRESS")
	@$(PY) -m flows.service.up $(ARGS)

down:  ## stop what `make up` started, and nothing else
	@$(PY) -m flows.service.up --down

doctor: setup  ## what is found, what is missing, and the command that fixes it
	@$(PY) -m flows.service.doctor $(ARGS)

test: setup  ## the whole suite, in two processes (tests/conftest.py says what stays together)
	@$(PY) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

chaos: setup  ## kill parts of running runs at random: nothing may be lost (at most 45 minutes; ARGS="--kills 10 --mode sync")
	@$(PY) -m tests.chaos $(ARGS)

gpu-check:  ## tests and benchmarks on a machine with GPUs and the `gpu` extra (PY=python3 when it is installed elsewhere, ARGS="JOB ...")
	@$(PY) -m benchmarks.gpu_check $(ARGS)

check: setup  ## format, lint, types, import contracts
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache

docs: setup  ## the documentation as a site in build/docs; a warning is an error
	@$(PY) -m sphinx -q -W -E -c docs/site docs build/docs && echo "build/docs/index.html"

# Bytecode at once: a run's ten processes import torch, vLLM or Megatron together, and where PYTHONDONTWRITEBYTECODE is set
# (as in many images) every process of every run would compile them anew, which takes longer than the imports themselves.
setup: $(INSTALLED)  ## .venv (with GPUs: REQUIREMENTS=requirements/gpu.txt)

$(INSTALLED): $(REQUIREMENTS) pyproject.toml
	@set -- $(filter-out $(INSTALLED),$(wildcard .venv/.installed-*)); test -z "$$1" || \
		{ echo "error: .venv was made for $${1#.venv/.installed-}: remove it first (rm -rf .venv)"; exit 1; }
	@test -x $(PY) || python3.12 -m venv .venv || { echo "error: Python 3.12 with venv is needed (python3.12 was not found or has no venv)"; exit 1; }
	@test -x .venv/bin/uv || $(PY) -m pip install --quiet uv==0.13.8
	@echo "installing $(REQUIREMENTS) into .venv (about 7 GB unpacked; once)"
	@.venv/bin/uv pip install --quiet --python $(PY) --require-hashes --compile-bytecode -r $(REQUIREMENTS)
	@.venv/bin/uv pip install --quiet --python $(PY) --no-deps --editable .
	@touch $@

wheel: setup  ## dist/grpo_flows-*.whl: installs beside the pins of requirements/ (docs/command.md)
	@rm -rf build
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build

lock:  ## resolve the pins anew (names, versions, hashes; no index or file address)
	@.venv/bin/uv pip compile pyproject.toml --extra cpu --group dev --generate-hashes --python-version 3.12 --no-header --quiet -o requirements/cpu.txt
	@.venv/bin/uv pip compile pyproject.toml --extra gpu --group dev --generate-hashes --python-version 3.12 --no-header --quiet -o requirements/gpu.txt

clean:  ## remove caches; keeps .venv and runs/
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
