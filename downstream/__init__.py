"""What comes after pretraining: a look at what a model has learned, scores, fine-tuning, exchange.

It reads checkpoints and never writes into the folder of a run, unless asked to. Begin with
weights.py, the weights of a model, whatever wrote them, and images.py, the images of every
evaluation; then reconstruct.py, the picture; scores.py, the scores; finetune.py, fine-tuning.
"""
