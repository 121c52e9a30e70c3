"""Algorithms and bounds of the lectures."""
