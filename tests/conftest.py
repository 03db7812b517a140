"""Makes the scripts importable from the tests, and the tests independent of the caller's shell."""

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
torch.set_num_threads(1)  # tiny models: more threads only wait for each other
