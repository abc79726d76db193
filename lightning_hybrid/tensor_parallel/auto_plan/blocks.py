"""Multilayer perceptrons and attentions as users and libraries write them: found by names, shapes and heads, and tried.

A block is divided only if a copy of it gives the same in shards (`trial`): names alone prove nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.tensor_parallel.auto_plan.builder import PlanBuilder
from lightning_hybrid.tensor_parallel.auto_plan.trial import Block, Finding, try_blocks
from lightning_hybrid.tensor_parallel.styles import is_conv1d

#: Layers that take a block's input, and the one that takes what is made of them.
_MLPS = (
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("wi",), "wo"),
    (("wi_0", "wi_1"), "wo"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("fc1_g", "fc1_x"), "fc2"),
    (("intermediate.dense",), "output.dense"),
)
#: The projections of an attention, and the one that leads out of it; several in one weight have one name.
_ATTENTIONS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "proj"),
    (("q", "k", "v"), "o"),
    (("q", "k", "v"), "proj"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("attention.query", "attention.key", "attention.value"), "output.dense"),
    (("qkv",), "proj"),
    (("c_attn",), "c_proj"),
    (("qkv_proj",), "out_proj"),
    (("query_key_value",), "dense"),
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size")
# Arguments with values for each head.
_OF_HEADS = ("bias", "alibi", "relative", "rel_pos")


@dataclass(frozen=True)
class _Found:
    """A block and what its trial has found."""

    name: str
    core: nn.Module
    finding: Finding


def add_blocks(builder: PlanBuilder, known: Collection[str]) -> None:
    """Plan for the blocks of a module that are known by their names, and that give the same in shards.

    Args:
        builder: The plan that they go into.
        known: Layers that others know how to divide.
    """
    tried: dict[Any, Finding] = {}
    attentions: list[_Found] = []
    for part in builder.layers:
        for name, columns, row in _named(builder, part, _MLPS, known):
            host = builder.layers[name]
            _add(builder, name, _tried(host, _mlp(host, columns, row), builder.size, tried))
        for name, columns, row in _named(builder, part, _ATTENTIONS, known):
            host = builder.layers[name]
            ways = _attention(host, columns, row, builder.size)
            finding = ways if isinstance(ways, Finding) else _tried(host, ways, builder.size, tried)
            attentions.append(_Found(name, host.get_submodule(_core_path(columns)), finding))
    for found in _with_equal_heads(attentions):
        _add(builder, found.name, found.finding)


def _named(
    builder: PlanBuilder, name: str, patterns: Any, known: Collection[str]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """The block whose linear layers a module has: the first pattern that fits, unless others know the layers.

    The block is what is called: a container that has no `forward` is a part of it.
    """
    for columns, row in patterns:
        paths = [join_names(name, path) for path in (*columns, row)]
        if not all(path in builder.layers and _is_linear(builder.layers[path]) for path in paths):
            continue
        host = name
        while host and not _is_called(builder.layers[host]):
            host = host.rpartition(".")[0]
        if host and host not in builder.reasons and not {*paths} & {*known, *builder.plan, *builder.reasons}:
            *columns, row = (path.removeprefix(f"{host}.") for path in paths)
            yield host, tuple(columns), row
        return


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleDict, nn.ModuleList))


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_conv1d(layer)


def _features(layer: Any) -> tuple[int, int]:
    """Of the input and of the output."""
    return (layer.nx, layer.nf) if is_conv1d(layer) else (layer.in_features, layer.out_features)


def _mlp(host: nn.Module, columns: tuple[str, ...], row: str) -> list[Block]:
    width, _ = _features(host.get_submodule(row))
    fits = all(_features(host.get_submodule(path))[1] == width for path in columns)
    return [Block(columns, row)] if fits else []


def _core_path(columns: tuple[str, ...]) -> str:
    return columns[0].rpartition(".")[0]


def _attention(host: nn.Module, columns: tuple[str, ...], row: str, size: int) -> list[Block] | Finding:
    """The ways to divide an attention's heads, most likely ones first; or why there is none."""
    core: Any = host.get_submodule(_core_path(columns))
    numbers = {name: value for name, value in vars(core).items() if type(value) is int}
    heads = [name for name in (*_HEADS, *_KEY_HEADS) if name in numbers]
    width, _ = _features(host.get_submodule(row))
    if not any(name in numbers for name in _HEADS):
        head_width = next((numbers[name] for name in _HEAD_WIDTHS if name in numbers), None)
        if not head_width:
            return Finding(reason="has no attribute that says how many heads there are")
        counts = {"heads": _features(host.get_submodule(columns[0]))[1] // head_width}
    else:
        counts = {name: numbers[name] for name in heads}
    for name, count in counts.items():
        if count % size:
            return Finding(reason=f"has {count} heads ({name}), which cannot be divided over {size} ranks")
    most = next(iter(counts.values()))
    widths = [name for name, number in numbers.items() if number == width and name not in heads]
    embeddings = tuple(
        join_names(_core_path(columns), name)
        for name, child in core.named_children()
        if isinstance(child, nn.Embedding) and child.embedding_dim == most
    )
    is_packed = len(columns) == 1 and _features(host.get_submodule(columns[0]))[1] == 3 * width
    block = Block(columns, row, core=_core_path(columns), heads=most, embeddings=embeddings)
    return [
        replace(block, column_style=style, attributes=attributes, is_narrow=is_narrow)
        for style in (("packed_colwise_3", "colwise") if is_packed else ("colwise",))
        for is_narrow in (False, True)
        for attributes in dict.fromkeys([tuple(heads), (*heads, *widths), ()])
    ]


def _tried(host: nn.Module, candidates: list[Block], size: int, tried: dict[Any, Finding]) -> Finding:
    """Try a block, unless one that is alike was tried before."""
    if not candidates:
        return Finding(reason="has layers whose features do not fit together")
    if any(isinstance(parameter, DTensor) for parameter in host.parameters()):
        return Finding(reason="is divided already")
    key = tuple(candidates), tuple(_signature(host))
    if key not in tried:
        tried[key] = try_blocks(host, candidates, size)
    return tried[key]


def _signature(host: nn.Module) -> Iterator[Any]:
    """What a block's code depends on: classes, shapes, and plain attributes but for the number of the layer."""
    of_torch = vars(nn.Module()).keys()
    for name, module in host.named_modules():
        yield name, type(module), module.extra_repr()
        for key, value in vars(module).items():
            if key not in of_torch and not key.endswith(("idx", "id", "index")):
                yield key, value if isinstance(value, (int, float, str, bool)) else id(value)
        for key, parameter in module._parameters.items():
            yield key, None if parameter is None else parameter.shape


def _with_equal_heads(attentions: list[_Found]) -> Iterator[_Found]:
    """Where an attention takes a bias for each head from another one of its class, all of them are divided, or none."""
    for found in attentions:
        family = [each.finding.block for each in attentions if type(each.core) is type(found.core)]
        has_bias = any(block is not None and block.embeddings for block in family)
        is_alone = not has_bias and not _takes_bias(found.core)
        if found.finding.block is None or is_alone or (has_bias and None not in family):
            yield found
        else:
            reason = "takes a bias for each head, which is made where heads are not divided"
            yield replace(found, finding=Finding(reason=reason))


def _takes_bias(core: nn.Module) -> bool:
    names = inspect.signature(core.forward).parameters
    return any(word in name for name in names for word in _OF_HEADS)


def _add(builder: PlanBuilder, name: str, finding: Finding) -> None:
    block = finding.block
    if block is None:
        builder.reasons.setdefault(name, finding.reason)
        return
    styles = [(path, style) for path, style in block.styles()]
    styles += [(path, "on_shards") for path in finding.on_shards]
    around: list[tuple[str, str]] = []
    if block.attributes:
        around.append((block.core, f"divide:{','.join(block.attributes)}"))
    if block.heads:
        around.append((block.core, f"mask_per_head:{block.heads}"))
    if block.is_narrow:
        takers = (path.removeprefix(f"{block.core}.") for path in block.columns)
        around.append((block.core, f"narrow_input:{','.join(takers)}"))
    if finding.draws:
        around.append(("", f"local_rng:{block.columns[-1]},{block.row}"))
    builder.add_block(name, [(join_names(name, path) if path else name, style) for path, style in (*styles, *around)])
