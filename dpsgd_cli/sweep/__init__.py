"""Sweeps: many recipes from one file, trained in packs, on one machine or several."""
