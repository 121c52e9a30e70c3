"""Schedules of noise multipliers and learning rates: settings, price of adaptive ones, and their use."""
