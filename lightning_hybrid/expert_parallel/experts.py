"""The search for modules whose parameters have a row for each expert.

`ModuleParallelizer` calls :func:`find_experts` with ``HybridStrategy(expert_parallel_size=...)``. Modules are found by
their parameters and by the arguments of their forward, as transformers writes them, and never by the name of a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from torch import nn

from lightning_hybrid.tensor_parallel.experts import is_experts


def find_experts(module: nn.Module, num_ranks: int, axis: str = "data") -> dict[str, nn.Module]:
    """Return the modules with experts that can be sharded over some ranks, by name.

    Args:
        module: The user's module.
        num_ranks: The number of ranks.
        axis: The axis of the ranks: ``"data"`` or ``"tensor"``.

    Raises:
        ValueError: If there are none, if the number of experts is not divisible by the number of ranks, or if a
            parameter is shared by several modules.
    """
    found = {name: part for name, part in module.named_modules() if is_experts(part)}
    size_argument = "tensor_parallel_size" if axis == "tensor" else "expert_parallel_size"
    argument = f"{size_argument}={num_ranks}" + (" with expert_parallel='tensor'" if axis == "tensor" else "")
    if not found:
        raise ValueError(
            f"{argument} shards experts, but {type(module).__name__} has no module with experts that can be sharded."
            " Such a module has an attribute `num_experts`, parameters whose first dimension is `num_experts`, and"
            " forward(self, hidden_states, top_k_index, top_k_weights). Change the experts to this form, or remove"
            f" {'expert_parallel' if axis == 'tensor' else size_argument}. [LH143]"
        )
    for name, part in found.items():
        if part.num_experts % num_ranks:
            raise ValueError(
                f"{argument} does not divide the number of experts of {name!r}, which is {part.num_experts}. Set"
                f" {size_argument} to a divisor of the number of experts. [LH144]"
            )
    _check_shared(module, found)
    return found


def expert_sizes(module: nn.Module, num_replicas: int) -> list[int]:
    """Return the possible values of `expert_parallel_size`: 1, and divisors of each number of experts and of replicas.

    Args:
        module: The user's module.
        num_replicas: The number of replicas.
    """
    numbers = [part.num_experts for part in module.modules() if is_experts(part)]
    most = math.gcd(num_replicas, *numbers) if numbers else 1  # type: ignore[arg-type]
    return [size for size in range(1, most + 1) if most % size == 0]


def experts_text(found: Mapping[str, nn.Module], num_ranks: int) -> str:
    """Return the log message about the modules whose experts are sharded.

    Args:
        found: The result of :func:`find_experts`.
        num_ranks: The number of ranks.
    """
    numbers = Counter(int(part.num_experts) for part in found.values())  # type: ignore[arg-type]
    parts = [
        f"{modules} module{'s' * (modules > 1)} with {experts // num_ranks} of {experts} experts on each rank"
        for experts, modules in sorted(numbers.items())
    ]
    return f"expert_parallel_size={num_ranks}: {', '.join(parts)} ({next(iter(found))}{', ...' * (len(found) > 1)})"


def _check_shared(module: nn.Module, found: dict[str, nn.Module]) -> None:
    """Raise an error if a parameter of experts has several names."""
    owner_of: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        earlier = owner_of.setdefault(id(parameter), name)
        owners = {each.rpartition(".")[0] for each in (name, earlier)}
        if earlier != name and owners & set(found):
            raise ValueError(
                f"The parameters {earlier!r} and {name!r} are the same, so their experts cannot be sharded."
                " Give each module experts of its own, or do not shard experts. [LH145]"
            )
