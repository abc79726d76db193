"""Dropout probabilities that a module stores in attributes.

In a check, a callback sets them to 0 before training in one process and under a layout. `module.eval()` would also
change batch norm and all other code that depends on `training`.
"""

from __future__ import annotations

import ast

from torch import nn

from lightning_hybrid.tensor_parallel.auto_plan.forward_code import parse_source, source_of


def set_dropout_to_zero(module: nn.Module) -> int:
    """Set the dropout probabilities of a module to 0, but not of its submodules.

    These are attributes with ``drop`` but not ``keep`` in their names, and ``p`` in some classes: see
    :func:`_is_dropout`.

    Returns:
        The number of probabilities that were not 0.
    """
    in_range = [name for name, value in vars(module).items() if isinstance(value, float) and 0 < value <= 1]
    named = [name for name in in_range if "drop" in name.lower() and "keep" not in name.lower()]
    found = [*named, *(name for name in in_range if name == "p" and _is_dropout(type(module)))]
    for name in found:
        setattr(module, name, 0.0)
    return len(found)


def _is_dropout(kind: type[nn.Module]) -> bool:
    """Return True if ``self.p`` of a class is a dropout probability and not, for example, the order of a norm.

    This is the case if the name of the class contains a word for dropout, or if its source, or the source of a base
    class, assigns ``self.p`` from a name with dropout (``self.p = dropout``), or passes it to such a name.
    """
    if any(word in kind.__name__.lower() for word in ("dropout", "droppath", "dropblock")):
        return True
    return any(map(_uses_for_dropout, kind.__mro__[: kind.__mro__.index(nn.Module)]))


def _uses_for_dropout(kind: type) -> bool:
    tree = parse_source(source_of(kind))
    for node in () if tree is None else ast.walk(tree):  # interactively defined classes may have no source
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
    """Return True if an expression is ``self.p``, or a conditional expression with ``self.p``."""
    if isinstance(node, ast.IfExp):
        return _is_p(node.body) or _is_p(node.orelse)
    return isinstance(node, ast.Attribute) and node.attr == "p"


def _is_called_dropout(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "drop" in name.lower()
