"""Effects of the operators in a call: random draws, reads of values, and writes in place.

The trace of a step (:class:`Discovery`) and :class:`CodeBefore` record these effects with :class:`Operators`.
`trainer.losses` uses the functions of this file. Effects are recorded for operators, below the torch functions that
user code calls, because the schema and the tags of an operator tell its effects; a torch function has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.modes import OperatorMode
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.torch_internals import PACK_SEQUENCE, operator_schema, storage_identity


@dataclass
class Seen:
    """The effects of the operators in a call.

    Attributes:
        draws: True if an operator has drawn random numbers from torch's generators.
        reads: True if an operator has read the values of a tensor, as `Tensor.item` does.
        shapes: True if an operator has made a tensor whose shape depends on values.
        written: The memory that operators have written; see :func:`memory_of`.
        statistics: The memory of running statistics of batch norms among `written`. They have no gradient.
        known: The known tensors of :meth:`Operators.watch`, and the tensors that were computed only from these, by
            their memory. In a result of :func:`run_on_zeros`: leaves of the result, by their position among its leaves.
    """

    draws: bool = False
    reads: bool = False
    shapes: bool = False
    written: set[int] = field(default_factory=set)
    statistics: set[int] = field(default_factory=set)
    known: dict[int, Tensor] = field(default_factory=dict)


#: The function that `tensor.data = value` calls. Other setters (`grad`, `requires_grad`) write no values.
SETS_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]

#: Operators that write their fourth and fifth argument if the sixth (`training`) is true; their schemas omit this.
BATCH_NORMS = frozenset(
    {torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm, torch.ops.aten.miopen_batch_norm}
)


_EFFECTS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Operators:
    """A record of the effects of the operators in a call."""

    def __init__(self) -> None:
        self._mode = OperatorMode(self._call)
        self._seen = Seen()

    @property
    def seen(self) -> Seen:
        """Return the effects since :meth:`watch` was entered last."""
        return self._seen

    @contextmanager
    def watch(self, known: Iterable[Tensor] = ()) -> Iterator[Seen]:
        """Record the effects of operators while entered, starting with none.

        Args:
            known: Tensors with known values. `Seen.known` then contains these, and the tensors that are computed only
                from these. It is cleared if an operator reads values of another tensor, or makes a shape that depends
                on them.
        """
        self._seen = Seen(known={memory_of(tensor): tensor for tensor in known})
        with self._mode:
            yield self._seen

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        seen = self._seen
        if computes_only(func) and not seen.known:
            return func(*args, **kwargs)
        seen.draws |= draws(func, args, kwargs)
        seen.reads |= torch.Tag.data_dependent_output in func.tags
        seen.shapes |= torch.Tag.dynamic_output_shape in func.tags and not _has_fixed_shape(func, args)
        seen.written |= {memory_of(tensor) for tensor in written_tensors(func, args, kwargs)}
        if func.overloadpacket in BATCH_NORMS and args[5]:
            seen.statistics |= {memory_of(each) for each in args[3:5] if _is_tensor(each)}
            seen.written |= seen.statistics
        result = func(*args, **kwargs)
        if seen.known:
            self._note_known(func, args, kwargs, result)
        return result

    def _note_known(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Update the known tensors after a call of an operator."""
        seen, operands = self._seen, [leaf for leaf in flatten((args, kwargs))[0] if _is_tensor(leaf)]
        if func.overloadpacket.__name__ == PACK_SEQUENCE:  # its batch sizes depend only on the lengths
            operands, result = operands[1:], result[1]
        if all(memory_of(each) in seen.known for each in operands) and not draws(func, args, kwargs):
            seen.known |= {memory_of(leaf): leaf for leaf in flatten(result)[0] if _is_tensor(leaf)}
        elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            seen.known.clear()  # all later results may depend on the values
        else:
            for each in (*flatten(result)[0], *written_tensors(func, args, kwargs)):
                if _is_tensor(each):
                    seen.known.pop(memory_of(each), None)


@cache
def computes_only(operator: Any) -> bool:
    """Return True if an operator never draws, writes or reads out values, and its result shape depends only on shapes.

    Args:
        operator: The operator, an overload of `torch.ops`.
    """
    return (
        not operator_schema(operator).is_mutable
        and operator.overloadpacket not in BATCH_NORMS
        and _EFFECTS.isdisjoint(operator.tags)
    )


def written_tensors(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes according to its schema; see also :data:`BATCH_NORMS`."""
    if not operator_schema(operator).is_mutable:
        return []
    given = _given(operator, args, kwargs)
    written = [
        given.get(argument.name)
        for argument in operator_schema(operator).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in flatten(written)[0] if _is_tensor(leaf)]


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of the memory of a tensor, fake or not. A view has the identifier of its base."""
    return storage_identity(tensor.untyped_storage())


def num_bytes(tensor: Tensor) -> int:
    """Return the size of the values of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _given(operator: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by their names."""
    return dict(zip([argument.name for argument in operator_schema(operator).arguments], args, strict=False)) | kwargs


def draws(operator: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if an operator draws random numbers. Attention without dropout does not, although it has the tag."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    dropout = [argument for argument in operator_schema(operator).arguments if argument.name == "dropout_p"]
    return not dropout or _given(operator, args, kwargs).get("dropout_p", dropout[0].default_value) != 0


def _has_fixed_shape(operator: Any, args: Any) -> bool:
    """Return True if an operator with the tag for dynamic shapes has a known result shape: indexing without masks."""
    if operator is not torch.ops.aten.index.Tensor:
        return False
    return not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
