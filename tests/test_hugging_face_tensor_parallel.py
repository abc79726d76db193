"""Models of transformers, their classes unchanged, whose layers several ranks share: the numbers of one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import full_tensor, is_sharded
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from tests.pool import Pools
from tests.results import Results, listed
from tests.training_jobs import Losses, assert_same, make_trainer
from tests.transparency import FOUND_SUBJECTS, Case, compare
from tests.zoo import hugging_face as hf_zoo

pytest.importorskip("transformers")

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)

TP2 = {"tensor_parallel_size": 2}
LAYOUTS = ["tp2", "tp2_dp2", "tp4", "frame_tp2_pp2"]
CASES = [Case(*pair, "1f1b") for pair in itertools.product(FOUND_SUBJECTS, LAYOUTS)]
CASES.sort(key=lambda case: case.size)
DAILY = {"found_gpt2": "tp2", "found_bert": "tp2", "found_timm": "tp2", "found_llama": "tp2_dp2"}
DAILY |= {"found_mistral": "frame_tp2_pp2"}


def _marked(case: Case) -> Any:
    is_daily = DAILY.get(case.subject) == case.layout
    return pytest.param(case, id=str(case), marks=() if is_daily else pytest.mark.thorough)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


def made(name: str, **config: Any) -> Any:
    """A module in float64."""
    torch.manual_seed(7)
    base = hf_zoo.in_float64(hf_zoo.MODULES[name])
    return type(name, (base,), {"config": {**base.config, **config}})().double()


# -- what comes out ----------------------------------------------------------------------------------------------------


def logits(module: Any) -> Tensor:
    """Of a batch, without the Trainer."""
    batch = next(iter(module.val_dataloader()))
    with torch.no_grad():
        return module.eval().model(**batch).logits


def attributes(module: nn.Module) -> dict[str, Any]:
    """Classes, and the numbers that modules compute with."""
    layers = module.model.named_modules()
    numbers = (int, float, str, bool)
    return {
        name: (type(layer), {key: value for key, value in vars(layer).items() if isinstance(value, numbers)})
        for name, layer in layers
    }


def trained(layout: Mapping[str, Any] | None, name: str, path: str) -> tuple[Tensor, bool]:
    """Train and save a checkpoint; then logits of the module made whole, and whether it is what it was."""
    module = made(name)
    before = attributes(module)
    trainer = make_trainer(layout, max_epochs=2, limit_val_batches=0)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    if layout is not None:
        assert attributes(module) != before
        trainer.strategy.gather_module()
    return logits(module), attributes(module.train()) == before


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    ["gpt2", "t5", pytest.param("llama", marks=pytest.mark.thorough), pytest.param("bert", marks=pytest.mark.thorough)],
)
def test_checkpoints_are_ordinary_and_the_module_can_be_made_whole(ranks: Pools, tmp_path: Path, name: str) -> None:
    expected, _ = trained(None, name, str(tmp_path / "one.ckpt"))
    for found, is_restored in ranks(2, lightning=True).run(trained, TP2, name, str(tmp_path / "two.ckpt")):
        assert is_restored
        assert_same(found, expected)
    one, two = (torch.load(tmp_path / f"{each}.ckpt", weights_only=False)["state_dict"] for each in ("one", "two"))
    assert_same(two, one)
    module = made(name)
    module.load_state_dict(two)
    assert_same(logits(module), expected)


# -- dropout -----------------------------------------------------------------------------------------------------------

DROPPING: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.1},
    "t5": {"dropout_rate": 0.5},
    "llama": {"attention_dropout": 0.5},
}


def dropped(name: str) -> tuple[list[float], dict[str, Tensor], Tensor, Tensor]:
    """Losses, whole parameters, the random state between the layers of a block, and what the model gave."""
    module = made(name, **DROPPING[name])
    row = {
        "gpt2": "model.transformer.h.1.attn.c_proj",
        "t5": "model.encoder.block.1.layer.1.DenseReluDense.wo",
        "llama": "model.model.layers.1.self_attn.o_proj",
    }[name]
    states: list[Tensor] = []
    outputs: list[Tensor] = []

    class Watch(Callback):
        """When layers are divided: one that has a hook before stays whole."""

        def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
            layer = module.get_submodule(row)
            layer.register_forward_pre_hook(lambda layer, args: states.append(torch.get_rng_state()))

    module.model.register_forward_hook(lambda layer, args, output: outputs.append(output.logits.detach()))
    losses = Losses()
    make_trainer(TP2, limit_val_batches=0, callbacks=[losses, Watch()]).fit(module)
    whole = {key: value.detach() for key, value in module.named_parameters() if not is_sharded(value)}
    return losses.values, whole, states[0], full_tensor(to_plain_tensors(outputs[0]))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("t5", "llama"))]
)
def test_dropout_differs_on_shards_and_keeps_ranks_together(ranks: Pools, name: str) -> None:
    first, second = ranks(2, lightning=True).run(dropped, name)
    again, _ = ranks(2, lightning=True).run(dropped, name)
    assert first[0] == second[0] == again[0]
    for key, value in first[1].items():
        assert torch.equal(value, second[1][key]), key
    assert torch.equal(first[3], second[3])
    assert torch.equal(first[2], again[2])
    assert not torch.equal(first[2], second[2])


# -- messages ----------------------------------------------------------------------------------------------------------


def sums(name: str) -> int:
    """How many sums over ranks two layers more cost in a forward and a backward."""
    counts = []
    for layers in (2, 2, 4):  # groups are made in the first run
        module = made(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": layers})
        trainer = make_trainer(TP2, max_steps=1, limit_val_batches=0)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            trainer.fit(module)
        counts.append(all_reduce.call_count)
    return counts[2] - counts[1]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_layer_costs_two_sums_in_forward_and_two_in_backward(ranks: Pools, name: str) -> None:
    assert ranks(2, lightning=True).run(sums, name) == [2 * 4] * 2
