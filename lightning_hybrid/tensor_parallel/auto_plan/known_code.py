"""The packages whose blocks are sharded without a proof about their code.

The computation between the layers of a block determines whether the layers can be sharded, and a trial does not show
all of it: code may read values, or behave differently in a later call. The blocks of some packages have been reviewed.
Other code must be proved to do nothing else (`straight_code`, `operations`). `blocks` and `hf_plan` call
:func:`unknown_reason` with each block while an automatic plan is made.
"""

from __future__ import annotations

from torch import nn

from lightning_hybrid.torch_internals import backward_hooks, forward_hooks, forward_pre_hooks

#: The packages whose code is known.
KNOWN_PACKAGES = frozenset({"torch", "transformers", "timm"})


def is_known_class(kind: type) -> bool:
    """Return True if a class comes from a package whose code is known."""
    return kind.__module__.partition(".")[0] in KNOWN_PACKAGES


def unknown_reason(block: nn.Module) -> str | None:
    """Return the reason why the code of a block is unknown, as the end of a sentence; ``None`` if it is known."""
    for name, part in block.named_modules():
        kind = type(part)
        if not is_known_class(kind):
            return f"{_which(name)}a {kind.__name__} from {kind.__module__!r}, whose code is unknown"
        reason = _changed_reason(name, part)
        if reason is not None:
            return reason
    return None


def changed_reason(block: nn.Module) -> str | None:
    """Return the reason why a block does more than its classes do, as the end of a sentence; else ``None``.

    Reasons are a replaced `forward`, and hooks on modules inside the block.
    """
    reasons = (_changed_reason(name, part) for name, part in block.named_modules())
    return next((reason for reason in reasons if reason is not None), None)


def _changed_reason(name: str, part: nn.Module) -> str | None:
    kind = type(part).__name__
    if "forward" in vars(part):
        return f"{_which(name)}a {kind} with a replaced `forward`"
    if name and (forward_hooks(part) or forward_pre_hooks(part) or backward_hooks(part)):
        return f"{_which(name)}a {kind} with hooks, which would receive only shards"
    return None


def _which(name: str) -> str:
    return f"contains {name!r}, " if name else "is "
