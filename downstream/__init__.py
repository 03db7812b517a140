"""After pretraining: read weights.py and images.py, then reconstruct.py, scores.py, finetune.py."""
