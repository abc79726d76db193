"""Parameters that are unsharded together, with one all-gather for each dtype, device and group of replicas.

`ZeroParameters` makes a group for each layer, and a root group for the other parameters. A `Prefetcher` calls the
groups of layers in order. One all-gather for each parameter would be slower, and one for the whole model would need the
memory of all parameters at once. A parameter is *unsharded* while it has the values of all rows, and *resharded* when
only the rows of this replica are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import Work

from lightning_hybrid.data_parallel.zero.param import ShardedParameter
from lightning_hybrid.distributed.process_group import all_gather_single


class ParameterGroup:
    """The parameters of a layer, or of no single layer (the root group). They are either all unsharded or all sharded.

    Parameters with which layers compute without a gather, such as experts of one replica, take part in everything else.

    ::

        unshard_async()         starts the all-gather           does not wait: the previous layer computes meanwhile
        wait_for_unshard()      waits for the shards, and copies them into the unsharded parameters
        release()               not needed for now              resharded, unless memory is kept
        reshard()               the optimizer has changed the shards, or this replica skips the layer

    Args:
        parameters: The parameters.
        keeps_memory: If True (ZeRO stages 1 and 2), unsharded parameters always have memory, and `ZeroParameters`
            registers them when a step begins. If False (stage 3), they have memory, and are registered, only while they
            are unsharded. Between steps, shards are registered in both cases.

    Attributes:
        keeps_memory: True if unsharded parameters always have memory.
        is_unsharded: True if the unsharded values are up to date.
        in_backward: True while a backward passes through the layer, if layers are resharded after each forward;
            otherwise always False. `ZeroParameters` sets it, and :meth:`release` resets it.
    """

    copies_out: ClassVar[bool] = False
    """True while gathered values are copied into parameters. The user's step does not make these writes, so a rehearsal
    (`trainer.losses.rehearsal.Untouched`) does not record them."""

    def __init__(self, parameters: Sequence[ShardedParameter], *, keeps_memory: bool) -> None:
        self.parameters = list(parameters)
        self.is_unsharded = self.in_backward = False
        self.keeps_memory = keeps_memory
        kinds: dict[object, list[ShardedParameter]] = {}
        for parameter in [each for each in parameters if each.is_gathered]:
            kind = parameter.flat.dtype, parameter.flat.device, id(parameter.groups)
            kinds.setdefault(kind, []).append(parameter)
        self._kinds = list(kinds.values())
        self._in_flight: list[tuple[list[ShardedParameter], Tensor, Work]] = []

    @torch.no_grad()
    def unshard_async(self) -> None:
        """Start to gather the shards, unless the gather has started, or the parameters are unsharded.

        All replicas must call this in the same order of groups.
        """
        if self.is_unsharded or self._in_flight:
            return
        for parameters in self._kinds:
            group = parameters[0].groups.group
            own = torch.cat([parameter.all_gather_input() for parameter in parameters])
            shards = own.new_empty(group.size() * own.numel())
            work = all_gather_single(shards, own, group=group, async_op=True)
            self._in_flight.append((parameters, shards.view(group.size(), -1), work))

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Wait until all values are in place. Start the gather if it has not started."""
        if self.is_unsharded:
            return
        self.unshard_async()
        for parameters, shards, work in self._in_flight:
            work.wait()
            sizes = [parameter.rows.padded_numel for parameter in parameters]
            ParameterGroup.copies_out = True
            try:
                for parameter, gathered in zip(parameters, torch.split(shards, sizes, 1), strict=True):
                    parameter.copy_out(gathered)
            finally:
                ParameterGroup.copies_out = False
        self._in_flight.clear()
        self.is_unsharded = True
        if not self.keeps_memory:  # otherwise `ZeroParameters.open` has registered them
            self.to_unsharded()

    def release(self) -> None:
        """Free memory that is not kept, because the values are not needed for now."""
        self.in_backward = False
        if not self.keeps_memory:
            self.reshard()

    def reshard(self) -> None:
        """Mark the values as not needed or out of date, and free memory that is not kept."""
        if self._in_flight:  # no layer has waited for them
            self.wait_for_unshard()
        if self.is_unsharded and not self.keeps_memory:
            self.to_sharded()  # a parameter without memory must not be found
            for parameter in self.parameters:
                parameter.update_shard()
                parameter.free()
        self.is_unsharded = False

    def to_unsharded(self) -> None:
        """Register the unsharded parameters, for layers."""
        for parameter in self.parameters:
            parameter.to_unsharded()

    def to_sharded(self) -> None:
        """Register the shards, for all other code."""
        for parameter in self.parameters:
            parameter.to_sharded()

    def abandon(self) -> None:
        """Drop collectives in flight after a failure. Parameters keep their state."""
        self._in_flight.clear()
