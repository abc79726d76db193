"""A run by Ray Train, on a cluster that is there: ray_train.py ADDRESS WORKERS LAYOUT FOLDER [CHECKPOINTS DIES_AT]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.nodes.train import Dies
from tests.training_jobs import Regression, loader, make_trainer


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    import ray.train.lightning

    context = ray.train.get_context()
    os.environ["WORLD_SIZE"] = str(context.get_world_size())
    dies, checkpoints = Dies(config["dies_at"]), config["checkpoints"]
    saver = [ModelCheckpoint(checkpoints, every_n_train_steps=1, save_last=True)] if checkpoints else []
    trainer = make_trainer(
        config["layout"],
        devices="auto",
        max_epochs=2,
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[dies, *saver],
        enable_checkpointing=bool(saver),
    )
    trainer.fit(Regression(), loader(), ckpt_path="last" if checkpoints else None)
    steps = f"from step {dies.first} to step {trainer.global_step}"
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {steps}", flush=True)
    trainer.save_checkpoint(Path(config["folder"], "weights.ckpt"), weights_only=True)


def main(address: str, workers: str, layout: str, folder: str, checkpoints: str = "", dies_at: str = "-1") -> None:
    """Start them."""
    import ray
    import ray.train.torch

    ray.init(address, logging_level="warning", _node_ip_address=address.partition(":")[0])
    scaling = ray.train.ScalingConfig(num_workers=int(workers), resources_per_worker={"CPU": 1})
    again = ray.train.FailureConfig(max_failures=1)
    run = ray.train.RunConfig(storage_path=f"{folder}/ray", name="run", failure_config=again)
    config = {"layout": json.loads(layout), "folder": folder, "checkpoints": checkpoints, "dies_at": int(dies_at)}
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=scaling,
        run_config=run,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
