"""Training methods, one file each; their registry is with their settings (`methods/descriptor.py`)."""

from dpsgd_cli.engine.context import Context
from dpsgd_cli.methods.base import Method
from dpsgd_cli.methods.creation import create

__all__ = ["Context", "Method", "create"]
