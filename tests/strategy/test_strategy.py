"""`HybridStrategy` on one process is Lightning's own; names, YAML and properties of the strategy."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lightning_hybrid import HybridStrategy, Launch, Tuning
from lightning_hybrid.axes import Sizes
from tests.pool import Pools
from tests.training_jobs import (
    PP2,
    Losses,
    Regression,
    Result,
    assert_same,
    loader,
    make_trainer,
    plain,
    train,
    weights,
)


class Eventful(Regression):
    """Dropout, batch statistics, logs and noise in the step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm1d(8).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.norm(self.embed(x + torch.randn_like(x)))
        loss = nn.functional.mse_loss(self.head(self.body(h)), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


def trained(layout: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    module, losses = Eventful(), Losses()
    defaults: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    trainer = make_trainer(layout, callbacks=[losses], **{**defaults, **arguments})
    trainer.fit(module, loader(8, shuffle=True), loader(8, 20, seed=2))
    validated = trainer.validate(module, loader(8, 20, seed=2), verbose=False)
    return {
        "losses": losses.values,
        "weights": weights(module),
        "buffers": dict(module.named_buffers()),
        "metrics": plain(trainer.callback_metrics),
        "validated": validated,
        "state": torch.get_rng_state(),
    }


def test_one_process_is_bit_equal_to_lightnings_own_strategy(ranks: Pools) -> None:
    pool = ranks(1, lightning=True)
    expected = trained(None)
    (result,) = pool.run(trained, {})
    assert_same(result, expected, 0.0)


def test_one_process_with_microbatches_or_chunks_trains_as_one_without(ranks: Pools) -> None:
    expected = fitted(None)
    for layout in (
        {"num_microbatches": 4},
        {"num_chunks": 2, "schedule": "interleaved_1f1b", "num_microbatches": 4},
        {"num_chunks": 3, "schedule": "gpipe"},
    ):
        (result,) = ranks(1, lightning=True).run(fitted, layout)
        assert_same(result, expected)


@pytest.mark.parametrize("layout", [{}, {"num_chunks": 2, "schedule": "interleaved_1f1b"}], ids=["1f1b", "chunks"])
def test_more_in_flight_trains_the_same_bit_by_bit(ranks: Pools, layout: dict[str, Any]) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 8, **layout}
    pool = ranks(2, lightning=True)
    (expected, _), (result, _) = (
        pool.run(fitted, {**layout, "tuning": Tuning(extra_in_flight=extra)}) for extra in (0, 3)
    )
    assert_same(result, expected, 0.0)


def fitted(layout: Any, **arguments: Any) -> Result:
    return train(Regression(), layout, loader(), loader(), max_epochs=2, **arguments)


def fitted_by_name(name: str) -> Result:
    return fitted({}, strategy=name)


@pytest.mark.rows(1, 3)
@pytest.mark.parametrize(("size", "name"), [(1, "hybrid"), (2, "hybrid_pp2"), (2, "HYBRID_PP2")])
def test_the_strategy_has_names(ranks: Pools, size: int, name: str) -> None:
    expected = fitted(None)
    for result in ranks(size, lightning=True).run(fitted_by_name, name):
        assert_same(result, expected)


@pytest.mark.rows(1)
def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    text = r"'hybrid_pp_3' is invalid. Its part 'pp' is not a short name followed by a number. .*'hybrid_dp2_tp2_pp4'"
    with pytest.raises(ValueError, match=text):
        make_trainer(None, strategy="hybrid_pp_3", devices=3)


# -- YAML -------------------------------------------------------------------------------------------------------------


class Trained(Regression):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader()


def from_yaml(path: str, words: list[str]) -> dict[str, Any]:
    cli = LightningCLI(Trained, args=["fit", "--config", path, *words], save_config_callback=None)
    return {"metrics": plain(cli.trainer.callback_metrics), "strategy": type(cli.trainer.strategy).__name__}


@pytest.mark.rows(2)
def test_yaml_and_the_command_line_make_the_strategy(ranks: Pools, tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "enable_model_summary": False, **quiet}
    arguments = {"pipeline_parallel_size": 2, "partition": [2, 4], "num_microbatches": 4, "data_parallel_size": "auto"}
    strategy = {"class_path": "lightning_hybrid.HybridStrategy", "init_args": arguments}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {**trainer, "strategy": strategy}}))
    expected = {"metrics": fitted(None).metrics, "strategy": "HybridStrategy"}
    words = ["--trainer.strategy.num_microbatches", "2", "--trainer.strategy.schedule", "gpipe"]
    for extra in ([], words):
        for result in ranks(2, lightning=True).run(from_yaml, str(path), extra):
            assert_same(result, expected)


@pytest.mark.parametrize(
    ("devices", "sizes", "num_microbatches"), [(4, (1, 1, 4), 16), (2, (1, 1, 2), 8), (6, (3, 1, 2), 8)]
)
def test_of_several_sizes_the_first_that_goes_with_the_processes_is_taken(
    devices: int, sizes: tuple[int, int, int], num_microbatches: int
) -> None:
    strategy = HybridStrategy(pipeline_parallel_size=[4, 2])
    assert strategy.settings.num_microbatches == 16  # of the first one, as long as the processes are not known
    Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)
    assert strategy.sizes == Sizes(*sizes)
    assert strategy.settings.num_microbatches == num_microbatches


def test_no_size_that_goes_with_the_processes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 processes .* pipeline_parallel_size \[4, 2\]"):
        Trainer(accelerator="cpu", devices=3, strategy=HybridStrategy(pipeline_parallel_size=[4, 2]), logger=False)


@pytest.mark.rows(2)
def test_every_argument_can_be_written_in_yaml(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": [4, 1],
        "global_batch_size": 64,
        "num_microbatches": "auto",
        "schedule": "interleaved_1f1b",
        "num_chunks": 2,
        "partition": "parameters",
        "body": "body",
        "broadcast_batches": False,
        "loss_reduction": "mean",
        "dynamic_shapes": True,
        "gather_module_on_teardown": True,
        "initial_weights": "weights.pt",
        "timeout": "0:10:00",
        "faults": {
            "heartbeat_timeout": 60,
            "stall_timeout": "0:03:00",
            "detect_desync": True,
            "on_nonfinite": "skip",
            "compare_microbatches": False,
        },
        "launch": {"start_method": "spawn", "process_group_backend": "gloo", "rank_order": "dp-pp-tp"},
        "tuning": {"extra_in_flight": "auto", "reshard_after_forward": False, "float32_gradients": True},
    }
    strategy = {"class_path": "lightning_hybrid.HybridStrategy", "init_args": arguments}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "devices": 1, "strategy": strategy}}))
    cli = LightningCLI(Trained, args=["--config", str(path)], run=False, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, HybridStrategy)
    settings = cli.trainer.strategy.settings
    assert (settings.seconds_of_heartbeat, settings.seconds_to_stall, settings.axis_order) == (60, 180, "dp-pp-tp")
    assert settings.tuning == Tuning(**arguments["tuning"])


# -- what the strategy tells ------------------------------------------------------------------------------------------


class Asks(Regression):
    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        value = torch.tensor(float(self.global_rank), dtype=torch.float64)
        self.told = {
            "world": (self.trainer.world_size, self.trainer.num_devices, self.trainer.is_global_zero),
            "sampler": self.trainer.distributed_sampler_kwargs,
            "mesh": self.device_mesh.mesh_dim_names,
            "sizes": tuple(self.device_mesh[name].size() for name in self.device_mesh.mesh_dim_names),
            "sum": strategy.reduce(value.clone(), reduce_op="sum").item(),
            "mean": strategy.reduce(value.clone()).item(),
            "max": strategy.reduce(value.clone(), reduce_op="max").item(),
            "gathered": self.all_gather(value).flatten().tolist(),
            "any": strategy.reduce_boolean_decision(self.global_rank == 1, all=False),
            "all": strategy.reduce_boolean_decision(self.global_rank != 1),
            "broadcast": strategy.broadcast({"rank": self.global_rank}, 1 % self.trainer.world_size),
        }


def asked(layout: dict[str, Any]) -> dict[str, Any]:
    module = Asks()
    make_trainer(layout).fit(module, loader())
    told = dict(module.told)
    assert dist.is_initialized()
    return told


@pytest.mark.rows(74)
@pytest.mark.parametrize("order", ["pp-dp-tp", "dp-pp-tp"])
def test_the_users_world_is_the_data_parallel_group(ranks: Pools, order: str) -> None:
    results = ranks(4, lightning=True).run(asked, {**PP2, "launch": Launch(rank_order=order)})
    for rank, told in enumerate(results):
        replica = rank % 2 if order == "pp-dp-tp" else rank // 2
        peers = [[0, 1], [2, 3]] if order == "pp-dp-tp" else [[0, 2], [1, 3]]
        (group,) = [ranks_ for ranks_ in peers if rank in ranks_]
        assert told["world"] == (4, 4, rank == 0)
        assert told["sampler"] == {"num_replicas": 2, "rank": replica}
        assert sorted(told["mesh"]) == ["data_parallel", "pipeline_parallel", "tensor_parallel"]
        assert sorted(told["sizes"]) == [1, 2, 2]
        assert told["sum"] == sum(group)
        assert told["mean"] == sum(group) / 2
        assert told["max"] == max(group)
        assert told["gathered"] == [float(peer) for peer in group]
        assert (told["any"], told["all"]) == (True, False)
        assert told["broadcast"] == {"rank": 1}


# -- on one process, everything that Lightning's own strategy can ------------------------------------------------------


def one_process(**arguments: Any) -> Trainer:
    return make_trainer(None, strategy="hybrid", **arguments)


def test_one_process_is_not_distributed() -> None:
    """Lightning refuses to tune the batch size otherwise, and notebooks refuse strategies that launch."""
    trainer = one_process()
    assert not trainer.strategy.is_distributed
    assert trainer.strategy.launcher is not None
    assert trainer.strategy.launcher.is_interactive_compatible


def test_a_strategy_without_groups_has_nobody_to_ask() -> None:
    strategy = one_process().strategy
    value = torch.tensor(2.0)
    assert strategy.reduce(value, reduce_op="sum") is value
    assert strategy.all_gather(value) is value
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(False, all=False)


@pytest.mark.parametrize(("name", "devices"), [("hybrid", 1), ("hybrid_pp2", 2)])
def test_batches_are_counted_and_checkpoints_saved_before_a_run(tmp_path: Path, name: str, devices: int) -> None:
    trainer, module = make_trainer(None, strategy=name, devices=devices, max_epochs=3), Trained()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    assert trainer.estimated_stepping_batches == 3 * len(loader())
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    saved = torch.load(tmp_path / "before.ckpt", weights_only=False)["state_dict"]
    assert_same(saved, dict(module.state_dict()), 0.0)


def seen_after(layout: dict[str, Any] | None, runs: int) -> list[Tensor]:
    """The first batch of each of some runs; each is seeded, and draws before it begins."""
    seen: list[Tensor] = []

    class Seen(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    for _ in range(runs):
        seed_everything(5, verbose=False)
        torch.rand(3)
        make_trainer(layout, max_steps=1).fit(Seen(), loader(shuffle=True))
    return seen


def test_random_state_is_that_of_lightnings_own_strategy_in_every_run(ranks: Pools) -> None:
    """A seed that was set again only where the process group was made would shuffle the first run differently."""
    (result,) = ranks(1, lightning=True).run(seen_after, {}, 2)
    assert_same(result, seen_after(None, 2), 0.0)


def pickled_after_a_run() -> tuple[int, bool]:
    trainer, module = one_process(), Regression()
    trainer.fit(module, loader())
    strategy = pickle.loads(pickle.dumps(trainer.strategy))
    return len(pickle.dumps(trainer)), strategy.is_alone


def test_a_trainer_can_be_pickled_after_a_run(ranks: Pools) -> None:
    ((size, alone),) = ranks(1, lightning=True).run(pickled_after_a_run)
    assert size > 0
    assert alone


def status_of_a_fork_that_collects_garbage() -> int:
    gc.disable()
    try:
        trainer, module = one_process(), Regression()
        trainer.fit(module, loader())
        dist.destroy_process_group()
        del trainer, module
        worker = os.fork()
        if worker == 0:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    return os.waitpid(worker, 0)[1]


def test_a_worker_of_a_loader_does_not_free_process_groups(ranks: Pools) -> None:
    """Their threads do not exist in a forked process, which died or hung whenever it happened to collect garbage."""
    assert ranks(1, lightning=True).run(status_of_a_fork_that_collects_garbage, timeout=30.0) == [0]
