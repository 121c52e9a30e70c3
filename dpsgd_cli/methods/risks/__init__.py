"""Convex empirical risk on linear models: losses of a margin, public constants, and fast sums for many trials.

Not here: privacy (what is clipped, noised and charged is the method's business), general models (`engine/packing.py`).
"""
