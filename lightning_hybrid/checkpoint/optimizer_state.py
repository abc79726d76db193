"""States of the full optimizers by the names of their parameters, while ranks have only local parameters.

torch numbers the parameters in an optimizer's state. These numbers depend on the parameters of a rank, so states of
different ranks could not be combined. `HybridStrategy` calls :meth:`OptimizerStates.drop_placeholders` after
`configure_optimizers`. `Checkpointer` and its two formats (:mod:`~.full`, :mod:`~.sharded`) call the other methods when
a checkpoint is saved or loaded. No function here communicates.

A *placeholder* replaces a parameter of another stage on this rank. The user makes a *full optimizer*, over all
parameters and placeholders; after that, the optimizer has only the parameters of this rank. A *group* is an entry of
`Optimizer.param_groups`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.tree_paths import cloned
from lightning_hybrid.distributed.dtensor import distribute_like
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder

_State = dict[str, Any]
# Options of parameter groups that torch, Lightning or schedulers add, so that they do not identify an optimizer.
_ADDED = {"params", "param_names", "initial_lr", "swa_lr", "foreach", "fused", "maximize", "capturable"}
_ADDED |= {"differentiable", "amsgrad", "decoupled_weight_decay"}
_FINETUNING = "internal_optimizer_metadata"  # the key under which `BaseFinetuning` saves groups
# The entries of a parameter group with one value per parameter: "params", and "param_names" if present.
_Group = dict[str, list[Any]]


class OptimizerStates:
    """The parameter groups of each optimizer as the user made them, with conversions of states by name.

    A state *by name* is the result of ``optimizer.state_dict()``, with names of parameters instead of their numbers. It
    has the same meaning on every rank and under every layout::

        {"state": {"body.0.weight": {"exp_avg": ..., "step": ...}, ...},
         "param_groups": [{"params": ["body.0.weight", ...], "lr": 0.1, ...}, ...]}

    Args:
        module: The user's module, with placeholders for tensors of other stages.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._full_groups: dict[int, list[_Group]] = {}
        self._local_params: dict[int, list[list[nn.Parameter]]] = {}
        # Names of parameters that are no longer in the module, by the identity of the parameter.
        self._earlier: dict[int, str] = {}

    def drop_placeholders(self, optimizer: Optimizer) -> None:
        """Remove the placeholders from an optimizer. Groups stay, even if they become empty.

        Args:
            optimizer: The user's optimizer, over all parameters.
        """
        self._full_groups[id(optimizer)] = [_by_parameter(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            is_local = [not is_placeholder(parameter) for parameter in group["params"]]
            group.update(
                {key: list(itertools.compress(values, is_local)) for key, values in _by_parameter(group).items()}
            )
        for parameter in [parameter for parameter in optimizer.state if is_placeholder(parameter)]:
            del optimizer.state[parameter]
        self._local_params[id(optimizer)] = [group["params"] for group in optimizer.param_groups]

    def replace_with_placeholders(self, optimizer: Optimizer, placeholders: Mapping[int, Tensor]) -> None:
        """Remove parameters that have moved to another stage from this rank's optimizer, with their states.

        Args:
            optimizer: An optimizer whose placeholders were dropped.
            placeholders: The placeholders of these parameters, by the identities of the parameters.
        """
        optimizer = self._up_to_date(_unwrap(optimizer))
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in placeholders]:
            del optimizer.state[parameter]
        for group, full in zip(optimizer.param_groups, self._groups_of(optimizer), strict=True):
            group.update({**full, "params": [placeholders.get(id(each), each) for each in full["params"]]})
        self.drop_placeholders(optimizer)

    def remember_names(self, optimizers: Sequence[Optimizer]) -> None:
        """Remember the names of the optimizers' parameters before other parameters replace them in the module.

        `AttachedModule.gather` calls this, so that a checkpoint can still be saved after it.

        Args:
            optimizers: Optimizers whose placeholders were dropped.
        """
        self._earlier = {
            id(parameter): name
            for optimizer in map(_unwrap, optimizers)
            if isinstance(optimizer, Optimizer)
            for group, names in zip(self._groups_of(optimizer), self._names_of(optimizer), strict=True)
            for parameter, name in zip(group["params"], names, strict=True)
        }

    def group_names(self, optimizer: Optimizer) -> list[dict[str, list[str]]]:
        """Return the names of the parameters in each group of the full optimizer.

        Args:
            optimizer: An optimizer whose placeholders were dropped.

        Returns:
            For each group, the names in the module as ``"params"``, and ``"param_names"`` if the optimizer has them.
        """
        optimizer = _unwrap(optimizer)
        groups = zip(self._groups_of(optimizer), self._names_of(optimizer), strict=True)
        return [{**group, "params": names} for group, names in groups]

    def fill_finetuning(self, checkpoint: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
        """Complete the optimizer groups that `BaseFinetuning` saves with the names of all parameters.

        Args:
            checkpoint: The Trainer's checkpoint. The checkpoint and the callbacks' values are not changed.
            trainer: The Trainer.

        Returns:
            The checkpoint with full groups.
        """
        states = dict(checkpoint.get("callbacks", {}))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = states.get(callback.state_key)
            if isinstance(callback, BaseFinetuning) and isinstance(state, dict) and _FINETUNING in state:
                full = {
                    number: [
                        {**group, **names}
                        for group, names in zip(groups, self.group_names(trainer.optimizers[number]), strict=False)
                    ]
                    for number, groups in state[_FINETUNING].items()
                }
                states[callback.state_key] = {**state, _FINETUNING: full}
        return {**checkpoint, "callbacks": states} if states else checkpoint

    def state(self, optimizer: Optimizer) -> _State:
        """Return the state by name of the parameters on this rank, sharded like the parameters, with the full groups.

        Args:
            optimizer: An optimizer whose placeholders were dropped; or Lightning's replacement for no optimizer, which
                has no state.
        """
        optimizer = _unwrap(optimizer)
        local = optimizer.state_dict()
        if "param_groups" not in local:
            return local
        names = [name for name, _ in self._local_of(optimizer)]
        groups = zip(local["param_groups"], self.group_names(optimizer), strict=True)
        return {
            **local,
            "state": {names[number]: value for number, value in local["state"].items()},
            "param_groups": [group | full for group, full in groups],
        }

    def local_parameters(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Return the optimizer's parameters on this rank, by name."""
        return dict(self._local_of(_unwrap(optimizer)))

    def load(self, optimizer: Optimizer, saved: Mapping[str, Any], *, clone: bool = False) -> None:
        """Load this rank's part of a state by name.

        Args:
            optimizer: The optimizer, whose placeholders were dropped.
            saved: The state by name. Its tensors are full, or sharded like the parameters.
            clone: If True, tensors may belong to a file, so the optimizer receives copies.

        Raises:
            ValueError: If the groups do not match this optimizer, or another kind of optimizer saved the state.
        """
        if "param_groups" not in saved:
            return
        optimizer = self._up_to_date(optimizer)
        _check_kind(saved["param_groups"], optimizer)
        _check_groups([group["params"] for group in saved["param_groups"]], self._names_of(optimizer))
        local = {}
        for number, (name, parameter) in enumerate(self._local_of(optimizer)):
            if name in saved["state"]:
                values = saved["state"][name].items()
                local[number] = {key: _placed(value, parameter, clone=clone) for key, value in values}
        numbers = itertools.count()
        groups = [
            {**saved_group, **_by_parameter(group), "params": [next(numbers) for _ in group["params"]]}
            for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({**saved, "state": local, "param_groups": groups})

    def by_name(self, optimizer: Optimizer, numbered: Mapping[str, Any]) -> _State:
        """Convert an ordinary state of a full optimizer to a state by name.

        Args:
            optimizer: An optimizer whose placeholders were dropped.
            numbered: The result of ``state_dict()`` of an optimizer over all parameters.

        Raises:
            ValueError: If the numbers of parameters in its groups differ from this optimizer.
        """
        if "param_groups" not in numbered:
            return dict(numbered)
        groups, names = numbered["param_groups"], self._names_of(self._up_to_date(optimizer))
        if [len(group["params"]) for group in groups] != [len(group) for group in names]:
            raise ValueError(_mismatch([group["params"] for group in groups], names))
        renamed = [{**group, "params": own} for group, own in zip(groups, names, strict=True)]
        numbers = itertools.chain.from_iterable(group["params"] for group in groups)
        name_of = dict(zip(numbers, itertools.chain.from_iterable(names), strict=True))
        state = {name_of[number]: values for number, values in numbered["state"].items()}
        return {**numbered, "state": state, "param_groups": renamed}

    def _up_to_date(self, optimizer: Optimizer) -> Optimizer:
        """Return the user's optimizer, after dropping placeholders again if its groups were replaced.

        Finetuning replaces groups by the groups of the run that it resumes.
        """
        optimizer = _unwrap(optimizer)
        known = self._local_params.get(id(optimizer), [])
        now = [group["params"] for group in optimizer.param_groups[: len(known)]]
        if len(now) < len(known) or any(new is not old for new, old in zip(now, known, strict=True)):
            self.drop_placeholders(optimizer)
        return optimizer

    def _groups_of(self, optimizer: Optimizer) -> list[_Group]:
        """Return the groups of the full optimizer, including groups that were added later."""
        groups = self._full_groups.get(id(optimizer), [])
        return groups + [_by_parameter(group) for group in optimizer.param_groups[len(groups) :]]

    def _local_of(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Return the optimizer's parameters in its order, with their names."""
        pairs = zip(self._groups_of(optimizer), self._names_of(optimizer), strict=True)
        names = {id(each): name for group, own in pairs for each, name in zip(group["params"], own, strict=True)}
        return [(names[id(each)], each) for group in optimizer.param_groups for each in group["params"]]

    def _names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of the parameters in each group. Parameters that are not in the module are numbered."""
        names = self._earlier | {id(parameter): name for name, parameter in self._module.named_parameters()}
        numbers = itertools.count()
        return [
            [names.get(id(each)) or f"unnamed.{next(numbers)}" for each in group["params"]]
            for group in self._groups_of(optimizer)
        ]


def numbered(named: Mapping[str, Any]) -> _State:
    """Convert a state by name to torch's format, with numbers in the order of the groups."""
    if "param_groups" not in named:
        return dict(named)
    names = [name for group in named["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: values for name, values in named["state"].items()}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
    return {**named, "state": dict(sorted(state.items())), "param_groups": groups}


def check_number(optimizers: Sequence[Any], states: Sequence[Any]) -> None:
    """Check that there are equally many optimizers and states.

    Raises:
        ValueError: If the numbers differ.
    """
    if len(optimizers) != len(states):
        raise ValueError(
            f"The checkpoint contains the states of {len(states)} optimizer(s), but `configure_optimizers` returns"
            f" {len(optimizers)}. Return the same number of optimizers as when the checkpoint was saved, or load only"
            " the weights. [LH906]"
        )


def _by_parameter(group: Mapping[str, Any]) -> _Group:
    return {key: list(group[key]) for key in ("params", "param_names") if key in group}


def _check_kind(saved: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise an error if both sides have options that the other lacks, beyond options that torch or schedulers add."""
    theirs, own = ({key for group in groups for key in group} - _ADDED for groups in (saved, optimizer.param_groups))
    if theirs - own and own - theirs:
        raise ValueError(
            f"The checkpoint was saved with an optimizer other than {type(optimizer).__name__}: its parameter groups"
            f" have the options {sorted(theirs - own)} instead of {sorted(own - theirs)}. Use the optimizer that the"
            " checkpoint was saved with. Alternatively, load only the weights: set"
            " HybridStrategy(initial_weights='...') and do not pass `ckpt_path`. [LH907]"
        )


def _check_groups(saved: list[list[str]], own: list[list[str]]) -> None:
    if [set(group) for group in saved] == [set(group) for group in own]:
        return
    in_saved, in_own = ({name for group in groups for name in group} for groups in (saved, own))
    raise ValueError(
        _mismatch(
            saved,
            own,
            f"Only the checkpoint contains the parameters {sorted(in_saved - in_own)[:5]}, and only the configured"
            f" optimizer contains the parameters {sorted(in_own - in_saved)[:5]}. ",
        )
    )


def _mismatch(saved: list[list[Any]], own: list[list[str]], difference: str = "") -> str:
    return (
        f"The parameter groups in the checkpoint have the sizes {list(map(len, saved))}, but the parameter groups of"
        f" the configured optimizer have the sizes {list(map(len, own))}. {difference}Use the same parameter groups as"
        " when the checkpoint was saved. [LH908]"
    )


def _placed(value: Any, parameter: nn.Parameter, *, clone: bool) -> Any:
    """Return the value that an optimizer keeps for a parameter: sharded like it, and a copy if `clone` is True."""
    placed = distribute_like(value, parameter)
    return cloned(value) if clone and placed is value else placed


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the user's optimizer without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
