"""What every test of a method shares."""

from tests.core.conftest import one_thread

__all__ = ["one_thread"]
