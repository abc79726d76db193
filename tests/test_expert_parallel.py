"""Experts sharded over replicas: losses, norms and weights of one process, with classes of transformers unchanged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Tuning
from lightning_hybrid.cli.export import export
from tests.daily import daily
from tests.pool import Pools
from tests.results import Results, listed
from tests.test_mixture_of_experts import FAMILIES, VOCABULARY, Experts, wide
from tests.test_precision_features import half_plugin
from tests.training_jobs import Result, assert_same, make_trainer, train
from tests.transparency import EXPERT_LAYOUTS, EXPERT_SUBJECTS, SCHEDULES, Case, allowed, compare, cover, layout_of
from tests.zoo.experts import FirstChoice

pytestmark = [pytest.mark.timeout(600), pytest.mark.distributed]

STEPS, SAMPLES = 3, 16


# -- own code ----------------------------------------------------------------------------------------------------------


def _possible(subject: str, layout: str, schedule: str) -> bool:
    """Leave out `sparse_words` with context parallelism: its blocks build a mask of all positions inside the layer."""
    return allowed(subject, layout, schedule) and (subject != "sparse_words" or layout_of(layout).context == 1)


CASES = [Case(*triple) for triple in cover(EXPERT_SUBJECTS, EXPERT_LAYOUTS, SCHEDULES, _possible)]
CASES.sort(key=lambda case: case.size)


def _marked(case: Case) -> Any:
    number = list(EXPERT_SUBJECTS).index(case.subject) + list(EXPERT_LAYOUTS).index(case.layout)
    is_daily = number % 9 == 0 and case.size <= 4
    return pytest.param(case, id=str(case), marks=() if is_daily else pytest.mark.thorough)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_own_code_in_float64(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


# -- models of transformers --------------------------------------------------------------------------------------------


class Language(Experts):
    """A model with AdamW, which treats a missing gradient differently from zeros. It records gradient norms."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = self.trainer.strategy.grad_norm() if hasattr(self.trainer.strategy, "grad_norm") else None
        if norm is None:
            norm = torch.nn.utils.get_total_norm([each.grad for each in self.parameters() if each.grad is not None])
        self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def trained(
    layout: Mapping[str, Any] | None, family: str, replicas: int, trainer: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Result, list[float]]:
    """Train, and return the result and the gradient norms."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    layout = layout and dict(layout)
    tokens = torch.randint(VOCABULARY, (SAMPLES * STEPS, 12), generator=torch.Generator().manual_seed(1))
    with wide(family):
        module = Language(family, replicas=1 if layout else replicas, **config)
        num_samples = SAMPLES // (replicas if layout else 1)
        result = train(module, layout, DataLoader(TensorDataset(tokens), num_samples), precision="64-true", **trainer)
    return result, module.norms


EP2: dict[str, Any] = {"data_parallel_size": 2, "expert_parallel_size": 2}
EP2_OF4: dict[str, Any] = {"data_parallel_size": 4, "expert_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 1}
TENSOR_EP2: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel": "tensor"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": EP2,
    "ep4": {"data_parallel_size": 4, "expert_parallel_size": 4},
    "ep2_of4": EP2_OF4,
    "ep2_pp2": {**EP2, **PP2},
    "ep2_pp2_recompute": {**EP2, **PP2, "recompute": True},
    "ep2_recompute": {**EP2, "recompute": True},
    "ep2_tp2": {**EP2, "tensor_parallel_size": 2},
    "ep2_cp2": {**EP2, "context_parallel_size": 2, "context_parallel": "ring"},
    **{f"ep2_zero{stage}": {**EP2, "zero_stage": stage} for stage in (1, 2, 3)},
    **{f"ep2_of4_zero{stage}": {**EP2_OF4, "zero_stage": stage} for stage in (1, 2, 3)},
    "ep4_zero3_of2": {"data_parallel_size": 4, "expert_parallel_size": 4, "zero_stage": 3, "zero_size": 2},
    "ep2_zero1_of2": {**EP2_OF4, "zero_stage": 1, "zero_size": 2},
    "ep2_pp2_zero2": {**EP2, **PP2, "zero_stage": 2},
    "ep2_pp2_zero3": {**EP2, **PP2, "zero_stage": 3},
    "ep2_zero3_early": {**EP2, "zero_stage": 3, "tuning": Tuning(reshard_after_forward=True)},
    "ep2_of4_zero3_early": {**EP2_OF4, "zero_stage": 3, "tuning": Tuning(reshard_after_forward=True)},
    "ep2_of8_zero3_of4": {**EP2, "data_parallel_size": 8, "zero_stage": 3, "zero_size": 4},
    "tensor_ep2": TENSOR_EP2,
    "tensor_ep4": {**TENSOR_EP2, "tensor_parallel_size": 4},
    "tensor_ep2_pp2_recompute": {**TENSOR_EP2, **PP2, "recompute": True},
    "tensor_ep2_cp2": {**TENSOR_EP2, "context_parallel_size": 2},
    **{f"tensor_ep2_zero{stage}": {**TENSOR_EP2, "data_parallel_size": 2, "zero_stage": stage} for stage in (1, 3)},
}


def compare_family(
    ranks: Pools,
    layout: str,
    family: str,
    rtol: float = 1e-10,
    trainer: Mapping[str, Any] | None = None,
    **config: Any,
) -> None:
    """Compare a layout with one process."""
    arguments, size = LAYOUTS[layout], 1
    for axis in ("pipeline", "data", "tensor", "context"):
        size *= arguments.get(f"{axis}_parallel_size", 1)
    replicas = arguments.get("data_parallel_size", 1)
    expected, norms = trained(None, family, replicas, trainer or {}, config)
    found = ranks(size, lightning=True).run(trained, arguments, family, replicas, trainer or {}, config, timeout=200.0)
    for *losses, loss in zip(*[result.losses for result, *_ in found], expected.losses, strict=True):
        assert sum(losses) / size == pytest.approx(loss, rel=rtol)  # replicas have losses of their own
    for result, norms_of_rank in found:
        assert_same(result.weights, expected.weights, rtol)
        assert norms_of_rank == pytest.approx(norms, rel=rtol)


@pytest.mark.parametrize(
    ("family", "layout"),
    daily([(family, layout) for family in FAMILIES for layout in LAYOUTS], ("Mixtral", "ep2"), ("GptOss", "ep2_pp2")),
)
def test_replicas_share_experts(ranks: Pools, family: str, layout: str) -> None:
    compare_family(ranks, layout, family)


@pytest.mark.parametrize("family", daily(FAMILIES))
def test_batched_products(ranks: Pools, family: str) -> None:
    compare_family(ranks, "ep2_pp2", family, experts="batched_mm")


# -- folders of Hugging Face ------------------------------------------------------------------------------------------


def from_folder(layout: dict[str, Any] | None, family: str, replicas: int, folder: str, path: str) -> dict[str, Any]:
    """Train from a folder of Hugging Face, save a checkpoint, and return the weights of the whole model."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tokens = torch.randint(VOCABULARY, (2 * SAMPLES, 12), generator=torch.Generator().manual_seed(1))
    with wide(family):
        module = Language(family, replicas=1 if layout else replicas)
        module.save_hyperparameters({"config": module.model.config})
        if layout is None:
            module.model = type(module.model).from_pretrained(folder, experts_implementation="eager").train()
        arguments = layout and {**layout, "initial_weights": folder}
        trainer = make_trainer(arguments, precision="64-true", limit_val_batches=0)
        trainer.fit(module, DataLoader(TensorDataset(tokens), SAMPLES // (replicas if layout else 1)))
        if layout is not None:
            trainer.save_checkpoint(path)
            trainer.strategy.gather_module()
    return dict(module.model.state_dict())


@pytest.mark.parametrize(
    ("family", "layout"),
    daily([(family, layout) for family in FAMILIES for layout in ("ep2", "ep2_of4_zero3")], ("Mixtral", "ep2")),
)
def test_a_folder_is_trained_and_exported(ranks: Pools, tmp_path: Path, family: str, layout: str) -> None:
    """`save_pretrained` writes each expert separately for most families."""
    folder, path = tmp_path / "folder", tmp_path / "checkpoint.ckpt"
    torch.manual_seed(7)
    model = Language(family).model
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    arguments = {**LAYOUTS[layout], "save_distributed_checkpoint": layout != "ep2"}
    size = arguments["data_parallel_size"]
    expected = from_folder(None, family, size, str(folder), "")
    results = ranks(size, lightning=True).run(from_folder, arguments, family, size, str(folder), str(path))
    for found in results:
        assert_same(found, expected, 1e-10)
    export(path, tmp_path / "out")
    exported = type(model).from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert_same(dict(exported.state_dict()), found, 0.0)


# -- several runs ------------------------------------------------------------------------------------------------------


def two_runs(layouts: list[dict[str, Any]]) -> str:
    module = FirstChoice()
    short: dict[str, Any] = {"max_steps": 1, "limit_val_batches": 0}
    make_trainer({**layouts[0], "gather_module_on_teardown": False}, **short).fit(module)
    with pytest.raises(ValueError, match="An earlier run sharded FirstChoice over 2 replicas") as caught:
        make_trainer(layouts[1], **short).fit(module)
    return str(caught.value)


@pytest.mark.parametrize(
    "layouts", [[{"expert_parallel_size": 2}, {}], [{"zero_stage": 3}, {"expert_parallel_size": 2}]]
)
def test_a_module_that_stays_divided_is_not_trained_otherwise(ranks: Pools, layouts: list[dict[str, Any]]) -> None:
    for text in ranks(2, lightning=True).run(two_runs, layouts):
        assert "strategy.gather_module()" in text


class LeavesOut(FirstChoice):
    """Has no loss for the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            return None
        return loss


def left_out() -> str:
    layout = {"data_parallel_size": 2, "expert_parallel_size": 2, "num_microbatches": 2}
    with pytest.raises(ValueError, match=r"returned None for a microbatch.*\[LH727\]") as caught:
        make_trainer(layout, limit_val_batches=0).fit(LeavesOut())
    return str(caught.value)


def test_each_microbatch_needs_a_loss(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(left_out):
        assert "a loss multiplied by 0" in text


# -- precision ---------------------------------------------------------------------------------------------------------


def trained_in(layout: dict[str, Any], precision: str) -> Result:
    torch.manual_seed(3)
    module = FirstChoice(batch_size=4)
    how: dict[str, Any] = {"plugins": half_plugin()} if precision == "16-mixed" else {"precision": precision}
    return train(module, layout, gradient_clip_val=0.5, limit_val_batches=0, **how)


@pytest.mark.parametrize(
    ("precision", "arguments"),
    [
        ("bf16-mixed", {}),
        ("16-mixed", {}),
        pytest.param("bf16-true", {"master_weights": True}, marks=pytest.mark.thorough),
        pytest.param("16-true", {"master_weights": True, "zero_stage": 1}, marks=pytest.mark.thorough),
        pytest.param("bf16-mixed", {"zero_stage": 3, "recompute": True}, marks=pytest.mark.thorough),
        pytest.param("32-true", {"tuning": Tuning(float32_gradients=True)}, marks=pytest.mark.thorough),
    ],
)
def test_precision(ranks: Pools, precision: str, arguments: dict[str, Any]) -> None:
    """Compare with replicas that each hold all experts. Other tests compare such replicas with one process."""
    replicas = {"data_parallel_size": 2, **arguments}
    wholes = ranks(2, lightning=True).run(trained_in, replicas, precision)
    parts = ranks(2, lightning=True).run(trained_in, {**replicas, "expert_parallel_size": 2}, precision)
    for result, expected in zip(parts, wholes, strict=True):
        assert result.losses == pytest.approx(expected.losses, rel=0.02)
        assert_same(result.weights, expected.weights, 1e-4 if precision == "32-true" else 0.03)
