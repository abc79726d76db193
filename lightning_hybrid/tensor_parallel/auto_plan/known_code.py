"""Whose code is divided without a plan.

What a block computes between its layers decides whether they can be divided, and no trial shows all of it. So a block
is recognised only where all of its code is of packages whose blocks were looked at; a user's own wants a plan.
"""

from __future__ import annotations

from torch import nn

KNOWN_PACKAGES = frozenset({"torch", "transformers", "timm"})


def unknown_reason(block: nn.Module) -> str | None:
    """Why the code of a block is not known, as the rest of a sentence; ``None`` if it is."""
    for name, part in block.named_modules():
        kind, which = type(part), f"has {name!r}, " if name else "is "
        if kind.__module__.partition(".")[0] not in KNOWN_PACKAGES:
            return f"{which}a {kind.__name__} of {kind.__module__!r}, whose code is not known"
        if "forward" in vars(part):
            return f"{which}a {kind.__name__} with a `forward` that was put in the place of its class's"
        if name and (part._forward_hooks or part._forward_pre_hooks):
            return f"{which}a {kind.__name__} with hooks, which would see shards"
    return None
