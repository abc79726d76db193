"""Operations of torch in which each result depends on the same features, whatever their values are.

`trial` records the operations of a block with an :class:`OperationWatch`, and `straight_code` compares the calls in its
source with :data:`OPERATIONS`. No operation here reads a value to decide what to do, and each passes a NaN to all
results that depend on it. If a block calls only these operations, a trial with random values and NaN therefore shows
all dependencies. A list of allowed names is safer than a list of forbidden names, because torch adds operations.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import flatten

_OPERATORS = ("add", "sub", "mul", "truediv", "neg", "matmul", "pow")
#: Names of functions and methods that compute with values.
_VALUES = frozenset(
    {
        *(f"__{name}__" for name in _OPERATORS),
        *(f"__r{name}__" for name in _OPERATORS),
        *("add", "sub", "mul", "div", "true_divide", "neg", "pow", "rsub", "reciprocal", "square", "sqrt", "rsqrt"),
        *("exp", "sin", "cos", "tanh", "sigmoid", "relu", "gelu", "silu", "leaky_relu", "elu", "celu", "selu", "mish"),
        *("softplus", "softsign", "logsigmoid", "dropout", "softmax", "log_softmax"),
        *("normalize", "layer_norm", "rms_norm"),
        *("linear", "matmul", "bmm", "mm", "einsum", "scaled_dot_product_attention", "mean", "sum"),
    }
)
#: Names of operations that move values or change the shape. Their sizes may differ between ranks.
_SHAPES = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "swapaxes", "mT", "contiguous"),
        *("split", "chunk", "unbind", "unsqueeze", "cat", "stack", "clone", "detach", "float", "type_as"),
        *("__getitem__", "__iter__", "__len__", "shape", "size", "dim", "ndim"),
    }
)
#: The names of all known functions, methods and attributes.
OPERATIONS = _VALUES | _SHAPES


class OperationWatch:
    """A record of the calls of torch operations. A :class:`FunctionMode` calls it instead of each torch function.

    Attributes:
        calls: The names of calls that compute with values, each with its plain arguments (numbers, texts, dtypes).
        unknown: The name of the first operation that is not known; ``None`` if there is none.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Hashable, ...]]] = []
        self.unknown: str | None = None

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a call, and make it."""
        name = _name(func)
        if self.unknown is None and not _is_known(name, args, kwargs):
            self.unknown = name
        if name in _VALUES:
            self.calls.append((name, tuple(leaf for leaf in flatten((args, kwargs))[0] if _is_number(leaf))))
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """Return the name of an operation; for the getter of an attribute such as ``shape``, the name of the attribute."""
    name: str = getattr(func, "__name__", repr(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def _is_known(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name not in OPERATIONS or kwargs.get("out") is not None:
        return False
    # Indices with tensors are not known, because they select by value.
    return name != "__getitem__" or not any(isinstance(leaf, Tensor) for leaf in flatten(args[1])[0])


def _is_number(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype))
