"""Training methods, one file each; their registry is with their settings (`methods/descriptor.py`)."""

from dpsgd_cli.methods.base import Context, Method
from dpsgd_cli.methods.creation import create

__all__ = ["Context", "Method", "create"]
