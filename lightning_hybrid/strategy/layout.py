"""Layout of a module: its stages, its tensor-parallel plan and its recomputed layers, found without processes.

`ModuleParallelizer` applies the results of these functions to the module, and the `plan` command prints them.
`HybridStrategy` and `Run` call :func:`is_cut`. The dry runs in `tuning` and `check` find the same layout in one
process. So nothing here communicates, and results depend only on the module and the arguments.

The *body* is the set of layers that a pipeline splits into stages. It is a *chain*, an `nn.Sequential` that the step
calls as a whole, or a set of *units*, which are layers that any code may call. Its layers are grouped in *rows*, which
stay on one stage, such as a layer and its frozen copy. To *trace* a step is to run its code on fake tensors and record
its calls. A *stage map* assigns tensors to stages; a *placement* assigns stages to pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_hybrid.axes import Sizes
from lightning_hybrid.config import Settings, UserPlan
from lightning_hybrid.data_parallel.zero.shard_module import listed_layers
from lightning_hybrid.distributed.arrangement import arrange
from lightning_hybrid.distributed.dtensor import is_tensor_parallel
from lightning_hybrid.expert_parallel.experts import find_experts
from lightning_hybrid.memory.activation_checkpoint.policy import chosen_layers, is_by_name
from lightning_hybrid.pipeline_parallel.body import Body, find_body
from lightning_hybrid.pipeline_parallel.links.step_schedules import find_placement, find_schedule
from lightning_hybrid.pipeline_parallel.partition import STAGE_MARK, numbered, partition
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.pipeline_parallel.timeline import simulate
from lightning_hybrid.strategy.summary import (
    layout_text,
    outside_parts,
    outside_text,
    plan_rows,
    plan_table,
    ranks_of_stages,
    stage_holders,
    stage_rows,
    stage_table,
)
from lightning_hybrid.tensor_parallel.layouts.layout import stage_axes
from lightning_hybrid.tensor_parallel.plan import Plan, make_plan

# A warning is shown if a larger fraction of the parameters is outside the body.
_LARGEST_REST = 0.2
# Around units, smaller parameters, as a fraction of all parameters, stay on every stage.
_LEAST_SHARE = 1e-3


def is_cut(config: Settings, sizes: Sizes, module: nn.Module) -> bool:
    """Return True if the strategy runs the steps, and not Lightning.

    It does so with several stages, several microbatches, tensor or context parallelism, or `microbatch_weight`.

    Args:
        config: The arguments of the strategy.
        sizes: The number of ranks along each axis.
        module: The user's module.
    """
    return max(sizes.tensor, sizes.context) > 1 or runs_backward(config, sizes, module)


def runs_backward(config: Settings, sizes: Sizes, module: nn.Module) -> bool:
    """Return True if the strategy calls backward: with stages, several microbatches or `microbatch_weight`.

    Otherwise, a step can call backward itself, with manual optimization. See :func:`is_cut` for the arguments.
    """
    weighs = getattr(module, "microbatch_weight", None) is not None
    return max(sizes.pipeline, config.num_microbatches) > 1 or weighs


def describe(module: LightningModule, settings: Settings, sizes: Sizes, hosts: Sequence[str] = ()) -> str:
    """Return the layout, the table of stages and the tensor-parallel plan as text.

    Args:
        module: The full user's module.
        settings: The settings.
        sizes: The number of ranks along each axis.
        hosts: The node of each rank; empty if the text should not contain nodes.

    Raises:
        ValueError, TypeError: The same errors as at the start of training.
    """
    body, stage_map = _find_stages_if_any(module, settings, sizes.pipeline)
    plan = None if sizes.tensor == 1 else find_plan(module, settings, sizes.tensor)
    text = stages_text(module, settings, sizes, body, with_plan(stage_map, body, plan, module), hosts=hosts)
    return text if plan is None else f"{text}\n{plan_table(plan, module)}"


def outline(module: LightningModule, settings: Settings, sizes: Sizes, num_nodes: int) -> dict[str, Any]:
    """Return the content of :func:`describe` as numbers, strings, lists and dictionaries, for programs.

    Args:
        module: The full user's module.
        settings: The settings.
        sizes: The number of ranks along each axis.
        num_nodes: The number of nodes, each with the same number of consecutive ranks.

    Raises:
        ValueError, TypeError: The same errors as at the start of training.
    """
    body, stage_map = _find_stages_if_any(module, settings, sizes.pipeline)
    schedule = find_schedule(settings, sizes.pipeline, settings.num_microbatches)
    plan = None if sizes.tensor == 1 else find_plan(module, settings, sizes.tensor)
    expected = expect_outside(module, with_plan(stage_map, body, plan, module))
    stages = [] if body is None else stage_rows(module, body.layers, expected)
    held = ranks_of_stages(sizes, settings.axis_order)
    of_node = sizes.num_ranks // num_nodes
    return {
        **sizes.by_argument,
        "schedule": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": schedule.num_chunks,
        "bubble": simulate(schedule).bubble,
        "body": None if body is None else body.name,
        "stages": [
            asdict(row)
            | {
                "layers": list(row.layers),
                "num_parameters": row.num_parameters,
                "ranks": held[row.rank],
                "nodes": sorted({rank // of_node for rank in held[row.rank]}),
            }
            for row in stages
        ],
        "tensor_parallel_plan": [] if plan is None else plan_rows(plan),
    }


def _find_stages_if_any(module: LightningModule, settings: Settings, num_ranks: int) -> tuple[Body | None, StageMap]:
    if num_ranks > 1:
        return find_stages(module, settings, num_ranks)
    return None, StageMap.uncut()


def find_stages(
    module: LightningModule, settings: Settings, num_ranks: int, body: Body | None = None
) -> tuple[Body, StageMap]:
    """Return the body, and the assignment of its layers to stages.

    Args:
        module: The user's module.
        settings: The settings.
        num_ranks: The number of pipeline ranks.
        body: The body for this number of stages, if it is known.

    Raises:
        ValueError: If the module has no body, if the body has fewer layers than the pipeline has stages, or if
            `pipeline_stage` attributes contradict each other or `partition`.
        TypeError: If the body cannot be split.
    """
    placement = find_placement(settings, num_ranks)
    num_stages = placement.num_stages
    body = body or find_layers(module, settings, num_stages)
    weights = _weights(module, settings, body)
    ends = [0, *accumulate(body.rows)]
    of_rows = [sum(weights[first:end]) for first, end in pairwise(ends)]
    marked = _marked_stages(module, settings, body)
    rows = partition(settings.partition, of_rows, num_stages) if marked is None else _numbered(marked, body, num_stages)
    stages = tuple(range(ends[row.start], ends[row.stop]) for row in rows)
    return body, _stage_map(module, settings, body, stages, placement)


def _marked_stages(module: nn.Module, settings: Settings, body: Body) -> list[int] | None:
    """Return the stage of each row of layers, if the user has set `pipeline_stage` of layers or of their containers.

    Modules outside the layers may also have this attribute. They are on the stages that use them.

    Raises:
        ValueError: If the attribute is set but a layer has none, if parts of a layer or a layer and its copy have
            different stages, or if `partition` is set too.
    """
    named = ((name, part) for name, part in module.named_modules(remove_duplicate=False) if name)
    found: dict[str, Any] = {name: getattr(part, STAGE_MARK, None) for name, part in named}
    marks = {name: mark for name, mark in found.items() if mark is not None}
    if not marks:
        return None
    of_layers = [next((marks[path] for path in _path_up(name) if path in marks), None) for name in body.names]
    of_parts: dict[str, Any] = dict(zip(body.names, of_layers, strict=True))
    for name, mark in marks.items():
        if any(mark != of_parts[path] for path in _path_up(name) if path in of_parts):
            raise ValueError(
                f"{name!r} is a part of a layer of {body.name!r}, but has a different `pipeline_stage` than this layer."
                " A layer cannot be on several stages. Set `pipeline_stage` only for whole layers, or list the modules"
                " that the pipeline should split: HybridStrategy(body=[...]). [LH322]"
            )
    if None in of_layers:
        raise ValueError(
            f"{body.names[of_layers.index(None)]!r} in {body.name!r} has no `pipeline_stage`, but {next(iter(marks))!r}"
            " has one. Set it either for all pipelined layers (or their containers) or for none of them. Alternatively,"
            " list only the layers that have it: HybridStrategy(body=[...]). [LH320]"
        )
    if settings.partition != "uniform":
        raise ValueError(
            f"partition={settings.partition!r} and the `pipeline_stage` of the layers of {body.name!r} both assign"
            " layers to stages. Remove one of them. [LH321]"
        )
    ends = [0, *accumulate(body.rows)]
    for first, end in pairwise(ends):
        if len(set(of_layers[first:end])) > 1:
            raise ValueError(
                f"{' and '.join(map(repr, body.names[first:end]))} are a layer and its copy. They must be on the same"
                f" stage, but their pipeline_stage is {of_layers[first:end]}. Set the same stage for all of them."
                " [LH323]"
            )
    return [of_parts[body.names[first]] for first in ends[:-1]]


def misplaced_text(module: nn.Module, stage_map: StageMap) -> str | None:
    """Return a warning about modules outside the layers whose `pipeline_stage` differs from their actual stage.

    Args:
        module: The user's module.
        stage_map: The stages of the module's parameters, after the first batch has placed them.

    Returns:
        The warning; ``None`` if all stages are correct.
    """
    wrong = []
    for name, part in module.named_modules():
        mark = getattr(part, STAGE_MARK, None)
        holds_layers = any(layer.startswith(f"{name}.") for layer in stage_map.layers)
        if mark is None or not name or holds_layers or not stage_map.is_outside(name):
            continue
        stages = {stage for inner, _ in part.named_parameters(prefix=name) for stage in stage_map.stages_of(inner)}
        if stages and mark not in stages:
            wrong.append(f"{name!r} ({STAGE_MARK} {mark}, used on stage {' and '.join(map(str, sorted(stages)))})")
    if not wrong:
        return None
    return (
        "`pipeline_stage` has no effect on modules outside the pipelined layers. These modules are on the stages that"
        f" use them: {', '.join(wrong)}. To choose their stages, list them together with the layers, in the order in"
        " which they are called: HybridStrategy(body=[...])."
    )


def _path_up(name: str) -> list[str]:
    """Return a dotted name and the names of its containers, from the inside to the outside."""
    return [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]


def _numbered(marked: Sequence[int], body: Body, num_stages: int) -> list[range]:
    try:
        return numbered(marked, len(marked), num_stages)
    except (ValueError, TypeError) as error:
        raise type(error)(f"`pipeline_stage` of the layers of {body.name!r}: {error}") from None


def _stage_map(
    module: nn.Module, settings: Settings, body: Body, stages: tuple[range, ...], placement: Placement
) -> StageMap:
    is_chain = body.chain is not None
    around = StageMap(body.name, body.names, stages, placement, is_chain=is_chain)
    return replace(around, places_outside=not is_chain or _traces_chain(module, settings, around))


def _traces_chain(module: nn.Module, settings: Settings, stage_map: StageMap) -> bool:
    """Return True if steps are traced around a chain.

    They are traced if the chain has parameters around it, and if one trace is valid for all steps.
    """
    if settings.dynamic_shapes or not stage_map.body:
        return False
    return any(stage_map.is_outside(name) for name, _ in module.named_parameters())


def _weights(module: nn.Module, settings: Settings, body: Body) -> list[int]:
    """Return the number of parameters that each layer adds to its stage, including parameters expected outside it."""
    number = len(body.layers)
    alone = _stage_map(
        module, settings, body, tuple(range(at, at + 1) for at in range(number)), Placement.in_turns(number)
    )
    held = [{id(parameter): parameter.numel() for parameter in layer.parameters()} for layer in body.layers]
    beside = _expected_use(module, alone)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for at in beside.get(name, ()):
            held[at][id(parameter)] = parameter.numel()
    return [sum(counts.values()) for counts in held]


def find_layers(module: LightningModule, settings: Settings, num_stages: int) -> Body:
    """Return the body that the user names, by the argument `body` or by the module's `pipeline_body`.

    Otherwise, the body is an `nn.Sequential` with most of the parameters, or the layers in lists.

    Args:
        module: The user's module.
        settings: The settings.
        num_stages: The number of stages.

    Raises:
        ValueError: If the module has no body.
        TypeError: If the body cannot be split.
    """
    wanted = settings.body or getattr(module, "pipeline_body", None)
    says_stages = not isinstance(settings.partition, str) or any(hasattr(each, STAGE_MARK) for each in module.modules())
    return find_body(module, wanted, num_stages, spreads=not says_stages)


def find_frames(module: LightningModule, settings: Settings, num_stages: int, body: Body | None = None) -> list[str]:
    """Return the names of the modules that contain the body.

    Args:
        module: The user's module.
        settings: The settings.
        num_stages: The number of stages.
        body: The body, if it is known.

    Returns:
        The names, with ``""`` for the module itself, which is always included. They are equal on all ranks. If there is
        no body, only ``""``.
    """
    try:
        body = body or find_layers(module, settings, num_stages)
    except (ValueError, TypeError):
        return [""]
    holders = {name.rsplit(".", count)[0] for name in body.names for count in range(1, name.count(".") + 1)}
    return ["", *sorted(holders)]


def find_own_layers(module: nn.Module, body: Body | None, stage_map: StageMap, rank: int) -> dict[int, list[nn.Module]]:
    """Return the layers of each stage of a pipeline rank; without stages, the layers in the module's layer lists.

    Args:
        module: The user's module.
        body: The body; ``None`` with one stage.
        stage_map: The assignment of parameters to stages.
        rank: The pipeline rank.
    """
    if body is None:
        return {0: list(listed_layers(module))}
    own = stage_map.placement.stages_of(rank)
    return {stage: [body.layers[index] for index in stage_map.stages[stage]] for stage in own}


def find_outside(
    module: nn.Module, stage_map: StageMap, used: Mapping[str, Collection[int]]
) -> dict[str, frozenset[int]]:
    """Return the parameters outside the body that must move to the stages that use them.

    Parameters that no stage uses stay where they are, because a later step may use them: around a chain on the first
    and the last stage, around units on every stage. Around units, small parameters also stay on every stage.

    Args:
        module: The user's module.
        stage_map: The assignment of parameters to stages.
        used: The stages that use each parameter, by one of its names.

    Returns:
        The new stages of each parameter that leaves a stage, by name.
    """
    total = sum(parameter.numel() for parameter in module.parameters())
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        # Around a chain, the first and last stage would sum the gradient of a small parameter in each step.
        leaves = stage_map.is_chain or parameter.numel() >= _LEAST_SHARE * total
        if leaves and stage_map.is_outside(name):
            names.setdefault(id(parameter), []).append(name)
    outside: dict[str, frozenset[int]] = {}
    for tied in names.values():
        stages = {stage for name in tied for stage in used.get(name, ())}
        if stages and stages != stage_map.stages_of(tied[0]):
            outside |= dict.fromkeys(tied, frozenset(stages))
    return outside


def expect_outside(module: nn.Module, stage_map: StageMap) -> StageMap:
    """Return the stage map with the expected places of parameters outside the body, before the first training batch.

    Args:
        module: The user's module.
        stage_map: The assignment of parameters to stages. Known places outside the body are kept.
    """
    if stage_map.outside or not stage_map.places_outside:
        return stage_map
    return replace(stage_map, outside=find_outside(module, stage_map, _expected_use(module, stage_map)))


def _expected_use(module: nn.Module, stage_map: StageMap) -> dict[str, frozenset[int]]:
    """Return the stages that are expected to use each parameter outside the body, by each of its names.

    Around a chain that is not traced, these are the first and the last stage. Otherwise, modules are expected to be
    called in the order in which they are registered. A parameter is expected on the stage of the next unit, and after
    the last unit on the last stage. An embedding between two stacks is thus on the stage of the second stack. Only load
    balance depends on this.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    inside = {id(parameter) for name, parameter in named if not stage_map.is_outside(name)}
    next_ones = frozenset((len(stage_map.stages) - 1,))
    used: dict[str, frozenset[int]] = {}
    for name, parameter in reversed(named):
        if not stage_map.is_outside(name):
            next_ones = stage_map.stages_of(name)
        elif id(parameter) not in inside:  # a second name of a layer's parameter is not a use of the layer
            used[name] = next_ones if stage_map.places_outside else stage_map.stages_of(name)
    return used


def find_recomputed(
    module: LightningModule, settings: Settings, body: Body | None, stage_map: StageMap
) -> list[nn.Module]:
    """Return the layers of all stages that are recomputed in backward, from the argument `recompute`.

    Args:
        module: The user's module.
        settings: The settings.
        body: The body; ``None`` with one stage.
        stage_map: The assignment of parameters to stages.

    Raises:
        ValueError, TypeError: If no layers match, or if the module has no body to choose layers from.
    """
    if settings.recompute is False:
        return []
    stages = stage_map.stages
    if body is None and not is_by_name(settings.recompute):
        body = find_layers(module, settings, 1)
        stages = (range(len(body.layers)),)
    return chosen_layers(settings.recompute, module, body, stages)


def requested_plan(module: LightningModule, settings: Settings) -> UserPlan | str | None:
    """Return the user's plan, from the argument of the strategy or from the module's `tensor_parallel_plan`.

    The result is ``"auto"`` if the plan is to be found automatically, and ``None`` if no layer is to be sharded. The
    module's `tensor_parallel_plan` may be a function of the user, which this calls.
    """
    hook = getattr(module, "tensor_parallel_plan", None)
    if settings.tensor_parallel_plan != "auto" or hook is None:
        return settings.tensor_parallel_plan
    found: UserPlan | str | None = hook() if callable(hook) else hook
    return found


def find_plan(module: LightningModule, settings: Settings, size: int) -> Plan:
    """Return the tensor-parallel plan for `size` ranks. To find an automatic plan, blocks of the module are tried out.

    Raises:
        ValueError: If layers cannot be sharded as the user requests.
    """
    requested = requested_plan(module, settings)
    experts = find_experts(module, size, "tensor") if settings.expert_parallel == "tensor" else ()
    return make_plan(
        module,
        requested,
        size,
        sequence_parallel=settings.sequence_parallel,
        arrangement=arrange(settings.tensor_parallel_mode, size, settings.tensor_parallel_depth),
        axes=stage_axes(settings.axis_order),
        experts=experts,
    )


def with_plan(stage_map: StageMap, body: Body | None, plan: Plan | None, module: LightningModule) -> StageMap:
    """Return the stage map for a plan: steps are not traced if a chain has tensor-parallel layers outside of it.

    Args:
        stage_map: The assignment of parameters to stages for the module alone.
        body: The body; ``None`` with one stage.
        plan: The tensor-parallel plan; ``None`` without tensor parallelism.
        module: The user's module.

    Raises:
        ValueError: If the plan cannot be combined with the body.
    """
    if body is None or plan is None:
        return stage_map
    if body.chain is None:
        _check_units(plan, module, body)
        return stage_map
    divided = _tensor_parallel(module)
    inside = all(name.startswith(f"{body.name}.") for name in (*divided, *(row.name for row in plan.rows)))
    return replace(stage_map, places_outside=stage_map.places_outside and inside)


def fits_units(plan: Plan, module: LightningModule, body: Body) -> bool:
    """Return True if the layers of a body may be units although a plan shards them.

    Args:
        plan: The tensor-parallel plan.
        module: The user's module.
        body: The body.
    """
    try:
        _check_units(plan, module, body)
    except ValueError:
        return False
    return True


def _tensor_parallel(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if is_tensor_parallel(parameter)]


def _check_units(plan: Plan, module: LightningModule, body: Body) -> None:
    """Check that each layer returns the same in a trace, where layers run without the other ranks, as in a step."""
    rows = tuple(f"{row.name}." for row in plan.rows)
    divided = [name for name in _tensor_parallel(module) if not name.startswith(rows)]  # the plan may have been applied
    text = f"tensor_parallel_size={plan.size} cannot be combined with a pipeline for {type(module).__name__},"
    text += f" whose layers in {body.name!r} are called by your own code: "
    if plan.torch_styles or divided:
        raise ValueError(
            f"{text}{[*plan.torch_styles, *divided][0]!r} is sharded by torch's own API. Use a style name in"
            " `tensor_parallel_plan` instead, or put the layers into one `nn.Sequential`. [LH325]"
        )
    for row in plan.rows:
        if any(unit.startswith(f"{row.name}.") for unit in body.names):
            raise ValueError(
                f"{text}{row.name!r}, which has the style {row.style!r} in `tensor_parallel_plan`, contains some of"
                " these layers. Set a style for each of these layers instead. [LH326]"
            )
        passes_on = not (row.options.get("scatter_input", True) and row.options.get("gather_output", True))
        if row.kind == "sequence_region" and passes_on and not any(row.name.startswith(f"{n}.") for n in body.names):
            raise ValueError(
                f"{text}{row.name!r} and its neighbor in an `nn.Sequential` pass sequence shards to each other, because"
                " of sequence_parallel. Put the layers into an `nn.ModuleList`, or call the whole `nn.Sequential` and"
                " pass only its name as `body`. [LH327]"
            )


def stages_text(
    module: nn.Module,
    settings: Settings,
    sizes: Sizes,
    body: Body | None,
    stage_map: StageMap,
    *,
    is_placed: bool = False,
    num_microbatches: int | None = None,
    hosts: Sequence[str] = (),
) -> str:
    """Return the sizes, the schedule and, with a body, the table of stages as text.

    Args:
        module: The user's module, with or without placeholders.
        settings: The settings.
        sizes: The number of ranks along each axis.
        body: The body; ``None`` with one stage.
        stage_map: The assignment of parameters to stages.
        is_placed: True if a step has been traced, so that the stages of parameters outside layers are known.
        num_microbatches: The number of microbatches of an actual batch, which may have fewer samples than microbatches
            are requested; ``None`` for the number in the settings.
        hosts: The node of each rank. The table contains them if there are several.
    """
    schedule = find_schedule(settings, sizes.pipeline, num_microbatches or settings.num_microbatches)
    line = layout_text(sizes, schedule, bubble=simulate(schedule).bubble)
    if body is None:
        return line
    shown = stage_map if is_placed else expect_outside(module, stage_map)
    is_estimate = shown is not stage_map
    if is_estimate:
        where = "stages are estimated until the first training batch"
    elif stage_map.places_outside:
        where = "on the stages that use them in the first training batch"
    else:
        where = "on the first and the last stage, with summed gradients"
    rows = stage_rows(module, body.layers, shown)
    holders = stage_holders(sizes, settings.axis_order, hosts) if len(set(hosts)) > 1 else ()
    table = stage_table(rows, body.name, is_estimate=is_estimate, holders=holders)
    return "\n".join(filter(None, [line, table, outside_text(module, body.layers, where)]))


def fragment_text(module: nn.Module, body: Body) -> str | None:
    """Return a warning if the body has too few of the module's parameters; ``None`` otherwise.

    Embeddings, and linear layers over their vocabulary, do not count as outside the body.

    Args:
        module: The user's module.
        body: The body.
    """
    sizes = {part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)}
    parts = [
        (name, count)
        for name, count in outside_parts(module, body.layers)
        if not isinstance(part := module.get_submodule(name), nn.Embedding)
        and not (isinstance(part, nn.Linear) and part.out_features in sizes)
    ]
    total = sum(parameter.numel() for parameter in module.parameters())
    if sum(count for _, count in parts) <= _LARGEST_REST * total:
        return None
    largest = sorted(parts, key=lambda entry: -entry[1])[:5]
    shares = ", ".join(f"{name!r} ({100 * count / total:.0f}%)" for name, count in largest)
    return (
        f"{100 * sum(count for _, count in parts) / total:.0f}% of the parameters of {type(module).__name__} are"
        f" outside the pipelined layers {body.name!r}: {shares}. Several stages store these parameters and repeat their"
        " computation. If the pipeline should split some of these modules too, list all layers of the pipeline:"
        " HybridStrategy(body=[...])."
    )
