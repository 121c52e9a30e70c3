"""Confidence intervals of coefficients and shapes, from released statistics alone."""
