"""Preconditioners released before training: settings, price, and their use."""
