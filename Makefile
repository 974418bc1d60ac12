# ronde's one door: people and CI call the same recipes. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Builds and the Python environment lie outside of the checkout, so that a fresh clone starts where the last one ended.
export RONDE_CACHE ?= $(HOME)/.cache/ronde
export CARGO_TARGET_DIR ?= $(RONDE_CACHE)/target
# What Rust tests use to find the binary and a Python with the SDK.
export RONDE_BIN = $(CARGO_TARGET_DIR)/debug/ronde
export RONDE_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path)
export PYTHONPATH = $(CURDIR)/sdk-python/python:$(CURDIR)/sdk-python/horovod-compat/src
export PYTHONDONTWRITEBYTECODE = 1
# The extension is built for the stable ABI and asks no interpreter, so that another one on PATH rebuilds nothing.
export PYO3_NO_PYTHON = 1
# Recipes build everything once; what would make the next build of a change quicker takes time and gigabytes.
export CARGO_INCREMENTAL ?= 0

# Many tests wait for processes and clocks rather than compute.
export RUST_TEST_THREADS ?= 4
PYTEST_WORKERS ?= 3
# Properties are tested with the same values in each run, so that a run fails for its change. `make properties` draws others.
export PROPTEST_RNG_SEED ?= 1

PYTHON ?= python3
CARGO ?= cargo
FRAMEWORK_TESTS := $(addprefix tests/frameworks/test_,tensorflow.py tensorflow_units.py tensorflow_seeds.py horovod_signatures.py)
TENSORFLOW_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path tensorflow)
FRONTENDS_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path frontends)
MXNET_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path mxnet)
JAX_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path jax)
MONITOR_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path monitor)
PAGE_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path page)
RAY_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path ray)
PETASTORM_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path petastorm)
SPARK_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path spark)
TORCHFT_PYTHONS = $(foreach kind,torchft torchft-nightly,$(shell $(PYTHON) tests/setup/environment.py path $(kind)))
GPU_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path gpu)
PACKING_PYTHON = $(shell $(PYTHON) tests/setup/environment.py path packaging)
WHEEL_TARGET ?= $(shell uname -m)-unknown-linux-gnu
FIRST ?= 0
SEEDS ?= 10000
FUZZ_SECONDS := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),60)
TARGET ?=
OPTIONS ?=
BENCH := $(CARGO_TARGET_DIR)/bench
PURE_CRATES := ronde-plugin-abi ronde-wire ronde-collectives ronde-engine
PYTHON_FOLDERS := tests/setup tests/product tests/containers tests/deploy tests/frameworks tests/frontends tests/gpu tests/monitor tests/page tests/ray tests/spark \
    tests/torchft tests/soak tests/kills tests/tuning compose docs/site
PLUGINS := adasum bf16 clipped-mean fp16 int8 median onebit randomk topk trimmed-mean
# Vectors, and a stack that leaves memory to the buffers: what `ronde plugin build` asks for, too.
PLUGIN_FLAGS := -Ctarget-feature=+simd128 -Clink-arg=-zstack-size=65536
EXTENSION := sdk-python/python/ronde/_ronde.abi3.so

.PHONY: help
help: ## List the recipes
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 23

# The demos have a build of their own, unless that of the tests is there: whoever tries them waits for it. It takes less than
# half of the time, as it optimizes next to nothing, and lacks the compiler for plugins, test programs and the library for NCCL.
DEMO_BUILD := $(if $(wildcard $(CARGO_TARGET_DIR)/debug/ronde),debug,demo)
demo demo-elastic: export RONDE_BIN = $(CARGO_TARGET_DIR)/$(DEMO_BUILD)/ronde
build-demo: DEMO_OPTIONS = $(if $(filter demo,$(DEMO_BUILD)),--profile demo --no-default-features)

.PHONY: demo
demo: ## Train on handwritten digits: 4 workers, 2 sidecars, every byte between them sealed
	@$(PYTHON) sdk-python/examples/demo.py

.PHONY: demo-elastic
demo-elastic: ## Train on handwritten digits while workers and a sidecar are killed and a host is added
	@$(PYTHON) sdk-python/examples/demo_elastic.py

.PHONY: test
test: setup lint build-tests test-rust test-python ## Do what every change must pass: set-up, lints, the tests of Rust and Python
	@echo "make test: all passed"

.PHONY: setup
setup: ## Install what the tests need: packages of the distribution, a Python environment
	@tests/setup/debian.sh
	@$(PYTHON) tests/setup/environment.py tools training bench torch-suite notebook packaging mpich deploy helm jax monitor sbom

.PHONY: build
build: plugins ## Build the binary ronde, the crates, the plugins and the Python extension
	$(CARGO) build --workspace
	@install -D $(CARGO_TARGET_DIR)/debug/lib_ronde.so $(EXTENSION).new && mv $(EXTENSION).new $(EXTENSION)
	@install -D -C $(CARGO_TARGET_DIR)/debug/libnccl_net_ronde.so $(CARGO_TARGET_DIR)/nccl/libnccl-net-ronde.so

.PHONY: build-demo
build-demo:
	$(CARGO) build --package ronde-sidecar --package ronde-python $(DEMO_OPTIONS)
	@install -D $(CARGO_TARGET_DIR)/$(DEMO_BUILD)/lib_ronde.so $(EXTENSION).new && mv $(EXTENSION).new $(EXTENSION)

# With the tests, so that dependencies are built once: those of tests ask for more features of some, and `cargo build` for the
# program alone would make another build of these and all that use them.
.PHONY: build-tests
build-tests: plugins web-worker
	$(CARGO) build --workspace --all-targets
	@install -D $(CARGO_TARGET_DIR)/debug/lib_ronde.so $(EXTENSION).new && mv $(EXTENSION).new $(EXTENSION)
	@install -D -C $(CARGO_TARGET_DIR)/debug/libnccl_net_ronde.so $(CARGO_TARGET_DIR)/nccl/libnccl-net-ronde.so

.PHONY: plugins
plugins: export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS = $(PLUGIN_FLAGS)
# Flags for other targets would take the place of those for this one.
# Compiled incrementally, they need more stack than they have.
plugins: PLUGIN_CARGO = env -u RUSTFLAGS -u CARGO_ENCODED_RUSTFLAGS -u CARGO_INCREMENTAL $(CARGO)
plugins: ## Build the shipped plugins, as WebAssembly modules beside the binary's folder
	@targets=$$(rustup target list --installed 2>/dev/null || true); \
	if grep -qx wasm32-unknown-unknown <<<"$$targets" || rustup target add wasm32-unknown-unknown; then \
	    $(PLUGIN_CARGO) build $(PLUGINS:%=--package ronde-plugin-%) --target wasm32-unknown-unknown --profile plugin; \
	    mkdir -p $(CARGO_TARGET_DIR)/plugins; \
	    for plugin in $(PLUGINS); do \
	        install -C -m 644 $(CARGO_TARGET_DIR)/wasm32-unknown-unknown/plugin/$${plugin//-/_}.wasm $(CARGO_TARGET_DIR)/plugins/$$plugin.wasm; \
	    done; \
	else \
	    echo "NOT BUILT: plugins. The target wasm32-unknown-unknown is not installed and rustup cannot add it." >&2; \
	fi

.PHONY: web-worker
# Clippy has seen all but what is for WebAssembly alone.
web-worker: export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS = -Dwarnings
web-worker: WEB_CARGO = env -u RUSTFLAGS -u CARGO_ENCODED_RUSTFLAGS $(CARGO)
web-worker: ## Build the worker in WebAssembly that tests run in Node
	@targets=$$(rustup target list --installed 2>/dev/null || true); \
	if grep -qx wasm32-unknown-unknown <<<"$$targets" || rustup target add wasm32-unknown-unknown; then \
	    $(WEB_CARGO) build --package ronde-tests-web --target wasm32-unknown-unknown; \
	    install -D -C -m 644 $(CARGO_TARGET_DIR)/wasm32-unknown-unknown/debug/ronde_tests_web.wasm $(CARGO_TARGET_DIR)/web-worker/worker.wasm; \
	else \
	    echo "NOT BUILT: the worker in WebAssembly. The target wasm32-unknown-unknown is not installed and rustup cannot add it." >&2; \
	fi

.PHONY: wheel
wheel: ## Make the wheels for PyPI in dist/, that of horovod-compat too (WHEEL_TARGET=aarch64-unknown-linux-gnu for another machine)
	@$(PYTHON) tests/setup/environment.py packaging cross
	$(PACKING_PYTHON) sdk-python/packing/wheel.py --target $(WHEEL_TARGET)

.PHONY: wheel-test
wheel-test: ## Make wheels for x86-64 and aarch64, try them on every Python here, and compile that for x86-64 twice more to compare (10 minutes and two release builds)
	@tests/setup/debian.sh cross
	@$(PYTHON) tests/setup/environment.py tools packaging cross
	$(PACKING_PYTHON) sdk-python/packing/wheel.py --target x86_64-unknown-linux-gnu
	$(PACKING_PYTHON) sdk-python/packing/wheel.py --target aarch64-unknown-linux-gnu
	for wheel in dist/ronde-*-manylinux_2_28_*.whl; do \
	    RONDE_WHEEL=$$wheel RONDE_ALL_PYTHONS=1 $(RONDE_PYTHON) -m pytest -q -c sdk-python/pyproject.toml tests/product/test_wheel.py; \
	done
	$(PACKING_PYTHON) sdk-python/packing/reproduce.py --target x86_64-unknown-linux-gnu

.PHONY: newcomer-test
newcomer-test: ## Clone, build, install and use two hosts as README and QUICKSTART say, in fresh systems of Debian or Ubuntu (needs root)
	@tests/setup/debian.sh newcomer
	$(PYTHON) tests/product/newcomer.py

.PHONY: compose-test
compose-test: build-tests ## Train in containers and break them: needs a container engine, or root on Debian to start one (minutes)
	@tests/setup/debian.sh compose
	@$(PYTHON) tests/setup/environment.py tools packaging
	$(RONDE_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml tests/containers

.PHONY: deploy-test
deploy-test: build-tests ## Train as with Slurm and Kubernetes, on network namespaces, and check scripts, manifests and the chart (needs root)
	@tests/setup/debian.sh slurm
	@$(PYTHON) tests/setup/environment.py tools training deploy helm
	$(RONDE_PYTHON) -m pytest -q -rs -n $(PYTEST_WORKERS) -c sdk-python/pyproject.toml tests/deploy
	RONDE_TEST_SLURM=1 $(RONDE_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml sdk-python/tests/test_slurm.py

.PHONY: frontends-test
frontends-test: build-tests ## Train with Lightning, Accelerate, Transformers and DeepSpeed: installs 0.3 GB, takes 10 minutes
	@tests/setup/debian.sh
	@$(PYTHON) tests/setup/environment.py frontends
	$(FRONTENDS_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml tests/frontends

.PHONY: framework-test
framework-test: build-tests ## Train with TensorFlow, Keras and JAX, and data of tf.data's service: installs 2.5 GB, takes 30 minutes
	@$(PYTHON) tests/setup/environment.py tensorflow jax
	$(TENSORFLOW_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml $(FRAMEWORK_TESTS) tests/frameworks/test_tf_data_service.py $(OPTIONS)
	$(JAX_PYTHON) -m pytest -q -rs -n 2 -c sdk-python/pyproject.toml tests/frameworks/test_jax.py tests/frameworks/test_keras_jax.py $(OPTIONS)

# OPTIONS="-k example" runs one test.
.PHONY: page-test
page-test: build-tests ## Look at the page of a sidecar with Chromium, which it installs: 1 minute (RONDE_SCREENSHOTS=FOLDER keeps pictures)
	@tests/setup/debian.sh page
	@$(PYTHON) tests/setup/environment.py tools page
	$(PAGE_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml tests/page $(OPTIONS)

.PHONY: mxnet-test
mxnet-test: build-tests ## Train with MXNet 1.9.1, in an environment with the NumPy that it needs: installs 0.2 GB, takes 2 minutes
	@$(PYTHON) tests/setup/environment.py mxnet
	$(MXNET_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml tests/frameworks/test_mxnet.py $(OPTIONS)

.PHONY: framework-versions-test
framework-versions-test: build-tests ## Train with TensorFlow 2.20 and 2.19, and with Keras on PyTorch: installs two further TensorFlows
	@$(PYTHON) tests/setup/environment.py tensorflow-2.20 tensorflow-2.19 keras-torch
	for stage in tensorflow-2.20 tensorflow-2.19; do \
	    $$($(PYTHON) tests/setup/environment.py path $$stage) -m pytest -q -rs -c sdk-python/pyproject.toml \
	        $(FRAMEWORK_TESTS) $(OPTIONS) || exit 1; \
	done
	$$($(PYTHON) tests/setup/environment.py path keras-torch) -m pytest -q -rs -c sdk-python/pyproject.toml \
	    tests/frameworks/test_keras_torch.py $(OPTIONS)

# OPTIONS="-k killed" runs some tests.
.PHONY: ray-test
ray-test: build-tests ## Train with Ray, in network namespaces of its own: installs 0.4 GB, needs root, takes up to 12 minutes
	@tests/setup/debian.sh
	@$(PYTHON) tests/setup/environment.py ray
	$(RAY_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml tests/ray $(OPTIONS)

# OPTIONS="-k killed" runs some tests.
.PHONY: spark-test
spark-test: build-tests ## Train with Spark, in network namespaces of its own: installs 2.3 GB and Java, needs root, takes up to 22 minutes
	@tests/setup/debian.sh spark
	@$(PYTHON) tests/setup/environment.py spark
	$(SPARK_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml tests/spark $(OPTIONS)

.PHONY: spark-bench
spark-bench: build-tests ## Measure reading of Parquet beside Petastorm and a plain DataLoader of PyTorch (some minutes)
	@$(PYTHON) tests/setup/environment.py spark petastorm
	$(SPARK_PYTHON) tests/spark/reading.py $(PETASTORM_PYTHON) $(OPTIONS)

# OPTIONS="-k dies" runs one test.
.PHONY: torchft-test
torchft-test: build-tests ## Train with torchft's Manager, its last release and a nightly one, and run torchft's own tests (3 minutes)
	@$(PYTHON) tests/setup/environment.py torchft torchft-nightly
	for python in $(TORCHFT_PYTHONS); do $$python -m pytest -q -rs -c sdk-python/pyproject.toml tests/torchft $(OPTIONS) || exit 1; done

# Installs PyTorch for CUDA (3 GB) in an environment of its own. Binary and extension are release builds, as for `make bench`.
.PHONY: gpu-test
gpu-test: export PYTHONPATH = $(BENCH)/package
gpu-test: ## Test and measure on a GPU of this machine, and print a table (8 minutes); without one, print the reason and fail
	@$(PYTHON) tests/setup/environment.py gpu
	$(CARGO) build --release --package ronde-sidecar --package ronde-python --package ronde-nccl-net
	@rm -rf $(BENCH)/package && mkdir -p $(BENCH)/package && cp -R sdk-python/python/ronde sdk-python/python/ronde_entry_points.py $(BENCH)/package
	@install $(CARGO_TARGET_DIR)/release/lib_ronde.so $(BENCH)/package/ronde/_ronde.abi3.so
	@install -D -C $(CARGO_TARGET_DIR)/release/libnccl_net_ronde.so $(CARGO_TARGET_DIR)/nccl/libnccl-net-ronde.so
	cd tests && $(GPU_PYTHON) -m gpu --ronde $(CARGO_TARGET_DIR)/release/ronde $(OPTIONS)

.PHONY: docs
docs: export NO_MKDOCS_2_WARNING = 1
docs: ## Build the site of the documentation into dist/site; a broken link fails
	@$(PYTHON) tests/setup/environment.py docs
	$(shell $(PYTHON) tests/setup/environment.py path docs) -m mkdocs build --strict --site-dir dist/site

.PHONY: package
package: ## Check that the published crates can be packaged, and build each from its package
	$(CARGO) package --workspace --exclude ronde-python --exclude ronde-tests --exclude ronde-tests-device --exclude ronde-tests-web --allow-dirty

.PHONY: lint
lint: lint-rust lint-fuzz lint-pure lint-deny lint-python lint-workflows ## Check formatting, lints, documentation, purity and types

.PHONY: lint-rust
lint-rust:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items --quiet

# The targets as programs for `cargo fuzz`, which itself needs a nightly compiler; without libFuzzer, which is C++.
.PHONY: lint-fuzz
lint-fuzz: FUZZ_MANIFEST := tests/cargo-fuzz/Cargo.toml
lint-fuzz:
	$(CARGO) fmt --manifest-path $(FUZZ_MANIFEST) --check
	$(CARGO) check --manifest-path $(FUZZ_MANIFEST) --locked --no-default-features --bins --examples

# The pure crates have nothing but their arguments: they compile for a machine without clock, files, threads or sockets.
.PHONY: lint-pure
lint-pure:
	@targets=$$(rustup target list --installed 2>/dev/null || true); \
	if grep -qx wasm32-unknown-unknown <<<"$$targets" || rustup target add wasm32-unknown-unknown; then \
	    set -x; $(CARGO) check $(PURE_CRATES:%=--package %) --target wasm32-unknown-unknown; \
	else \
	    echo "NOT CHECKED: purity. The target wasm32-unknown-unknown is not installed and rustup cannot add it." >&2; \
	    [[ ",$${RONDE_REQUIRE:-}," != *,wasm32,* ]]; \
	fi

# Installing cargo-deny takes four minutes of compiling, so that is left to `make deny`; the tidy tests hold the licences.
.PHONY: lint-deny
lint-deny:
	@if command -v cargo-deny >/dev/null; then \
	    set -x; $(CARGO) deny check licenses bans sources; \
	else \
	    echo "cargo-deny is not installed: bans and advisories are left to \`make deny\`"; \
	fi

.PHONY: lint-workflows
lint-workflows: DOCS_FOLDER = $(dir $(shell $(PYTHON) tests/setup/environment.py path docs))
lint-workflows:
	@$(PYTHON) tests/setup/environment.py docs
	$(DOCS_FOLDER)zizmor --quiet --offline --min-severity medium --config .github/zizmor.yml .github
	$(DOCS_FOLDER)check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(DOCS_FOLDER)check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(DOCS_FOLDER)check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	$(DOCS_FOLDER)check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

.PHONY: lint-python
lint-python:
	cd sdk-python && $(RONDE_PYTHON) -m ruff check . && $(RONDE_PYTHON) -m ruff format --check .
	$(RONDE_PYTHON) -m ruff check --config sdk-python/pyproject.toml $(PYTHON_FOLDERS)
	$(RONDE_PYTHON) -m ruff format --check --config sdk-python/pyproject.toml $(PYTHON_FOLDERS)
	cd sdk-python && $(RONDE_PYTHON) -m mypy

.PHONY: test-rust
test-rust:
	$(CARGO) test --workspace --no-fail-fast

.PHONY: test-python
test-python:
	cd sdk-python && $(RONDE_PYTHON) -m pytest -q -n $(PYTEST_WORKERS) -m "not heavy" --hypothesis-seed=$(PROPTEST_RNG_SEED)
	$(RONDE_PYTHON) -m pytest -q -n $(PYTEST_WORKERS) -c sdk-python/pyproject.toml tests/product
	$(RONDE_PYTHON) -m pytest -q -n $(PYTEST_WORKERS) -c sdk-python/pyproject.toml -m "not heavy" tests/deploy
	$(JAX_PYTHON) -m pytest -q -n 2 -c sdk-python/pyproject.toml -m "not heavy" tests/frameworks/test_jax.py
	$(RONDE_PYTHON) -m pytest -q -c sdk-python/pyproject.toml -m "not heavy" tests/tuning
	$(MONITOR_PYTHON) -m pytest -q -c sdk-python/pyproject.toml tests/monitor

# What is measured runs alone, after the others. OPTIONS choose among the tests of the SDK, and leave it out.
.PHONY: heavy-test
heavy-test: build-tests ## Run the tests that `make test` leaves out for their time: of the Python SDK, and of the search for settings
	cd sdk-python && $(RONDE_PYTHON) -m pytest -q -rs -n $(PYTEST_WORKERS) -m "heavy and not measured" $(OPTIONS)
	$(if $(OPTIONS),,cd sdk-python && $(RONDE_PYTHON) -m pytest -q -rs -m measured)
	$(if $(OPTIONS),,$(RONDE_PYTHON) -m pytest -q -rs -c sdk-python/pyproject.toml -m heavy tests/tuning)

# The binary and the extension are release builds, in a package of their own that nothing else imports.
.PHONY: bench
bench: export PYTHONPATH = $(BENCH)/package
bench: ## Measure against PyTorch Gloo and Open MPI, all results checked: 10 minutes (OPTIONS=--quick: one)
	@tests/setup/debian.sh
	@$(PYTHON) tests/setup/environment.py training bench
	$(CARGO) build --release --package ronde-sidecar --package ronde-python
	@rm -rf $(BENCH)/package && mkdir -p $(BENCH)/package && cp -R sdk-python/python/ronde sdk-python/python/ronde_entry_points.py $(BENCH)/package
	@install $(CARGO_TARGET_DIR)/release/lib_ronde.so $(BENCH)/package/ronde/_ronde.abi3.so
	@$(CARGO_TARGET_DIR)/release/ronde bench collectives $(OPTIONS) \
	    --json $(BENCH)/bench.json --markdown $(BENCH)/bench.md --plot $(BENCH)/bench.png
	@echo "make bench: bench.json, bench.md and bench.png are in $(BENCH)"

.PHONY: properties
properties: SEED := $(or $(SEED),$(shell date +%s))
properties: build-tests ## Test properties with values that no run has drawn, in the suites that have them (SEED=n repeats a run; 10 minutes)
	@echo "SEED=$(SEED)"
	PROPTEST_RNG_SEED=$(SEED) $(CARGO) test --workspace --no-fail-fast
	cd sdk-python && $(RONDE_PYTHON) -m pytest -q --hypothesis-seed=$(SEED) tests/test_elastic_sampler.py tests/test_torchrun_parts.py

# SECONDS is taken from the command line only: in bash it is a clock.
.PHONY: soak
soak: SOAK_SECONDS := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),1200)
soak: build-tests ## Run a job under random faults for 20 minutes, every element checked (SECONDS=n; needs root)
	@tests/setup/debian.sh
	@$(PYTHON) tests/setup/environment.py tools
	cd tests && $(RONDE_PYTHON) -m soak --seconds $(SOAK_SECONDS) $(OPTIONS)

.PHONY: tuning
tuning: build-tests ## Search from wrong settings, and compare what is found with a grid (10 minutes)
	cd tests && $(RONDE_PYTHON) -m tuning $(OPTIONS)

.PHONY: kills
kills: build-tests ## Kill processes of an elastic job of 4 workers 200 times, and measure how long the others need (40 minutes)
	@$(PYTHON) tests/setup/environment.py tools training
	cd tests && $(RONDE_PYTHON) -m kills $(OPTIONS)

.PHONY: sim
sim: ## Simulate 10,000 clusters, each under its own seed (FIRST=n SEEDS=n for others)
	$(CARGO) run --package ronde-tests --bin sim -- --seed $(FIRST) --count $(SEEDS)

.PHONY: sim-elastic
sim-elastic: ## Simulate 10,000 elastic jobs, each under its own seed (FIRST=n SEEDS=n for others)
	$(CARGO) run --package ronde-tests --bin sim -- --elastic --seed $(FIRST) --count $(SEEDS)

.PHONY: differential-rust
differential-rust: export RONDE_DIFFERENTIAL_SECONDS = $(FUZZ_SECONDS)
differential-rust: ## Run random programs of collectives on real jobs against an interpreter for a minute (SECONDS=n for others)
	$(CARGO) build --workspace --bin ronde
	$(CARGO) test --package ronde-tests --test system -- --nocapture --exact programs::random_programs_match_the_sequential_interpreter

# SECONDS is taken from the command line only: in bash it is a clock.
.PHONY: fuzz
fuzz: ## Run each decoder on a minute of bytes that nobody encoded (SECONDS=n TARGET=beginning of a name for others)
	@grep -rqE "fn fuzz_$(TARGET)" tests sidecar sdk-rust --include='*.rs' || { echo "no target begins with $(TARGET)" >&2; exit 1; }
	RONDE_FUZZ_SECONDS=$(FUZZ_SECONDS) $(CARGO) test --workspace --lib --bins --test fuzz --test host -- --nocapture fuzz_$(TARGET) \
	    | grep --line-buffered -E "^(fuzz:|test result: F|target |the shortest|it is in)"

.PHONY: differential
differential: ## Run drawn programs on ronde and on Gloo, and compare, for a minute (SECONDS=n; after `make build-tests`)
	cd sdk-python/tests && $(RONDE_PYTHON) -m differential run --seconds $(FUZZ_SECONDS) $(OPTIONS)

.PHONY: torch-suite
torch-suite: build-tests ## Run PyTorch's own tests of torch.distributed on ronde and on Gloo, and compare (15 minutes)
	@$(PYTHON) tests/setup/environment.py tools training torch-suite
	cd sdk-python/tests && $(RONDE_PYTHON) -m torch_suite --table $(CARGO_TARGET_DIR)/torch-suite.md $(OPTIONS)
	@echo "make torch-suite: the table is $(CARGO_TARGET_DIR)/torch-suite.md"

.PHONY: torchrun-test
torchrun-test: build-tests ## Train with torchrun's agents on one and two nodes, and break them (needs root, minutes)
	@tests/setup/debian.sh
	@$(PYTHON) tests/setup/environment.py tools training
	cd sdk-python && $(RONDE_PYTHON) -m pytest -q -n 2 tests/test_torchrun.py tests/test_torchrun_link.py tests/test_torchrun_parts.py \
	    tests/test_torchrun_rounds.py tests/test_torchrun_quorum.py

.PHONY: reconfigure-test
reconfigure-test: build-tests ## Groups of torch.distributed lose ranks and get others, on one and two hosts (needs root, minutes)
	@tests/setup/debian.sh
	@$(PYTHON) tests/setup/environment.py tools training
	cd sdk-python && $(RONDE_PYTHON) -m pytest -q -n 2 tests/test_reconfigure.py

.PHONY: deny
deny: ## Check licences, bans and advisories of dependencies (installs cargo-deny: minutes)
	@command -v cargo-deny >/dev/null || $(CARGO) install cargo-deny --locked
	$(CARGO) deny check
