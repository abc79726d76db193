"""The numbers of heads in the attributes of an attention, and heads that a plan lacks.

`blocks` and `hf_plan` read the numbers while an automatic plan is made, `shape_errors` after an error, and
``lightning-hybrid check`` at the start of training (:func:`missing_heads`). Libraries have no common attribute for the
number of heads, so the usual names are searched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from lightning_hybrid.distributed.module_names import pattern_of
from lightning_hybrid.tensor_parallel.auto_plan.forward_code import attributes_read
from lightning_hybrid.tensor_parallel.layers import ColumnParallelLinear, DividedNumbers

#: Names of the attribute with the number of all heads of queries.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = re.compile(r"((n|num)_)?(kv|key|key_value)_heads?")  # heads of keys and values, in grouped-query attention


def count_heads(owner: object) -> dict[str, int]:
    """Return the numbers of heads in an attention or a configuration, by attribute; empty for other objects.

    Heads of queries come before heads of keys and values.
    """
    attributes = getattr(owner, "__dict__", {})
    names = *HEADS, *filter(_KEY_HEADS.fullmatch, attributes)
    return {name: attributes[name] for name in names if type(attributes.get(name)) is int}


def indivisible_reason(counts: Mapping[str, int], size: int) -> str | None:
    """Return the reason why heads cannot be divided over the ranks, as the end of a sentence; else ``None``."""
    for name, count in counts.items():
        if count % size:
            return f"has {count} heads ({name}), which cannot be divided over {size} ranks"
    return None


def undivided_heads(module: nn.Module) -> dict[str, int]:
    """Return the numbers of all heads that a module's code reads and that the plan does not divide, by attribute."""
    divided = module.divided if isinstance(module, DividedNumbers) else ()
    heads, read = count_heads(module), attributes_read(module)
    return {name: n for name, n in heads.items() if name not in divided and (read is None or name in read)}


def missing_heads(module: nn.Module) -> list[str]:
    """Return messages about modules that have sharded layers, but compute with the number of all heads.

    Args:
        module: The full module, after its plan has been applied.

    Returns:
        A message for each group of similar modules, with the entry that the plan may lack.
    """
    found: dict[str, None] = {}
    for name, part in module.named_modules():
        layers = [repr(each) for each, child in part.named_children() if isinstance(child, ColumnParallelLinear)]
        heads = undivided_heads(part) if layers else {}
        if heads:
            pattern, numbers = pattern_of(name), " and ".join(f"{key}={number}" for key, number in heads.items())
            text = (
                f"{pattern!r} has sharded layers ({', '.join(layers)}), but its code reads {numbers}, which the plan"
                f" does not divide. The plan may lack the entry {pattern!r}: 'divide:{','.join(heads)}'."
            )
            found[text] = None
    return [*found]
