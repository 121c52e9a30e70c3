"""Bounds and categories of columns that nobody knows beforehand, released before training: settings, price, and use."""
