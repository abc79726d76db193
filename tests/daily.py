"""Lists of parameters of which only a part runs every day; `pytest -m thorough` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return parameters for `pytest.mark.parametrize`, of which all but some are marked as `thorough`.

    Args:
        values: The parameters; a tuple has one value for each argument.
        kept: The parameters that run every day. Choose those that combine the most, and keep every feature.
    """
    values = list(values)
    unknown = [each for each in kept if each not in values]
    assert not unknown, unknown
    return [pytest.param(*_arguments(value), marks=() if value in kept else pytest.mark.thorough) for value in values]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
