"""What every test of a method shares."""

from tests.engine.conftest import one_thread

__all__ = ["one_thread"]
