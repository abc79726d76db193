"""The automatic plan, without any process: blocks that are found, and those that only look like one."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.tensor_parallel.auto_plan import known_code
from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.zoo import tensor as zoo


@pytest.fixture(autouse=True)
def _known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial's own tests: as if the code of these modules were known."""
    if "users_own" not in request.node.name:
        monkeypatch.setattr(known_code, "KNOWN_PACKAGES", known_code.KNOWN_PACKAGES | {"tests"})


def auto(module: nn.Module, size: int = 2) -> tuple[dict[str, str], dict[str, str]]:
    plan = make_plan(module, "auto", size, sequence_parallel=False)
    styles: dict[str, str] = {}
    for row in plan.rows:
        styles[row.name] = f"{styles[row.name]} + {row.style}" if row.name in styles else row.style
    return styles, dict(plan.reasons)


class MLP(nn.Module):
    """Two layers, and what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)
        self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self.fc1(x), x))

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return F.gelu(h)


class Mixing(MLP):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h.softmax(-1)


class Reversing(MLP):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h.flip(-1)


class Normalizing(MLP):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return self.norm(h)


class Centering(MLP):
    """Its first layer does nothing to the loss of the sum, but to its shards."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True)


class MixingNothing(Mixing):
    """Begins with zeros, as many residual branches do."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.fc2.weight)


class Gated(MLP):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.gate(x).sigmoid()


class Scaled(MLP):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h.relu() * self.scale


class Leaking(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h) + h.mean(-1, keepdim=True)


class Twice(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.fc2(self.fc1(x))))


class Picky(MLP):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return self.fc2(self.fc1(x) + context)


class Shaped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).view(-1, 16))


class NormOfAll(zoo.Attention):
    """A norm over the features of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(zoo.DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.q(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """Heads are mixed by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj, self.talk = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = self.talk((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Uncounted(zoo.Attention):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.width = self.num_heads, self.head_dim
        del self.num_heads, self.head_dim


def tied() -> nn.Module:
    module = nn.ModuleList([MLP(), nn.Linear(8, 16)])
    module[1].weight = module[0].fc1.weight
    return module


def indivisible() -> nn.Module:
    attention = zoo.Attention()
    attention.num_heads, attention.head_dim = 1, zoo.DIM
    return attention


def replaced() -> nn.Module:
    """As tools do it that wrap a layer's `forward`."""
    module = MLP()
    module.fc1.forward = module.fc1.forward
    return module


class Returning(MLP):
    """Gives what is between, too."""

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.fc1(x))
        return self.fc2(h), h


class Keeping(MLP):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        self.kept = h.relu()
        return self.kept


class UsedTwice(MLP):
    """The same slope between the layers and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc2(self.act(self.fc1(x))))


class InTraining(MLP):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return (h - h.mean(-1, keepdim=True) if self.training else h).relu()


class Clipping(MLP):
    """Only what is large is mixed."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        h = h.relu()
        return h * (8.0 / h.norm(dim=-1, keepdim=True).clamp(min=8.0))


class Shut(Mixing):
    """A gate that opens later."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h.softmax(-1) * 0.0


class DropPath(MLP):
    """Drops whole samples."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h * (torch.rand(len(h), 1, 1) > 0.5) if self.training else h


class DropBeforeKeys(zoo.Attention):
    """Dropout among its projections: of what is whole, or of shards."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x)
        x = F.dropout(x, 0.5, self.training)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q(x), self.k(x), v))
        return self.proj(F.scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2).flatten(2))


class InputDropout(zoo.FusedAttention):
    """It does something to its input, before it reads the width from it."""

    __module__ = __name__

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.layer_norm(x, x.shape[-1:]))


def hooked() -> nn.Module:
    module = MLP()
    module.fc1.register_forward_hook(lambda layer, args, output: output / output.sum(-1, keepdim=True))
    return module


SAME = "gives different results when it is sharded in a trial"
OWN = "has parameters between the layers"
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mixes": (Mixing, SAME),
    "reverses": (Reversing, SAME),
    "normalizes": (Normalizing, SAME),
    "centers": (Centering, SAME),
    "mixes, but is zero": (MixingNothing, SAME),
    "uses its input": (Gated, "also uses its input between"),
    "scales": (Scaled, OWN),
    "uses the first layer elsewhere": (Leaking, SAME),
    "calls twice": (Twice, "not each called exactly once"),
    "wants more": (Picky, "needs the argument 'context'"),
    "counts features": (Shaped, SAME),
    "a norm of all heads": (NormOfAll, SAME),
    "a forward of one layer alone": (replaced, "contains 'fc1', a Linear with a replaced `forward`"),
    "talking heads": (TalkingHeads, SAME),
    "no number of heads": (Uncounted, "no attribute with the number of heads"),
    "gives what is between": (Returning, SAME),
    "keeps what is between": (Keeping, SAME),
    "uses a parameter twice": (UsedTwice, "uses the same parameters both between the layers"),
    "mixes in training": (InTraining, SAME),
    "mixes what is large": (Clipping, SAME),
    "gives zeros": (Shut, "produces only zeros in a trial"),
    "drops whole samples": (DropPath, "draws random numbers"),
    "drops among projections": (DropBeforeKeys, "draws random numbers"),
    "does something to its input": (InputDropout, SAME),
    "has hooks": (hooked, "contains 'fc1', a Linear with hooks"),
    "one head": (indivisible, "has 1 heads (num_heads), which cannot be divided over 2 ranks"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_only_looks_like_a_block_stays_whole(name: str) -> None:
    make, words = LEFT[name]
    plan, reasons = auto(nn.ModuleList([make()]))
    assert plan == {}
    assert words in reasons["0"]


def test_a_tied_layer_keeps_its_block_whole() -> None:
    plan, reasons = auto(tied())
    assert plan == {}
    assert reasons == {"0": "contains 'fc1', which shares its 'weight' with '1.weight'"}


def test_blocks_of_the_users_own_that_are_not_proven_stay_whole_with_a_plan_to_write() -> None:
    plan, reasons = auto(nn.ModuleDict({"body": nn.ModuleList([zoo.NanoBlock(), zoo.FusedBlock()])}))
    assert not any(name.startswith("body.0.mlp") for name in plan)
    assert reasons == {
        "body.0": "is a NanoBlock from 'tests.zoo.tensor', whose code is unknown; it can behave differently in"
        f" another call (`self.mlp['c_fc']` in line {LINE_OF_MLP} of its file). With random values, this plan gave the"
        " same results as the unsharded block: {'body.*.mlp.c_fc': 'colwise', 'body.*.mlp.c_proj': 'rowwise'};"
        " `lightning-hybrid check` compares the results of this plan with one process",
    }
    expected = {"": "divide:n_head,n_embd + mask_per_head:4 + narrow_input:c_attn", ".c_attn": "packed_colwise_3"}
    assert {name: plan[f"body.0.attn{name}"] for name in expected} == expected


_SOURCE, _FIRST = inspect.getsourcelines(zoo.NanoBlock)
LINE_OF_MLP = _FIRST + next(index for index, line in enumerate(_SOURCE) if 'self.mlp["c_fc"]' in line)


class Joined(zoo.Attention):
    """Norm, attention and residual in one `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        B, L, C = x.shape
        y = F.layer_norm(x, (C,))
        q, k, v = (f(y).view(B, L, self.num_heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, L, C))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_of_a_block_of_the_users_own_an_attention_that_reads_the_whole_width_stays_whole() -> None:
    plan, reasons = auto(nn.ModuleList([Joined()]))
    assert plan == {"0.gate": "colwise", "0.up": "colwise", "0.down": "rowwise"}
    assert (
        "No plan is known for this block, because it gives different results when it is sharded in a trial"
        in reasons["0"]
    )
    assert "(it reads the full width of its input; to fix this, read widths in `forward`" in reasons["0"]


class Grouped(nn.Module):
    """Attention whose queries share keys, as it is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.kv_head_dim = 4, 2, 4
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        q = self.q(x).view(B, L, self.heads, -1).transpose(1, 2)
        k, v = (f(x).view(B, L, self.kv_heads, self.kv_head_dim).transpose(1, 2) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


def test_grouped_queries_of_the_users_own_have_both_numbers_of_heads_divided() -> None:
    plan, reasons = auto(nn.ModuleList([Grouped()]))
    assert reasons == {}
    assert plan["0"] == "divide:heads,kv_heads + mask_per_head:4"


def test_a_part_of_the_users_own_that_is_not_proven_keeps_a_known_block_whole() -> None:
    block = zoo.FusedBlock()
    block.mlp.act = Deciding()
    _, reasons = auto(nn.ModuleList([block]))
    whose = "contains 'act', a Deciding from 'tests.tensor_parallel.test_auto_plan', whose code is unknown; it can"
    assert whose in reasons["0.mlp"]
    model = Model(ATTENTION)
    model.layers[0].attn.norm = Own()
    styles, reasons = auto(model)
    assert "contains 'norm', a Own from" in reasons["layers.0.attn"]
    assert {name.split(".")[1] for name in styles} == {"1"}


def test_layers_that_differ_by_a_number_are_tried_each() -> None:
    """What decides may be any attribute, or a buffer."""
    plan, _ = auto(nn.ModuleList([Numbered(0), Numbered(1)]))
    assert {name[0] for name in plan} == {"0"}
    plan, _ = auto(nn.ModuleList([Mixed(0.0), Mixed(1.0)]))
    assert {name[0] for name in plan} == {"0"}


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() < 1e9 else x.softmax(-1)


class Numbered(MLP):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h.softmax(-1) if self.layer_id % 2 else h.sigmoid()


class Mixed(MLP):
    def __init__(self, part: float) -> None:
        super().__init__()
        self.register_buffer("part", torch.tensor(part))

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h - self.part * h.mean(-1, keepdim=True)


def test_a_norm_that_another_layer_shares_keeps_its_block_whole() -> None:
    module = nn.ModuleList([zoo.Attention(), nn.LayerNorm(zoo.DIM // zoo.HEADS)])
    module[0].norm.weight = module[1].weight
    plan, reasons = auto(module)
    assert plan == {}
    assert reasons == {"0": "contains 'norm', which shares its 'weight' with '1.weight'"}


def test_two_regions_of_one_block_do_not_both_draw_their_own_numbers() -> None:
    plan, reasons = auto(nn.ModuleList([Both()]))
    assert plan["0"].count("local_rng") == 1
    assert reasons == {"0": "already has the style 'local_rng'"}


class Both(zoo.Attention):
    """Attention and a multilayer perceptron in one module, with dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.drop((self.norm(q) @ k.mT).softmax(-1)) @ v
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(self.drop(self.fc1(x)))


PROJECTIONS = {"0.q": "colwise", "0.k": "colwise", "0.v": "colwise", "0.proj": "rowwise"}


def test_an_attention() -> None:
    """Its heads are counted, masks of each head are divided, and its norm sees this rank's heads."""
    plan, reasons = auto(nn.ModuleList([zoo.Attention()]))
    assert plan == {
        **PROJECTIONS,
        "0.norm": "on_shards",
        "0": "divide:num_heads + mask_per_head:4",
    }
    assert reasons == {}


def test_containers_belong_to_what_calls_their_layers() -> None:
    plan, _ = auto(nn.ModuleList([zoo.NanoBlock()]))
    assert (plan["0.mlp.c_fc"], plan["0.mlp.c_proj"]) == ("colwise", "rowwise")
    assert plan["0.attn.c_attn"] == "packed_colwise_3"
    assert plan["0.attn"] == "divide:n_head,n_embd + mask_per_head:4 + narrow_input:c_attn"


def test_dropout_between_layers_of_a_block_draws_own_numbers() -> None:
    block = zoo.MLP()
    block.drop1.p = block.drop2.p = 0.1
    assert auto(nn.ModuleList([block]))[0]["0"] == "local_rng:fc1,fc2"
    block.drop1.p = 0.0
    assert "0" not in auto(nn.ModuleList([block]))[0]


def test_a_trial_leaves_no_trace() -> None:
    calls: list[Any] = []
    module = nn.ModuleList([zoo.FusedBlock(), MLP(), TalkingHeads()])
    module[1].register_forward_hook(lambda *args: calls.append(args))
    parameters = dict(module.named_parameters())
    before, state = {name: value.clone() for name, value in parameters.items()}, torch.get_rng_state()
    numpy, python = np.random.get_state()[1].copy(), random.getstate()
    auto(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy).all()
    assert random.getstate() == python
    assert not calls
    assert all(layer.training for layer in module.modules())
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_parameters_without_values_have_the_same_plan() -> None:
    def make() -> nn.Module:
        return nn.ModuleList([zoo.FusedBlock(), zoo.OwnBlock(), zoo.NanoBlock(), Mixing()])

    with torch.device("meta"), torch.no_grad():
        without = make()
    assert auto(without) == auto(make())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_precision_of_a_run_does_not_matter(dtype: torch.dtype) -> None:
    expected = auto(nn.ModuleList([zoo.FusedBlock()]))
    torch.set_default_dtype(dtype)
    try:
        assert auto(nn.ModuleList([zoo.FusedBlock()])) == expected
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


# -- plans of Hugging Face ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    """What a model of transformers looks like from outside."""

    def __init__(self, plan: dict[str, str], **config: Any) -> None:
        super().__init__()
        self._tp_plan, self.config = plan, SimpleNamespace(**config)
        self.layers = nn.ModuleList([self.layer(), self.layer()])
        self.head = nn.Linear(8, 12)

    def layer(self) -> nn.Module:
        layer = nn.Module()
        layer.attn, layer.head_dim = nn.Module(), 4
        layer.attn.config, layer.attn.head_dim, layer.attn.attention_dropout = self.config, 4, 0.0
        layer.attn.a, layer.attn.b, layer.attn.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(4)
        layer.up, layer.down = nn.Linear(8, 16), nn.Linear(16, 8)
        return layer


ATTENTION = {"layers.*.attn.a": "colwise", "layers.*.attn.b": "rowwise", "layers.*.attn.norm": "replicate"}


def test_a_models_own_plan_is_taken_in_both_spellings() -> None:
    plan = {**ATTENTION, "layers.*.attn.norm": "replicated_with_grad_allreduce", "head": "colwise_rep"}
    plan |= {"layers.*.up": "colwise_rep", "layers.*.down": "rowwise_rep"}
    styles, reasons = auto(nn.ModuleDict({"model": Model(plan)}))
    assert reasons == {}
    for layer in ("model.layers.0", "model.layers.1"):
        assert [styles[f"{layer}.attn.{each}"] for each in ("a", "b", "norm")] == ["colwise", "rowwise", "on_shards"]
        assert [styles[f"{layer}.{each}"] for each in ("up", "down")] == [
            "colwise_gather_output",
            "rowwise_split_input",
        ]
    assert styles["model.head"] == "colwise_gather_output"


def test_a_style_that_is_unknown_leaves_its_block_whole() -> None:
    plan = {"layers.1.attn.norm": "mla_kv_a_proj", **ATTENTION, "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    styles, reasons = auto(Model(plan))
    assert {"layers.0.attn.a", "layers.0.up", "layers.1.up"} <= styles.keys()
    assert not any(name.startswith("layers.1.attn") for name in styles)
    reason = "has a built-in plan with the unknown style 'mla_kv_a_proj'"
    assert reasons == {"layers.1.attn": reason}


def test_half_of_a_block_is_joined_with_the_other_half() -> None:
    whole = dict.fromkeys([f"layers.*.{name}" for name in ("attn.b", "attn.norm", "up")], "replicate")
    styles, reasons = auto(Model({"layers.*.attn.a": "colwise", "layers.*.down": "rowwise", **whole}))
    assert reasons == {}
    assert styles.keys() == {"layers.0.attn.a", "layers.0.down", "layers.1.attn.a", "layers.1.down"}


@pytest.mark.parametrize("heads", [{"num_attention_heads": 4, "num_key_value_heads": 1}, {"num_attention_heads": 3}])
def test_a_head_is_on_one_rank(heads: dict[str, int]) -> None:
    styles, reasons = auto(Model(ATTENTION, **heads))
    assert styles == {}
    assert "heads" in reasons["layers.0.attn"]
    assert "cannot be divided over 2 ranks" in reasons["layers.0.attn"]


@pytest.mark.parametrize("name", ["attn.gate", "attn.inner.gate"])
def test_a_parameter_that_a_models_own_plan_does_not_name_keeps_its_block_whole(name: str) -> None:
    """Its gradient on a rank may be a part of a sum: an activation that learns, a norm of each head."""
    model = Model(ATTENTION)
    model.layers[1].attn.inner = nn.Module()
    model.layers[1].get_submodule(name.rpartition(".")[0]).gate = nn.Parameter(torch.ones(1))
    styles, reasons = auto(model)
    assert {each.split(".")[1] for each in styles} == {"0"}
    assert (
        reasons["layers.1.attn"]
        == f"has a parameter '{name.removeprefix('attn.')}' that is missing from its built-in plan"
    )


def test_masks_and_weights_of_a_models_own_attention() -> None:
    assert auto(Model(ATTENTION, num_attention_heads=4))[0]["layers.0.attn"] == "mask_per_head:4"


def test_dropout_of_a_models_own_attention() -> None:
    model = Model(ATTENTION)
    for layer in model.layers:
        layer.attn.attention_dropout = 0.1
    assert auto(model)[0]["layers.0.attn"] == "local_rng:a,b"
