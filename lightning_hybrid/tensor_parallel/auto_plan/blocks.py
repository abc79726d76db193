"""Multilayer perceptrons and attentions of other libraries, found by layer names, shapes and numbers of heads.

:func:`auto_plan` calls :func:`add_blocks` once for a module, after plans of Hugging Face models have been read.

Names alone prove nothing. A block is sharded only if a copy gives the same results with shards (`trial`), and if its
code is known (`known_code`) or is proved to do only what the trial shows (`straight_code`, `operations`).

Terms: a *block* is a module that is called, with its *columns* (linear layers that take its input, and get a shard of
their output features) and its *row* (the linear layer that takes what the code computes from them). The *core* is the
module that has the number of heads, the block itself or a module in it. *Ways* or candidates are several possible plans
for one block, and a *finding* is the result of their trial. In code, *host* is the block as a module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.module_names import join_names, pattern_of
from lightning_hybrid.tensor_parallel.auto_plan.builder import PlanBuilder
from lightning_hybrid.tensor_parallel.auto_plan.forward_code import (
    READ_WIDTHS_BEHIND,
    InputUse,
    forward_source,
    input_use,
)
from lightning_hybrid.tensor_parallel.auto_plan.heads import HEADS, count_heads, indivisible_reason
from lightning_hybrid.tensor_parallel.auto_plan.known_code import changed_reason, unknown_reason
from lightning_hybrid.tensor_parallel.auto_plan.trial import Block, Finding, try_blocks
from lightning_hybrid.tensor_parallel.styles import is_conv1d

#: Names of the layers that take the input of a block, and of the layer that takes their results.
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
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("w_1",), "w_2"),
    (("dense_1",), "dense_2"),
    (("dense1",), "dense2"),
    (("linear_1",), "linear_2"),
    (("lin_1",), "lin_2"),
    (("fc_1",), "fc_2"),
    (("layer_1",), "layer_2"),
    (("fc_in",), "fc_out"),
    (("fc1_g", "fc1_x"), "fc2"),
    (("intermediate.dense",), "output.dense"),
)
#: Names of the projections of an attention, and of its output projection. Packed projections have one name.
_ATTENTIONS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "proj"),
    (("q", "k", "v"), "o"),
    (("q", "k", "v"), "proj"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("attention.query", "attention.key", "attention.value"), "output.dense"),
    (("query", "key", "value"), "out"),
    (("query", "key", "value"), "dense"),
    (("wq", "wk", "wv"), "wo"),
    (("w_q", "w_k", "w_v"), "w_o"),
    (("to_q", "to_k", "to_v"), "to_out"),
    (("qkv",), "proj"),
    (("qkv",), "out"),
    (("qkv",), "out_proj"),
    (("to_qkv",), "to_out"),
    (("c_attn",), "c_proj"),
    (("qkv_proj",), "out_proj"),
    (("qkv_proj",), "o_proj"),
    (("query_key_value",), "dense"),
)
#: Last parts of the names of output layers.
ROW_NAMES = frozenset({"out", *(row.rpartition(".")[2] for _, row in (*_MLPS, *_ATTENTIONS))})
_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size")
#: The attribute with which an attention of transformers only finds its place in a cache.
_NUMBER_OF_LAYER = "layer_idx"


def add_blocks(builder: PlanBuilder, known: Collection[str]) -> None:
    """Add the blocks of a module that have usual names and give the same results with shards.

    Args:
        builder: The builder, to which styles are added, or reasons why a block is not sharded.
        known: The names of layers that other plans contain, which are not used here.
    """
    tried: dict[Hashable, Finding] = {}
    notes: dict[str, _Note] = {}
    for part in builder.layers:
        for patterns, ways in ((_MLPS, _mlp), (_ATTENTIONS, _attention)):
            for name, columns, row in _named(builder, part, patterns, known):
                if name in builder.reasons and name not in notes:
                    continue
                host = builder.layers[name]
                found = ways(host, columns, row, builder.size)
                if isinstance(found, str):
                    builder.reasons.setdefault(name, found)
                    continue
                finding, reason = _tried(host, found, builder.size, tried), unknown_reason(host)
                if reason is not None:
                    reason = changed_reason(host) or _doubt(reason, finding)
                if reason is None:
                    _add(builder, name, finding)
                else:
                    notes.setdefault(name, _Note(reason)).add(builder, name, found, finding)
                    builder.reasons.setdefault(name, reason)
    builder.reasons.update({name: note.text() for name, note in notes.items()})


def _doubt(reason: str, finding: Finding) -> str | None:
    """Return the reason why a block with unknown code is not sharded; ``None`` if a trial left no doubt about it."""
    if finding.block is None:
        return reason
    return None if finding.doubt is None else f"{reason}; it {finding.doubt}"


class _Note:
    """The reason why a block with unknown code is not sharded, with entries that the user may write.

    Args:
        reason: The reason, as the end of a sentence.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._right: dict[str, str] = {}
        self._untested: dict[str, str] = {}
        self._findings: dict[str, None] = {}

    def add(self, builder: PlanBuilder, name: str, ways: list[Block], finding: Finding) -> None:
        """Add the finding about one part of the block, such as its attention.

        Args:
            builder: The builder of the plan.
            name: The name of the block.
            ways: The ways in which the part could be sharded.
            finding: The result of the trial.
        """
        host = builder.layers[name]
        if finding.block is not None:
            self._right |= _entries(builder, name, finding)
        elif finding.is_tested:
            advice = f" (it reads the full width of its input; to fix this, {READ_WIDTHS_BEHIND})"
            self._findings[finding.reason + (advice if _reads_whole_width(host, ways[0]) else "")] = None
        else:
            self._untested |= _entries(builder, name, Finding(_likely(host, ways)))
            self._findings[finding.reason] = None

    def text(self) -> str:
        """Return the full reason, as the end of a sentence."""
        check = "`lightning-hybrid check` compares the results of this plan with one process"
        reasons = " and ".join(self._findings)
        text = self._reason
        if self._right:
            text += (
                f". With random values, this plan gave the same results as the unsharded block: {self._right}; {check}"
            )
        if self._untested:
            text += f". A possible plan is {self._untested}. It is untested, because the block {reasons}; {check}"
        elif reasons:
            text += f". No plan is known for this block, because it {reasons}"
        return text


def _named(
    builder: PlanBuilder, name: str, patterns: Any, known: Collection[str]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the block that a module's linear layers form by the first matching pattern, unless a plan has its layers.

    The block is the module that is called. A container without a `forward` is a part of its parent.

    Args:
        builder: The builder of the plan.
        name: The name of a module.
        patterns: `_MLPS` or `_ATTENTIONS`.
        known: The names of layers that other plans contain.

    Yields:
        At most once: the name of the block, the paths of the columns, and the path of the row, relative to the block.
    """
    for columns, row in patterns:
        paths = [join_names(name, path) for path in (*columns, row)]
        if not all(path in builder.layers and _is_linear(builder.layers[path]) for path in paths):
            continue
        host = name
        while host and not _is_called(builder.layers[host]):
            host = host.rpartition(".")[0]
        if host and not {*paths} & {*known, *builder.plan, *builder.reasons}:
            *columns, row = (path.removeprefix(f"{host}.") for path in paths)
            yield host, tuple(columns), row
        return


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleDict, nn.ModuleList))


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_conv1d(layer)


def _features(layer: Any) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    return (layer.nx, layer.nf) if is_conv1d(layer) else (layer.in_features, layer.out_features)


def _mlp(host: nn.Module, columns: tuple[str, ...], row: str, size: int) -> list[Block] | str:
    """Return the only way to shard the features between two layers, in a list, or the reason why there is none."""
    width, _ = _features(host.get_submodule(row))
    if any(_features(host.get_submodule(path))[1] != width for path in columns):
        return "has layers whose feature sizes do not match"
    return [Block(columns, row)]


def _attention(host: nn.Module, columns: tuple[str, ...], row: str, size: int) -> list[Block] | str:
    """Return the ways to shard the heads of an attention, the most likely first, or the reason why there is none."""
    core_path = columns[0].rpartition(".")[0]
    core: Any = host.get_submodule(core_path)
    heads = count_heads(core)
    width, _ = _features(host.get_submodule(row))
    counts = heads
    if not heads.keys() & {*HEADS}:
        head_width = next((number for name in _HEAD_WIDTHS if type(number := vars(core).get(name)) is int), 0)
        if not head_width:
            return "has no attribute with the number of heads"
        counts = {"heads": width // head_width}
    reason = indivisible_reason(counts, size)
    if reason is not None:
        return reason
    most = next(iter(counts.values()))
    widths = [name for name, number in vars(core).items() if type(number) is int and number == width]
    embeddings = tuple(
        join_names(core_path, name)
        for name, child in core.named_children()
        if isinstance(child, nn.Embedding) and child.embedding_dim == most
    )
    is_packed = len(columns) == 1 and _features(host.get_submodule(columns[0]))[1] == 3 * width
    block = Block(columns, row, core=core_path, heads=most, embeddings=embeddings)
    return [
        replace(block, column_style=style, attributes=attributes, is_narrow=is_narrow)
        for style in (("packed_colwise_3", "colwise") if is_packed else ("colwise",))
        for is_narrow in (False, True)
        for attributes in dict.fromkeys([tuple(heads), tuple(dict.fromkeys((*heads, *widths))), ()])
    ]


def _tried(host: nn.Module, candidates: list[Block], size: int, tried: dict[Hashable, Finding]) -> Finding:
    """Return the finding about a block, from `tried` if an equal block has been tried already. `tried` grows."""
    if any(isinstance(parameter, DTensor) for parameter in host.parameters()):
        return Finding(reason="is already sharded")
    ignored = {_NUMBER_OF_LAYER} if candidates[0].heads else set()
    key = tuple(candidates), tuple(_signature(host, ignored))
    if key not in tried:
        tried[key] = try_blocks(host, candidates, size, is_known=unknown_reason(host) is None)
    return tried[key]


def _signature(host: nn.Module, ignored: Collection[str]) -> Iterator[Hashable]:
    """Yield what the code of a block depends on: classes, shapes, plain attributes, and the `id()` of other objects."""
    of_torch = vars(nn.Module()).keys()
    for name, module in host.named_modules():
        yield name, type(module)
        for key, value in vars(module).items():
            if key not in of_torch and key not in ignored:
                yield key, _plain(value)
        for key, parameter in module._parameters.items():
            yield key, None if parameter is None else parameter.shape
        for key, buffer in module._buffers.items():
            yield key, id(buffer)


def _plain(value: object) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return (type(value), value) if isinstance(value, (int, float, str, bool)) or value is None else id(value)


def _add(builder: PlanBuilder, name: str, finding: Finding) -> None:
    if finding.block is None:
        builder.reasons.setdefault(name, finding.reason)
        return
    styles = [*_styles(finding), *_wrappers(finding)]
    builder.add(*((join_names(name, path) if path else name, style) for path, style in styles), block=name)


def _styles(finding: Finding) -> list[tuple[str, str]]:
    """Return the styles of the layers of a block."""
    assert finding.block is not None
    return [*finding.block.styles(), *((path, "on_shards") for path in finding.on_shards)]


def _wrappers(finding: Finding) -> list[tuple[str, str]]:
    """Return the styles of the modules around the layers of a block."""
    assert finding.block is not None
    around = finding.block.wrappers()
    if finding.draws_after is not None:
        around.append(("", f"local_rng:{finding.draws_after},{finding.block.row}"))
    return around


def _likely(host: nn.Module, ways: list[Block]) -> Block:
    """Return the way that best matches the source of a block."""
    used = {*ways[0].attributes, *re.findall(r"self\.(\w+)", forward_source(host.get_submodule(ways[0].core)))}
    is_narrow = _can_be_narrow(host, ways[0])
    fitting = [way for way in ways if way.is_narrow == is_narrow and used.issuperset(way.attributes)]
    return max(fitting, key=lambda way: len(way.attributes), default=ways[0])


def _use(host: nn.Module, block: Block) -> tuple[InputUse, tuple[str, ...]]:
    """Return how the code of a block's core uses its input, and the paths of the columns below the core."""
    columns = block.columns_below_core()
    return input_use(host.get_submodule(block.core), columns), columns


def _can_be_narrow(host: nn.Module, block: Block) -> bool:
    """Return True if the code reads the width of its input, and passes the input only to the columns."""
    use, columns = _use(host, block)
    return use.can_be_narrow and use.takers == columns


def _reads_whole_width(host: nn.Module, block: Block) -> bool:
    """Return True if an attention uses its full input width for a shard, and `narrow_input` would be wrong."""
    return block.heads > 0 and _use(host, block)[0].reads_width and not _can_be_narrow(host, block)


def _entries(builder: PlanBuilder, name: str, finding: Finding) -> dict[str, str]:
    """Return the plan entries for a block and similar blocks, as the user would write them."""
    pattern = pattern_of(name)
    around: dict[str, str] = {}
    for path, style in _wrappers(finding):
        if not style.startswith("mask_per_head:"):
            around[path] = f"{around[path]} + {style}" if path in around else style
    entries = {**around, **dict(_styles(finding))}
    return {join_names(pattern, path) if path else pattern: style for path, style in entries.items()}
