"""Convex empirical risk on linear models: losses of a margin, and fast sums for many trials.

The methods decide what is clipped, noised and charged.
"""
