"""A verb as the tests of all tools call it."""

from tests.tools.conftest import tool

__all__ = ["tool"]
