"""Training: plans, start, loop over epochs, checkpoints, evaluation and inference."""
