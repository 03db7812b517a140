"""After pretraining: read reconstruct.py, then scores.py, finetune.py."""
