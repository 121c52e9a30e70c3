"""Data: cards, readers, preprocessing and splits, behind three functions. Only feature extractors use tensors."""

from dpsgd_cli.data.dataset import Dataset, Outline
from dpsgd_cli.data.on_disk import Rows
from dpsgd_cli.data.preparation import outline, prepare, private_releases

__all__ = ["Dataset", "Outline", "Rows", "outline", "prepare", "private_releases"]
