"""Something that is done before each call of a function; `planted` does so in other processes."""

from collections.abc import Callable
from typing import Any

import pytest


def before(patch: pytest.MonkeyPatch, place: Any, name: str, action: Callable[..., Any]) -> None:
    """Let `action` be called before each call of `place.name`, with what that is given."""
    real = getattr(place, name)

    def call(*given: Any, **more: Any) -> Any:
        action(*given, **more)
        return real(*given, **more)

    patch.setattr(place, name, call)
