"""Data: cards, readers, preprocessing and splits, behind three functions. NumPy only; no tensors, no accounting."""

from dpsgd_cli.data.dataset import Dataset, Outline
from dpsgd_cli.data.preparation import outline, prepare, private_releases

__all__ = ["Dataset", "Outline", "outline", "prepare", "private_releases"]
