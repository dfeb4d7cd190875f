# Needs Python >= 3.11, pip and make; everything else is installed into .venv from hashed locks.
# Without make: python3 -m venv .venv, pip install --require-hashes -r requirements.lock, then the
# commands below as they stand.

PYTHON ?= python3
PYTHON311 ?= python3.11
PYTHON312 ?= python3.12
WORKERS ?= 2
PART ?= 0
MODEL ?= smollm2-135m
# The one preset whose weights bring a chat template; any other model continues the prompt.
CHAT ?= $(if $(filter smollm2-135m,$(MODEL)),--chat)
PROMPT ?= What is the capital of France?
# More arguments for the golden environment's pip, such as an index of CPU-only torch wheels.
GOLDEN_PIP_ARGS ?=
# `make device RESULTS=folder`: where its page goes. PYTHON=... is then used as it is: an image that
# brings JAX for its accelerator needs no environment of ours.
RESULTS ?= docs/results
# RESUME=1: only what is not done on this kind of device, on any later day.
RESUME ?=
# Steps' HLO, XLA's choices and tuning.json.
ARTIFACTS ?= build/device
DEVICE ?= auto
# `make mutants MUTANTS_ARGS="--sample=10 --groups=kv_pages"`.
MUTANTS_ARGS ?=
# `make drills SUITE=1 RAY=1`: the suite without asserts and without root, too, and two replicas by Ray
# (0.5 GB); DRILLS_ARGS="--only=bits --quick".
SUITE ?=
RAY ?=
DRILLS_ARGS ?=
# `make lock LOCK_ARGS=--upgrade` moves every pin; without it existing pins stay where they can.
LOCK_ARGS ?=
UV_VERSION := 0.13.8

# Environments of the compile gates: a jax of the lock, and a compiler for chips that are not there.
AOT := cuda-py312 cuda-py311 tpu-py311

# Processors that `make wheel` compiles the CPU kernels for.
WHEELS ?= x86_64 aarch64
ZIG := .venv-zig/bin/python -m ziglang

# Without -O1 one file takes minutes, and ten of them beside other work.
SANITIZERS := -g -O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=undefined,float-cast-overflow

INSTALL := -m pip --disable-pip-version-check install -qq
LOCKED := $(INSTALL) --require-hashes
UNIVERSAL = .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url \
	--no-emit-find-links --custom-compile-command "make lock" $(LOCK_ARGS)
COMPILE = $(UNIVERSAL) --python-version 3.11 pyproject.toml
IS_NEW_ENOUGH = -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ridgeline needs \
	Python >= 3.11, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'

export PROMPT

.DEFAULT_GOAL := help
.PHONY: help run serve small-model test test-long test-sanitized test-cloud test-flax check test-py312 mutants drills test-aot test-manifests test-aarch64 device pages golden wheel lock clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

run: .venv/.core  ## install, fetch the default model, answer a prompt (MODEL=..., PROMPT=...)
	@.venv/bin/python -m scripts.generate --model=$(MODEL) $(CHAT) --prompt="$$PROMPT"

serve: .venv/.serve  ## serve the default model to OpenAI's clients at http://127.0.0.1:8000/v1 (MODEL=...)
	@.venv/bin/python -m scripts.serve --model=$(MODEL) --nowarm_up

small-model: .venv/.core  ## train the small model and its draft, for half an hour; what is there is kept
	.venv/bin/python -m scripts.train --task=lm
	.venv/bin/python -m scripts.train --task=draft

test: .venv/.test  ## the suite, on WORKERS=2 processes; of costly tests one part of six (PART=0)
	.venv/bin/python -m pytest -n $(WORKERS) --dist=loadfile --part=$(PART)

test-long: .venv/.test  ## only the tests that `make test` leaves out; on AArch64's instruction sets where qemu-user is installed
	@if command -v qemu-aarch64 >/dev/null || command -v qemu-aarch64-static >/dev/null; then \
		$(MAKE) .venv-zig/.ready || echo "test-long: ziglang cannot be installed, AArch64 is skipped"; \
	fi
	.venv/bin/python -m pytest -n $(WORKERS) --dist=loadfile --part=$(PART) \
		--timeout=1800 -m "long or timing"
	@$(MAKE) test-cloud

check: .venv/.test  ## format, lint, types, architecture, marks of stale figures
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -q tests/test_architecture.py tests/test_words.py
	.venv/bin/python -m scripts.reports.figures --check

test-py312:  ## the suite on Python 3.12 and its newer jax; skipped where there is no python3.12
	@PYENV_VERSION=3.12.1; export PYENV_VERSION; \
	$(PYTHON312) -c 'import ensurepip, venv' 2>/dev/null || unset PYENV_VERSION; \
	if $(PYTHON312) -c 'import ensurepip, venv' 2>/dev/null; then \
		$(MAKE) .venv312/.test && echo ".venv312/bin/python -m pytest -n $(WORKERS) --dist=loadfile --part=$(PART)" && \
		.venv312/bin/python -m pytest -n $(WORKERS) --dist=loadfile --part=$(PART); \
	else \
		echo "test-py312: SKIPPED, there is no $(PYTHON312) with venv on this machine"; \
	fi

mutants: .venv/.test .venv-mutants/.ready  ## which changes of the code the tests do not find; hours (MUTANTS_ARGS=...)
	.venv-mutants/bin/python tests/mutants.py $(MUTANTS_ARGS)

drills: .venv/.test $(if $(RAY),.venv-ray/.ready)  ## faults brought about at real processes, in 30 minutes, into docs/results/drills.md (SUITE=1, RAY=1, DRILLS_ARGS=...)
	@$(MAKE) .venv-drills/.ready || echo "drills: schemathesis cannot be installed here, its drill is skipped"
	$(if $(RAY),RAY_PYTHON=.venv-ray/bin/python) .venv/bin/python -m tests.drills --page=docs/results/drills.md $(if $(SUITE),--suite) $(DRILLS_ARGS)

test-sanitized: .venv/.test  ## the CPU kernels under AddressSanitizer and UBSan; skipped without g++
	@if command -v g++ >/dev/null; then \
		export LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
			ASAN_OPTIONS=detect_leaks=0 RIDGELINE_KERNELS=$(CURDIR)/build/sanitized \
			CXX="g++ $(SANITIZERS)"; \
		.venv/bin/python -c 'import sys; from inference.runtime import cpu_kernels as k; k.load(); \
			sys.exit(not k.library.is_loaded())' && \
		.venv/bin/python -m pytest -q -p no:cacheprovider tests/layers/kernels \
			-k "test_bounds or test_scores or test_parallel or test_packed or test_adapted or test_pairs or test_dispatch or test_blocks or test_rows or instruction_set or any_rectangle or any_company or test_a_cpus or ffi_cpu"; \
	else \
		echo "test-sanitized: SKIPPED, there is no g++"; \
	fi

test-aarch64: .venv/.test  ## compile the CPU kernels for AArch64; skipped where Zig's compiler cannot be installed
	@if $(MAKE) .venv-zig/.ready; then \
		.venv/bin/python -m scripts.wheel --machine=aarch64 --zig="$(ZIG)"; \
	else \
		echo "test-aarch64: SKIPPED, ziglang cannot be installed here"; \
	fi

test-cloud:  ## models at s3:// and gs://, against emulators; a part of test-long, skipped where they cannot be installed
	@if $(MAKE) .venv-cloud/.ready; then \
		.venv-cloud/bin/python -m pytest -n $(WORKERS) --dist=loadfile tests/cloud; \
	else \
		echo "test-cloud: SKIPPED, its environment cannot be installed here"; \
	fi

test-flax:  ## trees of Tunix, gemma and MaxText, and Tunix's GRPO on an engine; skipped where they cannot be installed
	@if $(MAKE) .venv-flax/.ready; then \
		.venv-flax/bin/python -m pytest --disable-warnings tests/flax; \
	else \
		echo "test-flax: SKIPPED, its environment cannot be installed here"; \
	fi

# With a part of the tests named, each environment runs another one of the six.
test-aot:  ## compile for H200 and TPUs without a device; skipped by name where that cannot be installed (PART=...)
	@part=$(if $(filter command environment,$(origin PART)),$(PART)); for name in $(AOT); do \
		if ! $(MAKE) .venv-aot-$$name/.ready; then \
			echo "test-aot: SKIPPED $$name, its environment cannot be installed here"; continue; \
		fi; \
		echo "test-aot: $$name"; \
		.venv-aot-$$name/bin/python -m pytest -n $(WORKERS) -rP -m "aot and not long" \
			$${part:+--part=$$part} tests/aot/test_$${name%-*}*.py || exit 1; \
		part=$${part:+$$(((part + 1) % 6))}; \
	done

test-manifests: .venv/.test  ## what scripts.launch renders, by the validators of Kubernetes, SkyPilot, xpk and ShellCheck; skipped where these cannot be installed
	@if $(MAKE) .venv-manifests/.ready .venv-xpk/.ready; then \
		.venv/bin/python -m tests.deploy.published --xpk=.venv-xpk/bin/python \
			$(foreach name,kubernetes skypilot shell,--$(name)=.venv-manifests/bin/python); \
	else \
		echo "test-manifests: SKIPPED, the validators cannot be installed here"; \
	fi

device: $(if $(filter file,$(origin PYTHON)),.venv/.test)  ## what the accelerator at hand does, 9 minutes a command (RESUME=1, PYTHON=..., RESULTS=..., ARTIFACTS=...)
	@$(if $(filter file,$(origin PYTHON)),.venv/bin/python,$(PYTHON)) -m scripts.device --device=$(DEVICE) --results=$(RESULTS) --artifacts=$(ARTIFACTS) $(if $(RESUME),--resume)

pages: .venv/.test  ## measure stale pages again that take less than 10 minutes
	.venv/bin/python -m scripts.reports.figures --regenerate

golden: .venv-golden/.golden  ## recompute the goldens with transformers and compare
	.venv-golden/bin/python tests/golden/make_golden.py --compare

wheel: .venv/.core .venv-zig/.ready  ## wheels with the CPU kernels inside, into dist (WHEELS=x86_64 aarch64)
	@rm -rf build/lib build/wheel
	@.venv/bin/python -m pip --disable-pip-version-check wheel -q --no-deps --wheel-dir=build/wheel .
	@for machine in $(WHEELS); do \
		.venv/bin/python -m scripts.wheel build/wheel/*.whl --machine=$$machine \
			--zig="$(ZIG)" || exit 1; \
	done

lock: .venv-lock/.uv  ## rewrite the hashed locks from pyproject.toml
	$(COMPILE) -o requirements.lock
	$(COMPILE) --extra serve -c requirements.lock -o requirements-serve.lock
	$(COMPILE) --extra serve --extra ray -c requirements-serve.lock -o requirements-ray.lock
	$(COMPILE) --extra serve --extra gpu -c requirements-serve.lock -o requirements-gpu.lock
	$(COMPILE) --extra serve --extra tpu -c requirements-serve.lock -o requirements-tpu.lock
	$(COMPILE) --extra serve --extra test -c requirements-serve.lock -o requirements-test.lock
	$(COMPILE) --extra serve --extra test --extra cloud --extra cloud-test -c requirements-test.lock -o requirements-cloud.lock
	$(UNIVERSAL) --python-version 3.12 tests/flax/requirements.in -o requirements-flax.lock

clean:  ## remove everything that make created
	rm -rf .venv .venv312 .venv-aot-* .venv-cloud .venv-drills .venv-flax .venv-golden .venv-lock .venv-manifests .venv-mutants .venv-ray .venv-xpk .venv-zig .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf build dist ridgeline.egg-info
	find configs sharding layers inference scripts tests -name __pycache__ -prune -exec rm -rf {} +

.venv/.python:
	@$(PYTHON) $(IS_NEW_ENOUGH)
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.core: requirements.lock .venv/.python
	@echo "installing the locked dependencies into .venv (once, a minute or two)"
	.venv/bin/python $(LOCKED) -r requirements.lock
	@touch $@

.venv/.serve: requirements-serve.lock .venv/.python
	@echo "installing the locked dependencies of the server into .venv (once, a minute or two)"
	.venv/bin/python $(LOCKED) -r requirements-serve.lock
	@touch $@

.venv/.test: requirements-test.lock .venv/.python
	@echo "installing the locked dependencies and test tools into .venv (once, a minute or two)"
	.venv/bin/python $(LOCKED) -r requirements-test.lock
	@touch $@

.venv312/.test: requirements-test.lock
	$(PYTHON312) -m venv .venv312
	.venv312/bin/python $(LOCKED) -r requirements-test.lock
	@touch $@

.venv-aot-%/.ready: requirements-test.lock tests/aot/%.txt
	@PYENV_VERSION=3.12.1 $(PYTHON3$(lastword $(subst -py3, ,$*))) -m venv $(@D) 2>/dev/null || $(PYTHON3$(lastword $(subst -py3, ,$*))) -m venv $(@D)
	.venv-aot-$*/bin/python $(LOCKED) -r requirements-test.lock
	.venv-aot-$*/bin/python $(INSTALL) --no-deps -r tests/aot/$*.txt
	@touch $@

.venv-golden/.golden: pyproject.toml
	@$(PYTHON) $(IS_NEW_ENOUGH)
	$(PYTHON) -m venv .venv-golden
	.venv-golden/bin/python $(INSTALL) $(GOLDEN_PIP_ARGS) $$(.venv-golden/bin/python -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['golden'])")
	@touch $@

# Of the extra of the same name.
.venv-mutants/.ready .venv-drills/.ready .venv-manifests/.ready .venv-xpk/.ready: .venv-%/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) $$($(PYTHON) -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$*'])")
	@touch $@

.venv-ray/.ready .venv-cloud/.ready: .venv-%/.ready: requirements-%.lock
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(LOCKED) -r requirements-$*.lock
	@touch $@

.venv-flax/.ready: requirements-flax.lock
	@PYENV_VERSION=3.12.1 $(PYTHON312) -m venv $(@D) 2>/dev/null || $(PYTHON312) -m venv $(@D)
	$(@D)/bin/python $(LOCKED) -r requirements-flax.lock
	@touch $@

.venv-zig/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-zig
	.venv-zig/bin/python $(INSTALL) $$($(PYTHON) -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['cpu'])")
	@touch $@

.venv-lock/.uv: Makefile
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python $(INSTALL) uv==$(UV_VERSION)
	@touch $@
