"""The training engine (torch): packed models, clipped sums, noise, sampling. No accountant, no Click."""
