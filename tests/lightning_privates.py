"""Finds what a package touches of the insides of Lightning and torchmetrics, outside of the one file that may."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from lightning_hybrid.trainer.lightning_internals import STRATEGY_MEMBERS

SEAM = "trainer/lightning_internals.py"
LIBRARIES = ("lightning", "lightning_utilities", "torchmetrics")

#: Private names of torch, by which objects of torch are known apart from Lightning's; and why there is no public one.
TORCH = {
    "_C": "the switch that turns `__torch_function__` off has its class there, as torch's guide to subclasses has it",
    "_abort_process_group": "aborts the groups of NCCL together, where torch has it",
    "_base": "whether a tensor is a view of a parameter",
    "_backward_hooks": "whether a tensor has hooks that a new one would need",
    "_buffers": "buffers of one layer under all their names; `named_buffers` leaves shared ones out",
    "_cdata": "what tells storages apart",
    "_custom_op_handlers": "where a `DTensor` may answer an operation in another way; nothing public does",
    "_device": "the type of device of a `GradScaler`",
    "_distributed_c10d": "where the flight recorder is read, if it is there",
    "_dump_fr_trace_json": "the flight recorder, if torch has one: what ranks wait for",
    "_engine_run_backward": "what `torch.autograd.backward` calls after its checks, if it can be called",
    "_flat_weights": "by which recurrent layers are known, which have a list of their parameters",
    "_foreach_norm": "one kernel for many tensors, where torch has it",
    "_forward_hooks": "hooks of this package on a layer, which do not belong to the user's step",
    "_forward_pre_hooks": "whether a layer has hooks that a placeholder must not run",
    "_indices": "of a sparse tensor that is not coalesced",
    "_is_param": "marks a tensor of another class as an `nn.Parameter`, as the constructor of that class does",
    "_is_view": "whether an in-place change reaches another tensor",
    "_iterator": "the persistent workers of a `DataLoader`",
    "_load_from_state_dict": "whether a layer loads in a way of its own",
    "_load_state_dict_pre_hooks": "hooks that change a state dict must see that of the whole module",
    "_local_scalar_dense": "the operator that reads a number of a tensor, as `float(...)` does",
    "_local_tensor": "of a `DTensor`, without an entry in the graph",
    "_make_wrapper_subclass": "the documented way to make a tensor that has no storage",
    "_metadata": "versions of layers, an attribute of state dicts",
    "_modules": "children of one layer under all their names; `named_children` leaves shared ones out",
    "_op_dispatcher": "of the class `DTensor`: holds the former",
    "_parameters": "parameters of one layer under all their names; `named_parameters` leaves shared ones out",
    "_pg_registry": "the groups that a `DeviceMesh` keeps alive, where it does",
    "_profiler_enabled": "whether names of ranges would be seen, where torch tells",
    "_resolve_process_group": "the ranks of a group that the flight recorder names, if torch tells",
    "_scale": "whether a `GradScaler` has been initialized",
    "_scaled_dot_product_flash_attention": "attention with its logsumexp, if it agrees with products of matrices",
    "_scaled_dot_product_flash_attention_backward": "likewise",
    "_scaled_dot_product_flash_attention_for_cpu": "likewise",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "likewise",
    "_schema": "the signature of an operator",
    "_spec": "of a `DTensor`: mesh, placements and whole shape",
    "_step_supports_amp_scaling": "whether a fused optimizer unscales gradients by itself",
    "_timeout": "of the options of NCCL's groups; the argument beside them must be the same",
    "_values": "of a sparse tensor that is not coalesced",
    "_version": "whether a tensor was changed in place",
}
#: Of these, names that objects of Lightning have too: the one file that may use them.
ONLY_IN = {"_iterator": "trainer/dataloader.py"}
#: Names of attributes that are no secrets of a library.
OTHERS = {
    "_current_frames": "the documented function of `sys` that says where every thread is",
    "_exit": "the documented function of `os` that ends a process at once",
    "_fields": "the public name of the fields of named tuples",
    "_getframe": "the documented function of `sys` that says who calls",
    "_replace": "the public name of the method of named tuples",
    "_shared_input": "a mark of this package on tensors",
    "_tp_plan": "the plan that a model of transformers has of itself; its public name may be another thing elsewhere",
}
_BY_STRING = {"getattr", "setattr", "hasattr", "delattr"}
_OF_DICTS = {"get", "pop", "setdefault"}


def violations(root: Path) -> list[str]:
    """Everything private of Lightning and torchmetrics that a package names, as ``file:line: what``.

    A name is taken for theirs if it begins with one underscore and is imported from them; if it is an attribute of
    another object than ``self`` and the same file defines none of that name; or if it is an attribute of ``self`` that
    no file of the package defines, and so is inherited. Private names of torch are listed in ``TORCH``, members of
    Lightning's strategies in the seam itself. An attribute that is named by a string is an attribute.

    Args:
        root: The folder of the package.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    defined = {path: set(_defined(tree)) for path, tree in trees.items()}
    anywhere = set().union(*defined.values())
    found = []
    for path, tree in trees.items():
        if path.relative_to(root).as_posix() == SEAM:
            continue
        complaints = list(_imports(tree))
        for node, owner, name in attributes(tree):
            known = anywhere | STRATEGY_MEMBERS.keys() if owner in ("self", "cls", "super()") else defined[path]
            of_torch = name in TORCH and ONLY_IN.get(name) in (None, path.relative_to(root).as_posix())
            if name not in known | OTHERS.keys() and not of_torch:
                complaints.append((node.lineno, f"{owner}.{name} is private; write a function in {SEAM}"))
        found += [f"{path.relative_to(root.parent)}:{line}: {text}" for line, text in sorted(set(complaints))]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (module + alias.name for alias in node.names):
            parts = name.split(".")
            if parts[0] in LIBRARIES and any(map(_is_private, parts)):
                yield node.lineno, f"private import {name}; write a function in {SEAM}"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes, fields, and attributes that are assigned to ``self``; class variables too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _text(node.value) in _OWN:
            yield node.attr
        elif isinstance(node, ast.Assign) and any(_text(target) == "__slots__" for target in node.targets):
            yield from (str(text.value) for text in ast.walk(node.value) if isinstance(text, ast.Constant))


def attributes(tree: ast.Module) -> Iterator[tuple[ast.expr, str, str]]:
    """Private attributes that are used: the place, what has them, and their names."""
    for node in ast.walk(tree):
        found: tuple[ast.expr, ast.expr | None] | None = None
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node, _text(node.value), node.attr
        elif isinstance(node, ast.Call):
            function, arguments = node.func, node.args
            if isinstance(function, ast.Name) and function.id in _BY_STRING and len(arguments) > 1:
                found = arguments[0], arguments[1]
            elif isinstance(function, ast.Attribute) and function.attr in _OF_DICTS and arguments:
                owner = _owner_of_dict(function.value)
                found = None if owner is None else (owner, arguments[0])
            elif _text(function).split(".")[-1] == "attrgetter" and arguments:
                found = function, arguments[0]
        elif isinstance(node, ast.Subscript):
            owner = _owner_of_dict(node.value)
            found = None if owner is None else (owner, node.slice)
        if found is not None and isinstance(found[1], ast.Constant) and isinstance(found[1].value, str):
            names = filter(_is_private, found[1].value.split("."))
            yield from ((found[0], _text(found[0]), name) for name in names)


def _owner_of_dict(node: ast.expr) -> ast.expr | None:
    """``x`` of ``vars(x)`` and ``x.__dict__``."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and _text(node.func) == "vars" and node.args:
        return node.args[0]
    return None


_OWN = ("self", "cls")


def _text(node: ast.expr) -> str:
    return ast.unparse(node)
