"""A run by Ray Train, on a cluster of Ray that is there: python ray_train.py ADDRESS WORKERS LAYOUT FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.training_jobs import Regression, loader, make_trainer


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    import ray.train.lightning

    context = ray.train.get_context()
    os.environ["WORLD_SIZE"] = str(context.get_world_size())
    trainer = make_trainer(
        config["layout"],
        devices="auto",
        max_epochs=2,
        plugins=[ray.train.lightning.RayLightningEnvironment()],
    )
    trainer.fit(Regression(), loader())
    print(f"rank {trainer.global_rank} of {trainer.world_size}: from step 0 to step {trainer.global_step}", flush=True)
    trainer.save_checkpoint(Path(config["folder"], "weights.ckpt"), weights_only=True)


def main(address: str, workers: str, layout: str, folder: str) -> None:
    """Start them."""
    import ray
    import ray.train.torch

    ray.init(address, logging_level="warning", _node_ip_address=address.partition(":")[0])
    scaling = ray.train.ScalingConfig(num_workers=int(workers), resources_per_worker={"CPU": 1})
    run = ray.train.RunConfig(storage_path=f"{folder}/ray", name="run")
    config = {"layout": json.loads(layout), "folder": folder}
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=scaling,
        run_config=run,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
