"""What comes after pretraining: a look at what a model has learned, scores, fine-tuning, exchange.

It reads checkpoints and never writes into the folder of a run, unless asked to. Begin with
pretrained.py, the weights of a model and what they were trained on, and images.py, the images of
every evaluation; then reconstruct.py, the picture; scores.py and classifiers.py, the
scores; finetune.py, fine-tuning; layouts.py, weight_files.py and export.py, exchange with other
libraries.
"""
