"""Mixture-of-experts models of transformers, their classes unchanged, with the losses of their routers."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Result, assert_same, train

transformers = pytest.importorskip("transformers")

#: The first test of a batch waits for all of it.
pytestmark = [pytest.mark.timeout(600), pytest.mark.distributed]

VOCABULARY, STEPS, SAMPLES = 64, 3, 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
_SHARED = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": _SHARED,
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "GptOss": {
        "num_local_experts": 4,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "DeepseekV3": _LATENT
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "Olmoe": {"num_experts": 4},
}


def cross_entropy(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    """As that of transformers, which computes in float32, where the sum over shares is another number."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class _Wide(ModuleType):
    """Torch, where float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, {"float32": "float64", "float": "float64"}.get(name, name))


@contextmanager
def wide(family: str) -> Iterator[None]:
    """Inside, what the model of a family computes in float32 (norms, routers, losses) it computes in float64."""
    names: Any = vars(sys.modules[getattr(transformers, f"{family}ForCausalLM").__module__])
    tensors: Any = torch.Tensor
    before = names["torch"]
    names["torch"], tensors.float = _Wide("torch"), tensors.double
    try:
        yield
    finally:
        names["torch"] = before
        del tensors.float  # that of its base is there again


class Experts(LightningModule):
    """A causal language model; the loss is its own, with that of its routers.

    Args:
        family: Of transformers.
        experts: How experts are computed.
        wide_loss: Whether cross entropy is computed in float64.
        replicas: In one process, the number of parts of a batch of which each has a loss of its own, as replicas do.
        config: Arguments of the configuration.
    """

    def __init__(
        self, family: str, experts: str = "eager", *, wide_loss: bool = False, replicas: int = 1, **config: Any
    ) -> None:
        super().__init__()
        self.calls, self.replicas = 0, replicas
        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(3)
        arguments = {**_SIZES, **FAMILIES[family], **config}
        made = getattr(transformers, f"{family}Config")(**arguments)
        self.model = getattr(transformers, f"{family}ForCausalLM")(made)
        self.model.set_experts_implementation(experts)
        if wide_loss:
            self.model.loss_function = cross_entropy

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        parts = [batch[0][rank :: self.replicas] for rank in range(self.replicas)]
        losses = [self.model(input_ids=part, labels=part).loss for part in parts]
        return losses[0] if self.replicas == 1 else torch.stack(losses).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(
    layout: Mapping[str, Any] | None, family: str, precision: str, config: Mapping[str, Any]
) -> tuple[Result, list[str], int]:
    """Train; return the result, the messages about microbatches, and the number of runs of the step."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    layout = layout and dict(layout)
    tokens = torch.randint(VOCABULARY, (SAMPLES * STEPS, 12), generator=torch.Generator().manual_seed(1))
    config = dict(config)
    is_wide = config.pop("is_wide", False)
    module = Experts(family, **config)
    num_samples = SAMPLES // (layout or {}).get("data_parallel_size", 1)
    with warnings.catch_warnings(record=True) as caught, wide(family) if is_wide else nullcontext():
        warnings.simplefilter("always")
        result = train(module, layout, DataLoader(TensorDataset(tokens), num_samples), precision=precision)
    texts = [str(each.message) for each in caught if "The loss of the same samples is" in str(each.message)]
    return result, texts, module.calls


PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 1}
DP2: dict[str, Any] = {"data_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": PP2,
    "pp4": {"pipeline_parallel_size": 4, "num_microbatches": 1},
    "pp2_recompute": {**PP2, "recompute": True},
    "tp2": {"tensor_parallel_size": 2},
    "pp2_dp2": {**PP2, **DP2},
    "zero3": {**DP2, "zero_stage": 3},
    "pp2_zero3": {**PP2, **DP2, "zero_stage": 3},
    "pp2_chunks2": {**PP2, "num_chunks": 2, "schedule": "interleaved_1f1b", "num_microbatches": 4},
    "pp2_m4": {"pipeline_parallel_size": 2, "num_microbatches": 4},
    **{f"cp2_{kind}": {"context_parallel_size": 2, "context_parallel": kind} for kind in KINDS},
    "cp2_recompute": {"context_parallel_size": 2, "recompute": True},
    "pp2_cp2_ring": {**PP2, "context_parallel_size": 2, "context_parallel": "ring"},
    "pp2_cp2_recompute": {**PP2, "context_parallel_size": 2, "recompute": True},
}


def compare(
    ranks: Pools, layout: str, family: str, rtol: float, precision: str = "64-true", replicas: int = 1, **config: Any
) -> None:
    """Compare a layout with one process."""
    arguments = LAYOUTS[layout]
    expected, *_ = trained(None, family, precision, {**config, "replicas": replicas})
    axes = ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size", "context_parallel_size")
    size = math.prod(arguments.get(axis, 1) for axis in axes)
    found = ranks(size, lightning=True).run(trained, arguments, family, precision, config, timeout=200.0)
    for *losses, loss in zip(*[result.losses for result, *_ in found], expected.losses, strict=True):
        assert sum(losses) / size == pytest.approx(loss, rel=rtol)  # replicas have losses of their own
    for result, *_ in found:
        assert_same(result.weights, expected.weights, rtol)


def _marked(kept: set[tuple[str, str]], *layouts: str) -> list[Any]:
    return daily([(family, layout) for family in FAMILIES for layout in layouts], *kept)


@pytest.mark.parametrize(("family", "layout"), _marked({("Mixtral", "pp2")}, "pp2", "pp4", "pp2_recompute"))
def test_stages_have_the_losses_of_all_routers(ranks: Pools, family: str, layout: str) -> None:
    compare(ranks, layout, family, 1e-10)


@pytest.mark.parametrize(
    ("family", "layout"),
    _marked(
        {("Mixtral", "cp2_ulysses"), ("Qwen3Moe", "pp2_cp2_ring"), ("GptOss", "cp2_recompute")},
        *(f"cp2_{kind}" for kind in KINDS),
        *("cp2_recompute", "pp2_cp2_recompute"),
        "pp2_cp2_ring",
    ),
)
def test_shares_of_sequences_have_the_losses_of_all_routers(ranks: Pools, family: str, layout: str) -> None:
    """In float64 throughout: what rounds in float32 (norms, routers) rounds otherwise in shares, on some processors."""
    compare(ranks, layout, family, 1e-10, wide_loss=True, is_wide=True)


@pytest.mark.parametrize(
    ("family", "layout"),
    _marked({("Qwen3Moe", "tp2")}, "tp2", "pp2_dp2", "zero3", "pp2_zero3", "pp2_m4", "pp2_chunks2"),
)
def test_sums_over_ranks(ranks: Pools, family: str, layout: str) -> None:
    """Norms, routers and losses of transformers compute in float32, which rounds another sum to another number."""
    router = {} if layout == "tp2" else {"output_router_logits": False}  # replicas and microbatches have their own
    compare(ranks, layout, family, 1e-5, **router)


@pytest.mark.parametrize(
    ("family", "layout"),
    _marked({("Qwen3Moe", "pp2_dp2"), ("DeepseekV3", "tp2")}, "tp2", "pp2_dp2", "zero3", "pp2_zero3"),
)
def test_sums_over_ranks_in_float64(ranks: Pools, family: str, layout: str) -> None:
    """Each replica has the losses of its own routers, as with DDP."""
    replicas = LAYOUTS[layout].get("data_parallel_size", 1)
    compare(ranks, layout, family, 1e-10, replicas=replicas, is_wide=True)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
@pytest.mark.parametrize("layout", ["cp2_ring", "pp2_cp2_recompute"])
def test_attention_written_with_products(ranks: Pools, family: str, layout: str) -> None:
    """Of transformers, which adds a mask of the whole sequence to the scores of a share."""
    compare(ranks, layout, family, 1e-10, is_wide=True, attn_implementation="eager")


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_products(ranks: Pools, family: str) -> None:
    compare(ranks, "pp2", family, 1e-10, experts="batched_mm")


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("precision", "rtol"), [("32-true", 1e-4), ("bf16-mixed", 3e-2)])
def test_grouped_products(ranks: Pools, family: str, precision: str, rtol: float) -> None:
    expected, *_ = trained(None, family, precision, {"experts": "grouped_mm"})
    found = ranks(2, lightning=True).run(trained, PP2, family, precision, {"experts": "grouped_mm"}, timeout=200.0)
    for result, *_ in found:
        assert result.losses == pytest.approx(expected.losses, rel=rtol)


def test_microbatches_have_router_losses_of_their_own_which_is_stated(ranks: Pools) -> None:
    """The difference is below 1 %: microbatches stay."""
    layout, config = {"pipeline_parallel_size": 2}, {"router_aux_loss_coef": 0.01}
    found = ranks(2, lightning=True).run(trained, layout, "Mixtral", "64-true", config, timeout=200.0)
    result, (text,), calls = found[0]
    assert "product of means over the tokens of a batch" in text
    assert calls > 2 * STEPS
    expected, *_ = trained(None, "Mixtral", "64-true", config)
    assert result.losses == pytest.approx(expected.losses, rel=1e-3)
    assert result.losses != pytest.approx(expected.losses, rel=1e-8)
