# make test, make demo: everything they need is set up on the first run and reused afterwards.
#
#   VENV=auto      .venv, made here and filled with the pinned torch; python3 itself where no package index can
#                  be reached and it already has a CUDA build of torch (default). While there is no .venv, make demo
#                  takes python3 as it is if that has all it needs
#   VENV=system    python3 as it is, with the torch it has
#   VENV=folder    another virtual environment
#   PYTHON=...     the interpreter to start from
#   ARGS=...       passed on to pytest, or to the demo

VENV ?= auto
PYTHON ?= python3
ARGS ?=
EXTRAS =
MODULES =

# What no package brings, looked for before gigabytes are fetched, and refused in the words of the build. A virtual
# environment that is there is asked for its own headers.
define CHECK
import sys
sys.path.insert(0, "csrc")
from build_backend import environment
try:
    environment.check_platform()
    environment.check_host_compiler(environment.find_toolkit()[0])
    environment.check_python_headers()
except environment.BuildProblem as problem:
    raise SystemExit(f"\n{problem}")
endef
export CHECK
checked = $(firstword $(wildcard $(VENV:auto=.venv)/bin/python) $(PYTHON)) -c "$$CHECK"

# Whether python3 has a CUDA build of torch that fits, and what compiles flash_ext for it. Its arguments are modules.
define FITS
import sys
sys.path.insert(0, "csrc")
from build_backend import environment, prepare
try:
    prepare.check_system(sys.argv[1:])
    nvcc = environment.check_toolkit().nvcc
    import torch
    assert torch.version.cuda
except Exception:
    raise SystemExit(1)
print(f"make demo: nothing is fetched: {sys.executable} has torch {torch.__version__}, for which {nvcc} compiles.\n"
      "VENV=.venv makes an environment with the pinned torch instead.", file=sys.stderr)
endef
export FITS

# Shell text that sets $$py to the interpreter of an environment that has the extras; then with the extension built in
# place.
venv = $(VENV)
environment = py=$$($(PYTHON) csrc/build_backend/prepare.py --venv $(venv) --extras $(EXTRAS) --modules $(MODULES))
prepared = $(checked) && $(environment) && $$py setup.py --quiet build_ext --inplace

.PHONY: help build test demo docs lint info bench ladder clean

help:
	@echo "make test    run every test this machine can run   (ARGS='-k varlen' picks some)"
	@echo "make demo    train a small transformer with flash_ext and with PyTorch's attention, side by side"
	@echo "make docs    build the HTML site in out/docs; a warning is an error"
	@echo "make lint    check style, types and imports with ruff, mypy, import-linter and clang-format"
	@echo "make build   compile the extension in place"
	@echo "make info    versions, build flags, GPU and the backend that serves it"
	@echo "make bench   measure attention against every peer found"
	@echo "make ladder  build the kernels of examples/ladder and time them beside ours"
	@echo "make clean   remove what was built (not .venv)"

build:
	@$(prepared)

# As many processes as the machine has cores, at most 12, where pytest-xdist is installed: as many as one H200 was
# measured with.
side_by_side = $$($$py -c "import importlib.util as u; print('-n auto --maxprocesses 12 --dist loadgroup' if u.find_spec('xdist') else '')")

test: MODULES = pytest hypothesis numpy
test: EXTRAS = test demo
test:
	@$(prepared) && $$py -m pytest $(side_by_side) $(ARGS)

demo: MODULES = numpy
demo: EXTRAS = demo
demo: venv = $$venv
demo:
	@venv=$(VENV); if [ $$venv = auto ] && [ ! -e .venv ] && $(PYTHON) -c "$$FITS" $(MODULES); then venv=system; else \
	echo "make demo: the first time fetches torch (2 minutes) and a CUDA compiler (2 minutes) into $(VENV:auto=.venv)" >&2; fi; \
	echo "make demo: the first time compiles the kernels (7 to 18 minutes on two cores); then trains and measures, in under two minutes" >&2; \
	$(prepared) && $$py -m examples.train $(ARGS)

PYTHON_SOURCES = bench csrc docs/conf.py examples flash_ext tests setup.py
CPP_SOURCES = git ls-files -z | grep -zE '[.](h|cpp|cu|cuh)$$'

lint: MODULES = ruff mypy importlinter
lint: EXTRAS = dev
lint:
	@$(environment) && $$py -m ruff check $(PYTHON_SOURCES) && $$py -m ruff format --check $(PYTHON_SOURCES) && \
	$$py -m mypy && $$(dirname $$py)/lint-imports --no-cache --no-logo && \
	git rev-parse --git-dir > /dev/null && $(CPP_SOURCES) | xargs -0 $$(dirname $$py)/clang-format --dry-run --Werror

docs: MODULES = sphinx myst_parser furo
docs: EXTRAS = docs
docs:
	@$(prepared) && $$py -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --quiet docs out/docs
	@echo "out/docs/index.html"

info:
	@$(prepared) && $$py -m flash_ext.info $(ARGS)

bench: MODULES = numpy
bench: EXTRAS = demo
bench:
	@$(prepared) && $$py -m bench.attention $(ARGS)

ladder: MODULES = numpy
ladder: EXTRAS = demo
ladder:
	@$(prepared) && $$py setup.py --quiet build_ladder && $$py -m examples.ladder $(ARGS)

clean:
	rm -rf build dist *.egg-info flash_ext/_C*.so examples/ladder/kernels/*.so
