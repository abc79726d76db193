"""A step whose control flow depends on results of layers: all stages run its code, and each layer runs on its stage.

An example is text generation: the next token is the result of the last layer, and the code then decides whether to
continue. Such a step cannot be traced, because a trace has no values. `FrameProgram` calls
:meth:`FrameCut.run_in_lockstep` for such evaluation steps, on all ranks of the model group. Only one stage computes at
a time, so steps that can be traced do not use it. Training steps cannot use it: no rank would have the full autograd
graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.taps import Hook, Tap, TappedCall, Taps, find_taps
from lightning_hybrid.distributed.tensor_metadata import METADATA, getters
from lightning_hybrid.pipeline_parallel.frame.changes import Arguments, kept_like
from lightning_hybrid.pipeline_parallel.frame.graph import DERIVATIVES, function_name
from lightning_hybrid.pipeline_parallel.frame.step_mode import StepMode
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder, written_operands

_DEVICE = getters("device")
_INTEGERS = torch.int64, torch.int32
_FEW = 1024  # references to tensors that only some ranks have, before dead ones are removed


class Exchange(Protocol):
    """The interface for sending a tree from one pipeline rank to all ranks of the model group.

    `trainer.layer_exchange.LayerExchange` implements it. All ranks of the model group make each call, in the same
    order; otherwise it raises a `DifferentStepsError`.
    """

    def __call__(self, owner: int, tree: Any = None) -> Any:
        """Return the tree of the owner, on every rank.

        Args:
            owner: The pipeline rank that sends.
            tree: The tree on the owner; ignored on other ranks.
        """

    def end(self, checksum: Tensor) -> None:
        """End a step on all ranks.

        Args:
            checksum: A scalar that must be equal on all ranks, on the device of this rank.
        """


class Lockstep(StepMode):
    """A mode that runs the user's step on all stages at once: each layer runs on its stage, which sends the result.

    ::

        stage 0    embed --.    layer 0 --.    (receives)    (receives)    argmax, and the next token
        stage 1    (receives)  (receives)  `-> layer 1 --.   head -------> argmax, and the next token

    The code around the layers has the same values as in one process, so it may stop at a token, draw a token, or call
    the layers again. A torch function that receives parameters that not all stages have is called on one stage that has
    them, and its result is sent. If no stage has all of them, their values are sent.

    If a layer stores a tensor in an object among its arguments, such as a key-value cache, the tensor stays on the
    stage of the layer. The other ranks get a tensor without values in its place. Tensors that code around the layers
    computes from it (reordered rows in beam search) stay on that stage too. Values that the code reads are sent.

    The caller has switched gradients off, so no backward runs. Each send is a collective operation of the model group.

    Args:
        exchange: Sends results between stages.
        rank: This pipeline rank.
        layers: The units that are pipelined layers, by position. Other units (pinned modules) are handled as code
            around the layers.
        ranks: The pipeline rank that computes each of these layers.
        holders: For each tensor that not all pipeline ranks have, by its `id()` on this rank: the tensor, and the ranks
            that have it.
        device: The device of this rank.
        random: Returns a context with a random stream of its own for a call that one stage makes, by a number: 1, 2,
            ... for calls of layers, -1, -2, ... for other calls.
        plain: Converts results of tensor-parallel layers to ordinary tensors.
        is_tensor_parallel: True if layers are tensor-parallel.

    Attributes:
        checksum: A checksum of the integers (tokens, positions) that layers, leaf modules and functions of parameters
            received on this rank; a scalar of dtype int64. :meth:`FrameCut.run_in_lockstep` compares it over the ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        layers: Sequence[nn.Module],
        ranks: Sequence[int],
        holders: Mapping[int, tuple[Tensor, frozenset[int]]],
        device: torch.device,
        *,
        random: Callable[[int], AbstractContextManager[None]],
        plain: Callable[[Any], Any],
        is_tensor_parallel: bool,
    ) -> None:
        super().__init__()
        self._exchange, self._rank, self._layers, self._ranks = exchange, rank, layers, ranks
        self._device, self._random, self._plain, self._is_tensor_parallel = device, random, plain, is_tensor_parallel
        self._holders = {key: (weakref.ref(tensor), held) for key, (tensor, held) in holders.items()}
        self._most = 2 * len(self._holders) + _FEW  # with more entries, dead references are removed
        self._num_layer_calls = self._num_other_calls = 0
        self.checksum = torch.zeros((), dtype=torch.int64, device=device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call of code around the layers.

        Raises:
            WrongUseError: If the function computes derivatives, or writes a parameter that not all stages have.
        """
        kwargs = kwargs or {}
        if func in METADATA:
            if func in _DEVICE and is_placeholder(args[0]):
                return self._device  # the device that the tensor would have
            return func(*args, **kwargs)
        if func in DERIVATIVES:
            raise WrongUseError(
                f"`{function_name(func)}` computes derivatives in a step in which the outputs of layers decide which"
                " layers are called. The layers are on several stages, so no rank has the full autograd graph. Compute"
                " derivatives inside one layer, or use a layout without a pipeline. [LH407]"
            )
        self.is_answering = True
        try:
            leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            if any(isinstance(leaf, nn.Parameter) for leaf in leaves):  # for example an embedding of tokens
                self._note(leaves)
            held = [leaf for leaf in leaves if self._held_by(leaf)]
            return self._call(func, args, kwargs, held) if held else func(*args, **kwargs)
        finally:
            self.is_answering = False

    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a layer on its stage, and the user's hooks inside it on every rank; call a pinned module on every rank.

        A hook that changes the output of its module is called only on the stage of the layer.
        """
        if index >= len(self._layers):  # its own calls are handled one by one
            return unit(*args, **kwargs)
        self._num_layer_calls += 1
        number = self._num_layer_calls  # equal for every layout
        taps = Taps(self._layers[index], find_taps(self._layers[index], of_torch=False))
        calls: list[TappedCall] = []

        def note(tap: Tap, hook: Hook, module: nn.Module, *given: Any) -> Any:
            """Call a hook, and record the call for the other ranks."""
            result = hook(module, *given)
            if result is None:  # a hook that changes the output only has to run here
                calls.append(TappedCall(tap, given))
            return result

        def run(*args: Any, **kwargs: Any) -> Any:
            with taps.calling(note):
                return unit(*args, **kwargs), calls

        with self.paused():
            self._note(flatten((args, kwargs))[0])
            args, kwargs = self._arrived(self._ranks[index], args, kwargs)
            result, tapped = self._share(self._ranks[index], number, run, args, kwargs)
        if tapped is not calls:
            taps.replay(tapped)
        return result

    def call_module(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a leaf module on a stage that has its parameters, and return its result on every rank.

        Raises:
            WrongUseError: If no stage has all of its parameters.
        """
        with self.paused():
            self._note(flatten((args, kwargs))[0])
            places = [held for each in module.parameters() if (held := self._held_by(each))]
            if not places:
                return forward(*args, **kwargs)
            common = frozenset.intersection(*places)
            if not common:
                raise WrongUseError(
                    f"The parameters of {name!r} are on different stages, so no stage can run this module. Set"
                    " `layer.pipeline_stage` so that these parameters are on the same stage. [LH415]"
                )
            return self._share_other(min(common), forward, *self._arrived(min(common), args, kwargs))

    def _held_by(self, tensor: Tensor) -> frozenset[int] | None:
        """Return the pipeline ranks that have the values of a tensor; ``None`` if all ranks have them."""
        entry = self._holders.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def _keep(self, tensors: Sequence[Tensor], held: frozenset[int]) -> None:
        """Note that only some pipeline ranks have the values of some tensors."""
        if len(self._holders) > self._most:
            self._holders = {key: entry for key, entry in self._holders.items() if entry[0]() is not None}
            self._most = 2 * len(self._holders) + _FEW
        self._holders |= {id(tensor): (weakref.ref(tensor), held) for tensor in tensors}

    # The following methods run while the mode is off.

    def _call(self, func: Any, args: Any, kwargs: Any, held: Sequence[Tensor]) -> Any:
        """Call a function of tensors that not all ranks have.

        ::

            no rank has all of them       their values are sent, and every rank makes the call
            parameters are among them     one rank makes the call, and sends the result
            values are read               their values are sent, and every rank makes the call
            otherwise                     the ranks that have them make the call, and keep the result

        Args:
            func: The function.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
            held: The tensors among the arguments that not all ranks have.
        """
        common = frozenset.intersection(*[places for each in held if (places := self._held_by(each))])
        if not common:
            args, kwargs = self._fetched(args, kwargs)
            return func(*args, **kwargs)
        if any(isinstance(each, nn.Parameter) for each in held):
            if any(map(self._held_by, written_operands(func, args, kwargs))):
                raise WrongUseError(
                    f"`{function_name(func)}` updates a parameter in a step in which the outputs of layers decide which"
                    " layers are called, but not all stages have the parameter. Update it in a hook, such as"
                    " `on_validation_batch_end`. [LH465]"
                )
            return self._share_other(min(common), func, args, kwargs)
        shapes = self._shapes_of(func, args, kwargs)
        if shapes is None:  # values are read, or shapes depend on values
            args, kwargs = self._fetched(args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs) if self._rank in common else shapes
        leaves = flatten(result)[0]
        self._keep([leaf for leaf in leaves if self._held_by(leaf) is None], common)
        return result

    def _shapes_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return tensors without values for the results of a function; ``None`` if the values of operands are needed.

        Values are needed if the function reads them, if the shape of its result depends on them, if the result is not
        only tensors, or if it writes a tensor that all ranks have.

        Every rank computes this, so that all ranks make the same decision.
        """
        if not all(map(self._held_by, written_operands(func, args, kwargs))):
            return None
        leaves, spec = flatten((args, kwargs))
        shaped = [_without_values(leaf) for leaf in leaves]
        given = {id(other): leaf for leaf, other in zip(leaves, shaped, strict=True)}
        try:
            made, made_spec = flatten(func(*unflatten(shaped, spec)[0], **unflatten(shaped, spec)[1]))
        except Exception:
            return None
        if not all(isinstance(leaf, Tensor) and leaf.is_meta for leaf in made):
            return None
        stands = [given.get(id(leaf), leaf) for leaf in made]
        return unflatten(
            [
                leaf if leaf is not other else kept_like(leaf.shape, leaf.stride(), leaf.dtype)
                for leaf, other in zip(stands, made, strict=True)
            ],
            made_spec,
        )

    def _arrived(self, owner: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call; fetch tensors that rank ``owner`` lacks, except tensors in containers."""

        def arrived(value: Any) -> Any:
            held = self._held_by(value) if isinstance(value, Tensor) else None
            return self._fetch(value) if held is not None and owner not in held else value

        return tuple(map(arrived, args)), {name: arrived(value) for name, value in kwargs.items()}

    def _fetched(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call, with the values of all tensors."""
        leaves, spec = flatten((args, kwargs))
        given = [self._fetch(leaf) if isinstance(leaf, Tensor) and self._held_by(leaf) else leaf for leaf in leaves]
        args, kwargs = unflatten(given, spec)
        return args, kwargs

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Return a tensor with its values, on every rank.

        Raises:
            WrongUseError: If the tensor is sharded over tensor-parallel ranks.
        """
        held = self._held_by(tensor)
        assert held is not None
        if self._is_tensor_parallel and not isinstance(tensor, nn.Parameter):
            raise WrongUseError(
                "Code around the layers reads a tensor that a layer stored in an object, such as a key-value cache."
                " However, this tensor is sharded over tensor-parallel ranks. Return it from the layer instead. [LH412]"
            )
        owner, is_here = min(held), self._rank == min(held)
        received: Tensor = self._exchange(owner, tensor.detach() if is_here else None)
        return tensor if is_here else received

    def _share_other(self, owner: int, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call that is not a call of a layer on one stage, and return its result on all stages."""
        self._num_other_calls += 1
        return self._share(owner, -self._num_other_calls, run, args, kwargs)

    def _share(self, owner: int, number: int, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call on one stage, and return its result on all stages.

        Args:
            owner: The pipeline rank that makes the call.
            number: The number of the call, for its random stream; negative unless it is a call of a layer.
            run: Makes the call.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
        """
        arguments = Arguments((args, kwargs))
        if self._rank == owner:
            arguments.watch(lambda tensor: self._held_by(tensor) is not None)
            with self._random(number):
                result = self._plain(run(*args, **kwargs))
            packed = arguments.pack(result)
            self._keep(packed.kept, frozenset({owner}))
            self._exchange(owner, (packed.payload, packed.tensors))
            return result
        payload, tensors = self._exchange(owner)
        result, kept = arguments.unpack(payload, tensors, self._device)
        self._keep(kept, frozenset({owner}))
        return result

    def _note(self, leaves: Sequence[Any]) -> None:
        """Add integer tensors that all ranks have to the checksum."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dtype in _INTEGERS and self._held_by(leaf) is None:
                places = torch.arange(1, leaf.numel() + 1, device=leaf.device)
                self.checksum = 31 * self.checksum + (leaf.flatten() * places).sum().to(self._device)


def _without_values(leaf: Any) -> Any:
    """Return an argument of a call, with the meta device in place of devices and meta tensors in place of tensors."""
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
