"""The undivided optimizers: their parameters by name, whatever this rank's optimizers hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.distributed.dtensor import distribute_like
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder

__all__ = ["OptimizerStates"]

_State = dict[str, Any]


class OptimizerStates:
    """Remembers the groups of each optimizer as the user made them, and gives and takes states by name.

    A state *by name* is what ``optimizer.state_dict()`` is, with names of parameters for their numbers: it means the
    same on every rank, and wherever it is loaded::

        {"state": {"body.0.weight": {"exp_avg": ..., "step": ...}, ...},
         "param_groups": [{"params": ["body.0.weight", ...], "lr": 0.1, ...}, ...]}

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._groups: dict[int, list[list[nn.Parameter]]] = {}
        self._param_names: dict[int, list[list[str] | None]] = {}
        self._kept: dict[int, list[list[nn.Parameter]]] = {}

    def strip(self, optimizer: Optimizer) -> None:
        """Take the placeholders out of an optimizer; groups stay, even if nothing is left in them.

        Args:
            optimizer: As the user made it, over all parameters.
        """
        self._groups[id(optimizer)] = [list(group["params"]) for group in optimizer.param_groups]
        self._param_names[id(optimizer)] = [group.get("param_names") for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            kept = [index for index, parameter in enumerate(group["params"]) if not is_placeholder(parameter)]
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][index] for index in kept]
        for parameter in [parameter for parameter in optimizer.state if is_placeholder(parameter)]:
            del optimizer.state[parameter]
        self._kept[id(optimizer)] = [group["params"] for group in optimizer.param_groups]

    def group_names(self, optimizer: Optimizer) -> list[dict[str, list[str]]]:
        """What names the parameters of each group of the undivided optimizer.

        Args:
            optimizer: One that was stripped.

        Returns:
            For each group the names in the module as ``"params"``, and ``"param_names"`` if the optimizer has them.
        """
        groups, own_names = self._whole_groups(unwrap(optimizer))
        return [
            {"params": names} | ({"param_names": own} if own else {})
            for names, own in zip(self._named(groups), own_names, strict=True)
        ]

    def state(self, optimizer: Optimizer) -> _State:
        """The state by name of what this rank holds, divided as the parameters are; the groups whole.

        Args:
            optimizer: One that was stripped. One that is none, as Lightning has where nothing is optimized, has no
                state.
        """
        optimizer = unwrap(optimizer)
        local = optimizer.state_dict()
        if "param_groups" not in local:
            return local
        names = self._names_of(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {names[id(parameters[number])]: value for number, value in local["state"].items()}
        groups = [
            {**group, **names} for group, names in zip(local["param_groups"], self.group_names(optimizer), strict=True)
        ]
        return {**local, "state": state, "param_groups": groups}

    def held(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """The optimizer's parameters that live here, by name."""
        optimizer = unwrap(optimizer)
        names = self._names_of(optimizer)
        return {names[id(each)]: each for group in optimizer.param_groups for each in group["params"]}

    def load(self, optimizer: Optimizer, saved: Mapping[str, Any], *, clone: bool = False) -> None:
        """Take this rank's part of a state by name.

        Args:
            optimizer: The optimizer.
            saved: By name; tensors are whole, or divided as the parameters are.
            clone: Whether tensors may belong to a file, so that the optimizer gets copies.

        Raises:
            ValueError: If the groups are not those of this optimizer.
        """
        if "param_groups" not in saved:
            return
        optimizer = unwrap(optimizer)
        if self._has_other_groups(optimizer):
            self.strip(optimizer)
        _check_groups([group["params"] for group in saved["param_groups"]], self._named(self._groups_of(optimizer)))
        names = self._names_of(optimizer)
        local, groups, count = {}, [], 0
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for index, parameter in enumerate(group["params"], start=count):
                values = saved["state"].get(names[id(parameter)])
                if values is not None:
                    values = cloned(values) if clone else values
                    local[index] = {key: distribute_like(value, parameter) for key, value in values.items()}
            end = count + len(group["params"])
            part = {**saved_group, "params": list(range(count, end))}
            groups.append({**part, "param_names": group["param_names"]} if "param_names" in group else part)
            count = end
        optimizer.load_state_dict({**saved, "state": local, "param_groups": groups})

    def by_name(self, optimizer: Optimizer, numbered: Mapping[str, Any]) -> _State:
        """The ordinary state of an undivided optimizer, by name.

        Raises:
            ValueError: If its groups have other numbers of parameters than this optimizer's.
        """
        if "param_groups" not in numbered:
            return dict(numbered)
        optimizer = unwrap(optimizer)
        if self._has_other_groups(optimizer):
            self.strip(optimizer)
        groups = numbered["param_groups"]
        whole = self._named(self._groups_of(optimizer))
        if [len(group["params"]) for group in groups] != [len(group) for group in whole]:
            raise ValueError(
                f"The checkpoint's optimizer has parameter groups of {[len(group['params']) for group in groups]}"
                f" parameters, this one of {[len(group) for group in whole]}. Configure it as it was when it was saved."
            )
        names = {
            number: name
            for group, own in zip(groups, whole, strict=True)
            for number, name in zip(group["params"], own, strict=True)
        }
        state = {names[number]: values for number, values in numbered["state"].items()}
        return {
            **numbered,
            "state": state,
            "param_groups": [{**group, "params": own} for group, own in zip(groups, whole, strict=True)],
        }

    def _has_other_groups(self, optimizer: Optimizer) -> bool:
        """Whether groups were replaced since they were stripped: finetuning makes those of the run it resumes."""
        kept = self._kept.get(id(optimizer), [])
        now = [group["params"] for group in optimizer.param_groups[: len(kept)]]
        return len(now) < len(kept) or any(mine is not old for mine, old in zip(now, kept, strict=True))

    def _whole_groups(self, optimizer: Optimizer) -> tuple[list[list[nn.Parameter]], list[list[str] | None]]:
        """The parameters, and their names where the optimizer has them, of each group; also of groups added later."""
        groups = self._groups.get(id(optimizer), [])
        added = [list(group["params"]) for group in optimizer.param_groups[len(groups) :]]
        names = self._param_names.get(id(optimizer), [])
        return groups + added, names + [group.get("param_names") for group in optimizer.param_groups[len(names) :]]

    def _groups_of(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        return self._whole_groups(optimizer)[0]

    def _named(self, groups: list[list[nn.Parameter]]) -> list[list[str]]:
        """Names for parameters; those that the module does not know are numbered."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        numbers = itertools.count()
        return [[names.get(id(each)) or f"unnamed.{next(numbers)}" for each in group] for group in groups]

    def _names_of(self, optimizer: Optimizer) -> dict[int, str]:
        """The name of each parameter of the optimizer, by the parameter's identity."""
        groups = self._groups_of(optimizer)
        pairs = zip(groups, self._named(groups), strict=True)
        return {id(each): name for group, names in pairs for each, name in zip(group, names, strict=True)}


def numbered(named: Mapping[str, Any]) -> _State:
    """A state by name as torch writes it: with numbers in the order of the groups."""
    if "param_groups" not in named:
        return dict(named)
    names = [name for group in named["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: values for name, values in named["state"].items()}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
    return {**named, "state": dict(sorted(state.items())), "param_groups": groups}


def cloned(tree: Any) -> Any:
    """A tree of dicts and lists with tensors of its own: those of a file that is mapped change with the file."""
    if isinstance(tree, dict):
        return {key: cloned(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [cloned(value) for value in tree]
    return tree.clone() if isinstance(tree, Tensor) else tree


def _check_groups(saved: list[list[str]], own: list[list[str]]) -> None:
    if [set(group) for group in saved] == [set(group) for group in own]:
        return
    missing = sorted({name for group in saved for name in group} - {name for group in own for name in group})
    new = sorted({name for group in own for name in group} - {name for group in saved for name in group})
    raise ValueError(
        f"The checkpoint's optimizer has parameter groups of {list(map(len, saved))} parameters, this one of"
        f" {list(map(len, own))}. Only the checkpoint has {missing[:5]}, only this optimizer {new[:5]}. Configure it as"
        " it was when it was saved."
    )


def unwrap(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, whatever Lightning has wrapped around it."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
