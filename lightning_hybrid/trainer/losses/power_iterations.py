"""Spectral norm in microbatches: the power iteration advances once in a step, as with the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PowerIterations"]


class PowerIterations:
    """The singular vectors by which spectral norm divides weights: all microbatches of a step begin with the same ones.

    A forward in training mode iterates them (Miyato et al., "Spectral Normalization for Generative Adversarial
    Networks", 2018). Each microbatch does the iteration of the first one again, so all have the weight of the first,
    and so has a layer that is recomputed.

    Args:
        layers: By stage, where spectral norm is looked for.

    Attributes:
        stages: Those that have some.
    """

    def __init__(self, layers: Mapping[int, Iterable[nn.Module]]) -> None:
        found = {stage: list(_vectors(of_stage)) for stage, of_stage in layers.items()}
        self._vectors = {stage: vectors for stage, vectors in found.items() if vectors}
        self.stages = frozenset(self._vectors)
        self._first: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def begin(self, stage: int, microbatch: int) -> None:
        """Let a forward of a stage begin with the vectors of the first microbatch."""
        if stage not in self._vectors:
            return
        if microbatch == 0:
            self._first[stage] = [vector.clone() for vector in self._vectors[stage]]
        else:
            for vector, value in zip(self._vectors[stage], self._first[stage], strict=True):
                vector.copy_(value)


def _vectors(layers: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Find the buffers of both implementations of torch: a parametrization, and a hook before forwards."""
    for part in (part for layer in layers for part in layer.modules()):
        if hasattr(part, "n_power_iterations"):
            yield from (vector for name in ("_u", "_v") if isinstance(vector := getattr(part, name, None), Tensor))
        for hook in part._forward_pre_hooks.values():
            if hasattr(hook, "n_power_iterations"):
                name: Any = getattr(hook, "name", "weight")
                yield from (getattr(part, f"{name}_{kind}") for kind in "uv")
