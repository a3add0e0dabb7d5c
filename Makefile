# `make demo` and `make test` do all of their own set-up in .venv.

PYTHON ?= python3
# `make quick TORCH=2.14.1` runs the tests with another torch, in an environment of its own; builds with CUDA are 5 GB.
TORCH ?=
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What `memopt demo` needs: memopt itself and torch. Everything else installs the rest beside it.
DEMO_STAMP := $(VENV)/.installed-demo
# Without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu spares the gigabytes of CUDA libraries.
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One thread per process: xdist already uses every core. And no process with caches of its own tries first whether the
# compiler makes vector code, which takes it seven seconds. What pytest makes of the files is kept: ten seconds a worker.
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Tests of a file follow each other in one worker, which so makes what they share once; who is done takes of the others'.
SHARED := --dist worksteal

.PHONY: demo docs examples test quick test-slow test-tensorflow test-gpu test-onnx-material test-conversions test-conversion-memory \
	test-random-modules test-model-classes test-packing test-integrations lint style types readme clean
.DELETE_ON_ERROR:

demo: $(DEMO_STAMP)
	$(BIN)/memopt demo

# The example reports of docs/examples; CONTRIBUTING.md says when.
examples: $(STAMP)
	$(BIN)/python -m benchmarks.examples

# The types are checked beside the tests: mypy has use for one core alone.
test: $(STAMP) style
	$(MAKE) --no-print-directory -j 2 types quick

quick: $(STAMP)
	$(PYTEST) -n auto --maxprocesses 16 $(SHARED) -m "not slow and not long and not gpu"

test-slow: $(STAMP)
	$(PYTEST) -n auto --maxprocesses 16 $(SHARED) -m "(slow or long) and not gpu" --timeout 7200

# TensorFlow, Keras and JAX: some 700 MB that the other tests do not need.
test-tensorflow: $(STAMP)
	$(PIP_INSTALL) -c $(VENV)/constraints.txt -e ".[dev,hf,onnx,tensorflow]"
	$(PYTEST) -n auto --maxprocesses 4 -m "not gpu" tests/tensorflow tests/backends/test_tensorflow.py \
		tests/cli/test_convert_keras.py tests/cli/test_saved_model.py tests/cli/test_to_tensorflow.py

# Each file in a process of its own: a budget counts what libraries hold by then, and allows for others' CUDA graphs.
test-gpu: $(STAMP)
	@failed=0; for file in $$(grep -rl 'mark\.gpu' tests --include='test_*.py' | sort); do \
		echo "$$file"; $(PYTEST) -q -m gpu "$$file" || failed=1; \
	done; exit $$failed

# Training loops of other libraries, as they are, and what their epochs take: half an hour of one core.
test-integrations: $(STAMP)
	$(PIP_INSTALL) -c $(VENV)/constraints.txt -e ".[dev,train,trl,lightning]" tensorboard
	$(PYTEST) tests/integrations tests/test_in_place.py tests/test_snippets.py

# The site of the docs, in build/site; a warning is an error.
docs: $(STAMP)
	$(PIP_INSTALL) -c $(VENV)/constraints.txt -e ".[dev,docs]"
	$(BIN)/python docs/site.py

# Long checks of `memopt convert`, each with its counts on record in benchmarks/results; they fail where one does not hold.
# The ONNX package's node cases and light models, file to file, for both targets: ten minutes on one core.
test-onnx-material: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.material

# Every model of memopt.models and 44 classes of transformers: twenty minutes on one core.
test-conversions: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.conversions

# A checkpoint of 3 GB within 1.5 times its weights of host memory; 9 GB of disk for a while.
test-conversion-memory: $(STAMP)
	$(BIN)/python -m benchmarks.conversion_memory

# Random modules and their loops beside eager on each engine that trains, as many as fit into ten minutes.
test-random-modules: $(STAMP)
	$(BIN)/python -m benchmarks.random_modules --engine aten --programs 20000 --minutes 10
	$(BIN)/python -m benchmarks.random_modules --engine inductor --programs 20000 --minutes 10
	$(BIN)/python -m benchmarks.random_modules --loops users --engine aten --programs 20000 --minutes 10
	$(BIN)/python -m benchmarks.random_modules --loops users --engine inductor --programs 20000 --minutes 10

# Two hundred hard lists of buffers whose packings are known, a minute of one core each; it fails while one is not packed.
test-packing: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/packing_hard.py --instances 200 --seconds 60

# Sixty-four classes of transformers and ten plain models, trained within 0.7 of their peak: half an hour on one core.
test-model-classes: $(STAMP)
	$(BIN)/python -m benchmarks.model_classes --engine aten

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy -p memopt

# The README's tables, from benchmarks/results.
readme: $(STAMP)
	$(BIN)/python benchmarks/render.py

# Set-up is repeated only when what is to be installed changes.
$(VENV)/constraints.txt: constraints.txt
	@mkdir -p $(VENV)
	sed $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d',-e '') constraints.txt > $@

$(DEMO_STAMP): pyproject.toml $(VENV)/constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and memopt into $(VENV): a minute, and as long as their download takes"
	$(PIP_INSTALL) -c $(VENV)/constraints.txt -e .
	touch $@

$(STAMP): $(DEMO_STAMP)
	$(PIP_INSTALL) -c $(VENV)/constraints.txt -e ".[dev,hf,onnx,xla]"
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* build dist memopt.egg-info memopt-report .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
