"""The probabilities of dropout that a module keeps in attributes."""

from __future__ import annotations

import ast

from torch import nn

from lightning_hybrid.tensor_parallel.auto_plan.forward_code import parse_source, source_of


def set_dropout_to_zero(module: nn.Module) -> int:
    """Set those of a module to 0, not of the modules in it.

    They are attributes with ``drop`` in their names and not ``keep``, and ``p`` if it is one: see :func:`_is_dropout`.

    Returns:
        The number of those that were not 0.
    """
    in_range = [name for name, value in vars(module).items() if isinstance(value, float) and 0 < value <= 1]
    named = [name for name in in_range if "drop" in name.lower() and "keep" not in name.lower()]
    found = [*named, *(name for name in in_range if name == "p" and _is_dropout(type(module)))]
    for name in found:
        setattr(module, name, 0.0)
    return len(found)


def _is_dropout(kind: type[nn.Module]) -> bool:
    """Whether ``self.p`` is a probability of dropout; it may be another thing, such as the order of a norm.

    It is one in a class called so; or where the source of the class, or of one that it inherits from, takes it from
    something called dropout (``self.p = dropout``), or hands it to something called dropout.
    """
    if any(word in kind.__name__.lower() for word in ("dropout", "droppath", "dropblock")):
        return True
    return any(map(_uses_for_dropout, kind.__mro__[: kind.__mro__.index(nn.Module)]))


def _uses_for_dropout(kind: type) -> bool:
    tree = parse_source(source_of(kind))
    for node in () if tree is None else ast.walk(tree):  # of what was typed in, there may be no source
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            ends = [node.value, *(node.targets if isinstance(node, ast.Assign) else [node.target])]
            if any(map(_is_p, ends)) and any(map(_is_called_dropout, ends)):
                return True
        elif isinstance(node, ast.Call):
            by_name = [each.value for each in node.keywords if "drop" in (each.arg or "").lower()]
            if any(map(_is_p, by_name)) or (_is_called_dropout(node.func) and any(map(_is_p, node.args))):
                return True
    return False


def _is_p(node: ast.expr) -> bool:
    """Whether an expression is ``self.p``, or that in one of two cases."""
    if isinstance(node, ast.IfExp):
        return _is_p(node.body) or _is_p(node.orelse)
    return isinstance(node, ast.Attribute) and node.attr == "p"


def _is_called_dropout(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "drop" in name.lower()
