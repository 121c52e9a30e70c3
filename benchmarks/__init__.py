"""Measurements beside peers and papers. Never imported by the package."""
