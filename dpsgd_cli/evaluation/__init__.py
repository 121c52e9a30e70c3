"""Private measurement of a trained model on held-out records: one noisy release, metrics with intervals, and sets."""
