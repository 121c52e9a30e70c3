"""Clipping of per-example gradients: settings, price, and the clipped sums."""
