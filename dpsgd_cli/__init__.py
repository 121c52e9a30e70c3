"""dpsgd: an experiment runner for differentially private gradient methods."""

__version__ = "0.1.0"
