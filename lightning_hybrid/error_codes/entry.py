"""The entry of an error code: the cause and the fix of the error, and the pattern of the code in its message."""

from __future__ import annotations

import re
from typing import NamedTuple

CODE = re.compile(r"\[(LH\d{3,4})\]")


class Entry(NamedTuple):
    """The explanation of an error in the reference.

    Attributes:
        cause: The cause, as a sentence of Markdown. Links are relative to ``docs/reference``.
        fix: The fix, as an imperative sentence.
    """

    cause: str
    fix: str


def without_code(error: object) -> str:
    """Return the message of an error without its code, so that it can be part of another message.

    Example:
        >>> without_code("The batch is empty. [LH131]")
        'The batch is empty.'
    """
    return re.sub(rf" ?{CODE.pattern}", "", str(error))
