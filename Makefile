# make demo    train on the embedded images with 4 CPU ranks; resumes after Ctrl-C. Uses PyTorch where
#              PYTHON has it, and else installs it into .venv
# make demo-long    2,000 steps on two ranks, then scores beside two baselines
# make test    the tests, set-up included
# make test-all    the same with the whole matrices, and what takes minutes each
# make lint    formatting, spelling, types
# make guide   run the commands of docs/guide.md, put what they print into it, draw its pictures
# make bench-gpu     a GPU: checks, sizes against the plan, the peers; at most 20 minutes, out/bench-gpu
# make test-slurm    install a Slurm by apt (needs root or sudo), then run the tests that use it
# make sweep-gpu    studies on one GPU, a page each under examples/gpu/, to be committed
# PYTHON=python3.12 make demo    choose the Python (3.10 or newer) of a new environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyTorch is large: take that of $(PYTHON) where it is there
HAS_TORCH := $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("torchvision")))'
USER_PYTHON = $(shell $(HAS_TORCH) && echo $(PYTHON) || echo $(BIN)/python)
RANKS := -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node
DEMO_OUT := out/demo
LONG_OUT := out/demo-long
SCORED := --data examples/tiles/train --test examples/tiles/heldout --features mean --seeds 3 --workers 0 --device cpu

.PHONY: demo demo-long setup test test-all guide bench-gpu test-slurm sweep-gpu lint clean
.DELETE_ON_ERROR:

setup:
	@$(HAS_TORCH) || [ -e $(VENV)/run.ok ] || echo "installing PyTorch, a few GB, into $(VENV)"
	@$(HAS_TORCH) || $(MAKE) --no-print-directory $(VENV)/run.ok

demo: setup
	@test -d examples/tiles/train || { echo "examples/tiles/train is missing: git checkout examples" >&2; exit 1; }
	@if [ -e $(DEMO_OUT)/done ]; then rm -rf $(DEMO_OUT); fi  # an interrupted one is resumed
	OMP_NUM_THREADS=1 $(USER_PYTHON) $(RANKS) 4 \
	  train_fsdp.py --mode hybrid --group 2 --model tiny --img-size 64 --no-norm-pix-loss \
	  --data examples/tiles/train --eval-data examples/tiles/heldout --global-batch 24 --steps 300 \
	  --blr 2.4e-2 --precision fp32 --device cpu --workers 1 --log-every 20 --out $(DEMO_OUT)
	$(USER_PYTHON) probe.py reconstruct $(DEMO_OUT) --data examples/tiles/heldout --images 4 \
	  --device cpu --out $(DEMO_OUT)/picture.png
	$(USER_PYTHON) probe.py knn $(DEMO_OUT) $(SCORED) --out $(DEMO_OUT)-scores

demo-long: setup
	OMP_NUM_THREADS=1 $(USER_PYTHON) $(RANKS) 2 \
	  train_fsdp.py --mode full_shard --model tiny --img-size 64 --data examples/tiles/train \
	  --global-batch 64 --steps 2000 --blr 4e-3 --precision fp32 --device cpu --workers 1 \
	  --eval-data examples/tiles/heldout --log-every 50 --save-every 200 --out $(LONG_OUT)
	$(USER_PYTHON) probe.py knn $(LONG_OUT) $(SCORED) --out $(LONG_OUT)-scores

# Two or three tests at a time; most start ranks of their own, which get one thread each.
test: $(VENV)/dev.ok
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/dev.ok
	TEST_ALL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal
	$(BIN)/python verify.py --ranks 4 train_fsdp.py --mode {mode} --fsdp {fsdp} --group {group} \
	  --model tiny --img-size 32 --data examples/tiles/train --global-batch 16 --accum 2 --ac full \
	  --steps 4 --precision fp32 --device cpu --workers 0 --out run

guide: $(VENV)/dev.ok
	$(BIN)/python docs/rebuild.py
	$(BIN)/python docs/figures.py

bench-gpu: $(VENV)/dev.ok
	$(BIN)/python -m benchmarks.gpu --device cuda --out out/bench-gpu

# Debian's Slurm is built for several pretended nodes on one host; make test uses it where it is.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge iproute2 shellcheck
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)
test-slurm: $(VENV)/dev.ok
	@command -v apt-get >/dev/null || { echo "apt-get is missing: install slurmctld, slurmd, slurm-client and munge yourself, then make test" >&2; exit 1; }
	dpkg -s $(SLURM_PACKAGES) >/dev/null 2>&1 || { $(SUDO) apt-get update && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(SLURM_PACKAGES); }
	TEST_ALL=1 $(BIN)/python -m pytest tests/test_slurm.py

# One process, base and 1b: the parts of the studies that need no second device.
GPU_OUT := examples/gpu
sweep-gpu: $(VENV)/dev.ok
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "sweep-gpu needs a GPU that PyTorch sees")'
	$(BIN)/python sweep.py quick --ranks 1 --out $(GPU_OUT)/quick
	$(BIN)/python sweep.py io --models base,1b --ranks 1 --out $(GPU_OUT)/io

lint: $(VENV)/dev.ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out

# A stamp is written last, so an interrupted set-up is taken up again.
$(VENV)/python.ok:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed: install Python 3.10 or newer, or type PYTHON=... make" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than Python 3.10: type PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: apt-get install python3-venv, or your system's like" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/run.ok: requirements.txt | $(VENV)/python.ok
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/dev.ok: requirements.txt requirements-dev.txt | $(VENV)/python.ok
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $(VENV)/run.ok $@
