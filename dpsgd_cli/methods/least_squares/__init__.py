"""Private least squares by noisy second moments (Mehta et al. 2022)."""
