"""What comes after pretraining: a look at what a model has learned, scores, fine-tuning, exchange.

It reads checkpoints and never writes into the folder of a run. Begin with pretrained.py, the
weights of a model and what they were trained on.
"""
