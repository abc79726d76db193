"""Layers on shares of sequences against whole ones: attention, what is refused, bytes, memory, random numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.distributed.no_draws import NoDraws
from lightning_hybrid.memory.activation_checkpoint.checkpoint import ActivationCheckpointing
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS, Region, is_balanced
from lightning_hybrid.tensor_parallel.context_parallel.context_parallel import ContextParallel
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence, shard
from lightning_hybrid.tensor_parallel.context_parallel.trial import Trial
from lightning_hybrid.tensor_parallel.sharded_activation import plain
from lightning_hybrid.tensor_parallel.sharding import Shares
from tests.pool import Pools, RankError
from tests.training_jobs import make_trainer, together, train, weights
from tests.zoo import context as zoo
from tests.zoo.tensor import DIM, NanoBlock

CPU = torch.device("cpu")


def group_of_all() -> ContextGroup:
    group = dist.group.WORLD
    assert group is not None
    return ContextGroup(group)


# -- attention ---------------------------------------------------------------------------------------------------------

#: Heads of queries and of keys, positions, the mask, and further arguments.
ATTENTIONS: dict[str, tuple[int, int, int, str | None, dict[str, Any]]] = {
    "no mask": (4, 4, 12, None, {}),
    "causal": (4, 4, 12, None, {"is_causal": True}),
    "causal, uneven": (4, 4, 11, None, {"is_causal": True, "scale": 0.3}),
    "padding": (4, 4, 12, "padding", {}),
    "padding of a share": (4, 4, 11, "own padding", {}),
    "window": (4, 4, 12, "window", {}),
    "window, grouped": (8, 2, 13, "window", {"enable_gqa": True}),
    "causal, one head of keys": (4, 1, 12, None, {"is_causal": True, "enable_gqa": True}),
    "a bias for each head": (4, 4, 12, "bias", {}),
    "the least number, for padding": (4, 4, 12, "least", {}),
    "a learnt bias": (4, 2, 11, "learnt bias", {"enable_gqa": True}),
    "a learnt bias for keys of a share": (4, 4, 11, "own learnt bias", {}),
}


def _mask(kind: str | None, heads: int, length: int) -> Tensor | None:
    places = torch.arange(length)
    if kind == "window":
        return (places[:, None] >= places) & (places[:, None] - places < 4)
    if kind in ("bias", "learnt bias"):
        return torch.randn(heads, length, length, dtype=torch.float64).requires_grad_(kind == "learnt bias")
    if kind == "own learnt bias":
        return torch.randn(2, heads, 1, length, dtype=torch.float64).requires_grad_()
    if kind == "least":  # the second sample's first queries see no key
        sees = places < torch.tensor([[length], [length - 3]])
        sees = sees[:, None, None, :] & ((places > 3) | torch.tensor([[True], [False]]))[:, None, :, None]
        least = torch.full_like(sees, torch.finfo(torch.float64).min, dtype=torch.float64)
        return least.masked_fill_(sees, 0.0)
    if kind is not None:
        return (places < torch.tensor([[length], [length - 3]]))[:, None, None, :]
    return None


def attend(kind: str, name: str) -> None:
    heads, of_keys, length, mask_kind, options = ATTENTIONS[name]
    shares = Shares(length, group_of_all(), balanced=is_balanced(kind))
    torch.manual_seed(1)
    shapes = (2, heads, length, 6), (2, of_keys, length, 6), (2, of_keys, length, 6)
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = _mask(mask_kind, heads, length)
    # A ring adds no less than this, so where all keys of a query have the least number, scores still count.
    seen = mask if mask_kind != "least" or kind != "ring" or mask is None else mask.clamp(min=-1e4)
    expected = F.scaled_dot_product_attention(*whole, attn_mask=seen, **options)
    factors = torch.randn_like(expected)
    (expected * factors).sum().backward()
    of_mask = None if mask is None else mask.grad

    own = [shares.own(each.detach(), 2).clone().requires_grad_() for each in whole]
    if mask is not None:
        is_own = mask_kind in ("own padding", "own learnt bias")
        learns, mask = mask.requires_grad, mask.detach()
        mask = (shares.own(mask, -1).clone() if is_own else mask).requires_grad_(learns)
    with Region("layer", shares, kind, NoDraws(CPU)):
        found = F.scaled_dot_product_attention(*own, attn_mask=mask, **options)
    (found * shares.own(factors, 2)).sum().backward()
    torch.testing.assert_close(found, shares.own(expected, 2), rtol=1e-12, atol=1e-12)
    for mine, all_of_it in zip(own, whole, strict=True):
        torch.testing.assert_close(mine.grad, shares.own(all_of_it.grad, 2), rtol=1e-12, atol=1e-12)
    if of_mask is not None:  # each rank has that of its queries or its heads
        assert mask is not None
        assert mask.grad is not None
        if mask_kind == "own learnt bias":  # or that of its keys, from all ranks
            of_mask = shares.own(of_mask, -1)
        else:
            dist.all_reduce(mask.grad)
        torch.testing.assert_close(mask.grad, of_mask, rtol=1e-12, atol=1e-12)


def attend_with_autocast(kind: str, is_causal: bool) -> None:
    """Queries that a norm has made float32, and values of half precision, as models with normed queries have."""
    shares = Shares(13, group_of_all(), balanced=is_balanced(kind))
    torch.manual_seed(1)
    whole = torch.randn(2, 4, 13, 8), torch.randn(2, 4, 13, 8), torch.randn(2, 4, 13, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal)
        with Region("layer", shares, kind, NoDraws(CPU)):
            found = F.scaled_dot_product_attention(*(shares.own(each, 2) for each in whole), is_causal=is_causal)
    torch.testing.assert_close(found, shares.own(expected, 2), rtol=0.02, atol=0.02)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_attention_is_that_of_the_whole_sequence(ranks: Pools, size: int) -> None:
    ranks(size).run(attend_all)


def attend_all() -> None:
    for kind, name in itertools.product(KINDS, ATTENTIONS):
        attend(kind, name)
    for kind, is_causal in itertools.product(KINDS, (False, True)):
        attend_with_autocast(kind, is_causal)


# -- what layers return ------------------------------------------------------------------------------------------------


def read_and_write(balanced: bool) -> None:
    shares = Shares(7, group_of_all(), balanced=balanced)
    torch.manual_seed(1)
    whole = torch.randn(2, 7, 3, dtype=torch.float64)
    made = shares.own(whole, 1).clone().requires_grad_()
    sequence = shard(made, 1, shares)
    assert (sequence.shape, sequence.requires_grad) == (whole.shape, True)
    with SentBytes() as mode:
        torch.testing.assert_close(sequence.share(1, shares), made, rtol=0, atol=0)
    assert not mode.sent
    torch.testing.assert_close(plain(sequence), whole)
    assert type(sequence.softmax(1)) is Tensor
    sequence += 1
    assert isinstance(sequence, ShardedSequence)
    written = sequence.share(1, shares)
    torch.testing.assert_close(written, made + 1)
    (written.sum() + sequence.square().sum()).backward()
    # In the layers gradients are `size` times those of the share, for they are averaged over the ranks.
    expected = 1 + 2 * (made.detach() + 1) * shares.group.size
    torch.testing.assert_close(made.grad, expected)


@pytest.mark.distributed
def test_what_layers_return_is_read_written_and_handed_on(ranks: Pools) -> None:
    for balanced in (False, True):
        ranks(2).run(read_and_write, balanced)


# -- bytes and memory --------------------------------------------------------------------------------------------------

BATCH, LENGTH, LAYERS = 2, 64, 3


def run_blocks(kind: str, *, whole: bool = False) -> tuple[dict[str, int], int]:
    """Bytes that this rank sends, by the kind of collective, and bytes of what blocks keep for backward."""
    layers = nn.ModuleList(NanoBlock() for _ in range(LAYERS))
    group = group_of_all()
    context = ContextParallel(layers, {str(i): layer for i, layer in enumerate(layers)}, group, kind, CPU)
    # What is tried at a first call is not counted.
    context._tried = {(id(layer), True, frozenset()): {} for layer in layers}
    x = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    kept: dict[int, int] = {}
    of_weights = {parameter.untyped_storage().data_ptr() for parameter in layers.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, ShardedSequence) and storage.data_ptr() not in of_weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with nullcontext() if whole else context.around(nullcontext), SentBytes() as mode:
        h: Any = x * 1
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for layer in layers:
                h = layer(h)
        if isinstance(h, ShardedSequence):
            h.read()  # here, as a mode does not see what an operator on it calls
        plain(h).sum().backward()
    return dict(mode.sent), sum(kept.values())


class SentBytes(CommDebugMode):
    """Counts the bytes that a rank sends to others, by the kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, size = func.__name__, dist.get_world_size()
        if "_allgather_base_" in name:
            self.sent["all_gather"] += args[1].nbytes * (size - 1)
        elif "_reduce_scatter_base_" in name:
            self.sent["reduce_scatter"] += args[0].nbytes * (size - 1)
        elif "alltoall_base_" in name:
            self.sent["all_to_all"] += args[1].nbytes * (size - 1) // size
        elif name.startswith("send"):
            self.sent["ring"] += sum(tensor.nbytes for tensor in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_bytes_are_those_of_the_papers(ranks: Pools, size: int) -> None:
    hidden = 4 * BATCH * LENGTH * DIM  # bytes of the hidden states
    around = 2 * hidden * (size - 1) // size  # the first layer's gradient and the last one's output are gathered
    for sent, _ in ranks(size).run(run_blocks, "ulysses"):
        # Queries, keys, values and results, there and back; DeepSpeed Ulysses, section 3.2.
        assert sent == {
            "all_to_all": LAYERS * 2 * 4 * hidden * (size - 1) // size**2,
            "all_gather": around,
        }
    for sent, _ in ranks(size).run(run_blocks, "all_gather"):
        of_keys = LAYERS * 2 * hidden * (size - 1) // size
        assert sent == {"all_gather": of_keys + around, "reduce_scatter": of_keys}
    for sent, _ in ranks(size).run(run_blocks, "ring"):
        # Keys and values there, once more in backward, and their gradients, which come home in the end.
        passes = (size - 1) + (size - 1) + size
        assert sent == {"ring": LAYERS * 2 * hidden * passes // size, "all_gather": around}


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_activations_of_layers_are_divided(ranks: Pools, size: int) -> None:
    of_keys = LAYERS * 2 * 4 * BATCH * LENGTH * DIM  # bytes of the keys and values of the whole sequence
    for whole, *shared in ranks(size).run(kept_bytes):
        for kind, kept in zip(KINDS, shared, strict=True):
            # Gathered keys are kept for the layer's backward, beside the share of everything.
            expected = whole / size + (of_keys if kind == "all_gather" else 0)
            assert expected <= kept <= 1.1 * expected, kind


def kept_bytes() -> list[int]:
    return [run_blocks("ulysses", whole=True)[1], *(run_blocks(kind)[1] for kind in KINDS)]


# -- random numbers ----------------------------------------------------------------------------------------------------


class Checkpointed(nn.TransformerEncoderLayer):
    """A layer that has its attention, and what it drops, made again in backward."""

    reentrant: bool | None = None

    def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.reentrant is None:
            return super()._sa_block(x, *args, **kwargs)
        return checkpoint(super()._sa_block, x, *args, use_reentrant=self.reentrant)

    def _ff_block(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return super()._ff_block(x)
        return checkpoint(super()._ff_block, x, use_reentrant=self.reentrant)


AGAIN = {
    "layer": lambda layer: {"recomputed": [layer]},
    "parts": lambda layer: {"recomputed": [layer.self_attn, layer.dropout1]},
    "the user's, around": lambda layer: {"call": partial(checkpoint, layer, use_reentrant=False)},
    "the user's, around, reentrant": lambda layer: {"call": partial(checkpoint, layer, use_reentrant=True)},
    "the user's, inside": lambda layer: {"reentrant": False},
    "the user's, inside, reentrant": lambda layer: {"reentrant": True},
}


def dropped(kind: str, again: str) -> list[Tensor]:
    torch.manual_seed(1)
    layer = Checkpointed(DIM, 4, 32, 0.5, batch_first=True)
    how: dict[str, Any] = AGAIN[again](layer) if again else {}
    layer.reentrant = how.get("reentrant")
    call = how.get("call", layer)
    context = ContextParallel(layer, {"layer": layer}, group_of_all(), kind, CPU)
    x = torch.ones(2, 8, DIM, requires_grad=True)
    torch.manual_seed(2)
    with context.around(ActivationCheckpointing(how.get("recomputed", ()), CPU)):
        y = plain(call(call(x)))
        y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, torch.rand(3), *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_shares_drop_other_numbers_and_the_same_again_in_backward(ranks: Pools, kind: str) -> None:
    first, second = ranks(2).run(dropped, kind, "")
    for again in AGAIN:
        found, _ = ranks(2).run(dropped, kind, again)
        torch.testing.assert_close(found, first, rtol=1e-5, atol=1e-5, msg=lambda text, again=again: f"{again}: {text}")
    torch.testing.assert_close(first[:3], second[:3], rtol=0, atol=0)
    y = first[0]
    assert not torch.equal(y[:, :4], y[:, 4:]), "each share has numbers of its own"


def drop_paths(layout: dict[str, Any] | None, replayed: Any = ()) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """The parameters, and the masks that each layer has drawn."""
    module = zoo.DropPath(batch_size=8).double()  # as many samples as positions with which layers are tried
    for block, masks in zip(module.blocks, replayed, strict=False):
        block.replayed = list(masks)
    return train(module, layout, limit_val_batches=0).weights, [block.drawn for block in module.blocks]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"context_parallel_size": 2}),
        pytest.param(2, {"context_parallel_size": 2, "recompute": True}, marks=pytest.mark.thorough),
        pytest.param(4, {"context_parallel_size": 4, "context_parallel": "ring"}, marks=pytest.mark.thorough),
    ],
)
def test_what_is_drawn_for_samples_is_the_same_on_all_shares(ranks: Pools, size: int, layout: dict[str, Any]) -> None:
    (found, masks), *others = ranks(size, lightning=True).run(drop_paths, layout)
    for _, theirs in others:
        torch.testing.assert_close(theirs, masks, rtol=0, atol=0)
    drawn = [tuple(mask.flatten().tolist()) for of_layer in masks for mask in of_layer]
    assert len(set(drawn)) > len(drawn) / 2, "each call has others"
    expected, _ = drop_paths(None, masks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def drop_positions_and_paths(layout: dict[str, Any]) -> list[list[Tensor]]:
    module = zoo.DroppedPaths(batch_size=4)
    make_trainer(layout, limit_train_batches=3, limit_val_batches=0).fit(module)
    return [module.drawn, *(layer.drawn for layer in module.body)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"context_parallel_size": 2}, marks=pytest.mark.thorough),
        (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
)
def test_dropout_of_shares_leaves_what_is_common_alone(ranks: Pools, size: int, layout: dict[str, Any]) -> None:
    first, *others = ranks(size, lightning=True).run(drop_positions_and_paths, layout)
    assert all(first)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def fit_in_half(precision: str) -> bool:
    layout = {"context_parallel_size": 2, "context_parallel": "ring"}
    result = train(zoo.Dropped(), layout, precision=precision, limit_train_batches=1, limit_val_batches=0)
    return all(value.isfinite().all() for value in result.weights.values())


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("bf16-true", marks=pytest.mark.thorough)])
def test_rounding_to_half_precision_is_no_mixing(ranks: Pools, precision: str) -> None:
    assert all(ranks(2, lightning=True).run(fit_in_half, precision))


# -- refused -----------------------------------------------------------------------------------------------------------

PARTS = {
    "Convolution": ["inner.time", "Conv1d"],
    "Recurrent": ["rnn", "GRU"],
    "ByHand": ["Before 'proj' (Linear), the layer (ByHand) mixes"],
    "Pooled": ["Before 'proj' (Linear), the layer (Pooled) mixes"],
    "Normed": ["norm", "BatchNorm1d"],
    "Gated": ["conv", "Conv1d"],
    "Zeros": ["conv", "Conv1d"],
    "Far": ["Far"],
    "Shifted": ["Before 'up' (Linear), the layer (Shifted) mixes"],
    "Tempered": ["Tempered"],
    "Added": ["Added"],
    "Rotary": ["Rotary"],
    "Balanced": ["The layer stores statistics of its sequence shard in the buffer 'bias'"],
}


def fit(module: Any, **layout: Any) -> dict[str, Tensor]:
    layout = {"context_parallel_size": 2, **layout}
    return train(module, layout, limit_train_batches=2, limit_val_batches=0).weights


def fit_mixing(kind: str) -> dict[str, Tensor]:
    module = type(kind, (zoo.Mixing,), {"kind": kind})()
    return fit(module)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", ["Convolution", *(pytest.param(k, marks=pytest.mark.thorough) for k in PARTS if k != "Convolution")]
)
def test_what_else_mixes_positions_is_refused_by_name(ranks: Pools, kind: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, lightning=True).run(fit_mixing, kind)
    for text in error.value.failures.values():
        for part in ("context_parallel_size=2", "body.0", *PARTS[kind]):
            assert part in text


def fit_hooked(hook: str, layout: dict[str, Any] | None) -> dict[str, Tensor]:
    module = type("Hooked", (zoo.Hooked,), {"kind": hook})().double()
    return train(module, layout, limit_train_batches=2, limit_val_batches=1).weights


@pytest.mark.distributed
@pytest.mark.parametrize("hook", ["collects", "centers", "writes"])
@pytest.mark.parametrize(
    "layout",
    [
        {"context_parallel": "ring"},
        pytest.param({"recompute": True}, marks=pytest.mark.thorough),
        pytest.param(
            {"context_parallel": "all_gather", "pipeline_parallel_size": 2, "num_microbatches": 1},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_hooks_inside_layers_see_whole_sequences(ranks: Pools, hook: str, layout: dict[str, Any]) -> None:
    size = 2 * layout.get("pipeline_parallel_size", 1)
    found = ranks(size, lightning=True).run(fit_hooked, hook, {"context_parallel_size": 2, **layout})
    torch.testing.assert_close(together(found), fit_hooked(hook, None), rtol=1e-10, atol=1e-10)


@pytest.mark.distributed
def test_a_hook_that_writes_into_an_argument_is_refused(ranks: Pools) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, lightning=True).run(fit_hooked, "writes_input", {"context_parallel_size": 2})
    for text in error.value.failures.values():
        assert "A forward hook changes an argument of 'block.mlp.c_proj' in place" in text


def fit_keeping(kind: str, layout: dict[str, Any] | None) -> dict[str, Tensor]:
    return train(getattr(zoo, kind)().double(), layout, limit_train_batches=2, limit_val_batches=0).weights


@pytest.mark.distributed
def test_what_layers_keep_beside_their_results_is_refused_if_the_loss_has_it(ranks: Pools) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, lightning=True).run(fit_keeping, "Leaking", {"context_parallel_size": 2})
    for text in error.value.failures.values():
        assert "'body.1', but the loss uses a tensor that this layer stores as an attribute" in text
    found = ranks(2, lightning=True).run(fit_keeping, "Counting", {"context_parallel_size": 2})
    torch.testing.assert_close(together(found), fit_keeping("Counting", None), rtol=1e-10, atol=1e-10)


def lack_memory() -> None:
    """The layer cannot run whole on the last rank, as if it had too little memory for it there."""
    module = zoo.ExampleGPT()
    run = Trial._run_whole

    def lacking(*args: Any, is_wide: bool) -> Any:
        if is_wide and dist.get_rank() == dist.get_world_size() - 1:
            raise torch.OutOfMemoryError("too little")
        return run(*args, is_wide=is_wide)

    with patch.object(Trial, "_run_whole", lacking):
        fit(module)


@pytest.mark.distributed
def test_ranks_try_the_same_where_one_lacks_memory(ranks: Pools) -> None:
    ranks(2, lightning=True).run(lack_memory)


def fit_conformers(layout: dict[str, Any] | None) -> dict[str, Tensor]:
    return train(zoo.Conformers().double(), layout, limit_val_batches=0).weights


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"context_parallel": "ulysses"}),
        pytest.param(4, {"context_parallel": "ring", "pipeline_parallel_size": 2}, marks=pytest.mark.thorough),
    ],
)
def test_what_stands_beside_the_body_gets_whole_sequences(ranks: Pools, size: int, layout: dict[str, Any]) -> None:
    body = ["blocks.*.attention", "blocks.*.mlp"]
    if "pipeline_parallel_size" in layout:  # in the order of the calls
        body = [pattern.replace("*", str(index)) for index in range(zoo.Conformers.layers) for pattern in body]
    found = ranks(size, lightning=True).run(fit_conformers, {"context_parallel_size": 2, "body": body, **layout})
    torch.testing.assert_close(together(found), fit_conformers(None), rtol=1e-10, atol=1e-10)


def fit_and_save(path: str, sharded: bool) -> dict[str, Tensor]:
    layout = {"context_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
    layout |= {"context_parallel": "ring", "save_distributed_checkpoint": sharded}
    module = zoo.Uneven()
    trainer = make_trainer(layout, limit_train_batches=2, limit_val_batches=1)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    own = weights(module)
    layout = {"context_parallel_size": 4, "save_distributed_checkpoint": sharded}
    other = zoo.Uneven()
    make_trainer(layout, max_epochs=1, limit_train_batches=2, limit_val_batches=0).fit(other, ckpt_path=path)
    for name, value in weights(other).items():
        assert name not in own or torch.equal(own[name], value), name
    return own


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_knows_no_shares(ranks: Pools, tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "model.ckpt"
    whole = together(ranks(4, lightning=True).run(fit_and_save, str(path), sharded))
    if not sharded:
        checkpoint = torch.load(path, weights_only=False)
        assert checkpoint["state_dict"].keys() >= whole.keys()
        for name, value in whole.items():
            assert torch.equal(checkpoint["state_dict"][name], value), name


def fit_dropped() -> dict[str, Tensor]:
    return fit(zoo.Dropped())


@pytest.mark.distributed
def test_parameters_stay_equal_where_shares_draw_other_numbers(ranks: Pools) -> None:
    assert together(ranks(2, lightning=True).run(fit_dropped))
