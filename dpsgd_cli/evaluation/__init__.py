"""Private measurement of a trained model on held-out records: one noisy release, and metrics with intervals."""
