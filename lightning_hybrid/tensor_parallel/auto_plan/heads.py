"""How many heads an attention says that it has."""

from __future__ import annotations

from collections.abc import Mapping

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")


def count_heads(owner: object) -> dict[str, int]:
    """The numbers of heads of queries and of keys, by the attributes of an attention or a configuration.

    Those of queries come first.
    """
    attributes = getattr(owner, "__dict__", {})
    return {name: attributes[name] for name in (*HEADS, *_KEY_HEADS) if type(attributes.get(name)) is int}


def indivisible_reason(counts: Mapping[str, int], size: int) -> str | None:
    """Why heads cannot be divided over so many ranks, as the rest of a sentence; ``None`` if they can."""
    for name, count in counts.items():
        if count % size:
            return f"has {count} heads ({name}), which cannot be divided over {size} ranks"
    return None
