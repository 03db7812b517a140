"""What comes after pretraining: read weights, images; then reconstruct, scores, finetune."""
