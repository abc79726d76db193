"""Machines with disks of their own are found before training, and get the files that others have."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hybrid.checkpoint import checkpointer
from lightning_hybrid.checkpoint.storage import atomic
from lightning_hybrid.checkpoint.storage.disks import check_shared
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer

SHARDED: dict[str, Any] = {**PP2, "save_distributed_checkpoint": True}


# -- before training ---------------------------------------------------------------------------------------------------


def said(folders: list[str], hosts: list[str]) -> tuple[str, int]:
    """What a rank is told of its folder, and how many gathers that takes."""
    gathers = mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object)
    with mock.patch.object(atomic, "_LOOKS", 2), gathers as gather:
        text = ""
        try:
            check_shared([Path(folders[dist.get_rank()])], hosts)
        except (ValueError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
    return text, gather.call_count


def test_a_folder_that_not_all_machines_share_is_found(ranks: Pools, tmp_path: Path) -> None:
    own = [str(tmp_path / name / "ckpts") for name in ("one", "two", "two", "three")]
    hosts = ["node1", "node2", "node2", "node3"]
    texts = [text for text, _ in ranks(4).run(said, own, hosts)]
    assert len(set(texts)) == 1
    assert texts[0].startswith("ValueError: node1 does not see what node2 and node3 have written into the folder ")
    assert f"'{own[0]}'" in texts[0]
    assert "its disk must be one that all machines share" in texts[0]
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_folder_that_all_machines_share_takes_one_gather_and_on_one_machine_none(
    ranks: Pools, tmp_path: Path
) -> None:
    shared = [str(tmp_path / "ckpts")] * 2
    assert ranks(2).run(said, shared, ["node1", "node2"]) == [("", 1)] * 2
    assert list((tmp_path / "ckpts").iterdir()) == []
    assert ranks(2).run(said, [str(tmp_path / "never made")] * 2, ["node1", "node1"]) == [("", 0)] * 2
    assert not (tmp_path / "never made").exists()


def test_a_machine_that_cannot_write_is_named(ranks: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [str(tmp_path / "ckpts"), str(tmp_path / "file" / "ckpts")]
    texts = [text for text, _ in ranks(2).run(said, folders, ["node1", "node2"])]
    assert texts[0] == texts[1]
    assert "Error: node2 cannot write where checkpoints are going to be: " in texts[0]


class Steps(Callback):
    """Counts batches."""

    count = 0

    def on_train_batch_start(self, *_: Any) -> None:
        """Count one."""
        self.count += 1


def begun(folder: str, checkpoints: bool, layout: dict[str, Any], fast: bool) -> tuple[str, int]:
    """How a run begins where each rank is a machine, with a disk of its own."""
    rank, steps = int(os.environ["RANK"]), Steps()
    saver = [ModelCheckpoint(folder)] if checkpoints else []
    trainer = make_trainer(
        layout, callbacks=[steps, *saver], enable_checkpointing=checkpoints, fast_dev_run=fast, max_steps=1
    )
    with (
        mock.patch.object(socket, "gethostname", return_value=f"node{rank + 1}"),
        mock.patch.object(checkpointer, "local_path", lambda path: Path(path).with_name(f"of {rank}")),
        mock.patch.object(atomic, "_LOOKS", 2),
    ):
        try:
            trainer.fit(Regression(), loader())
        except ValueError as error:
            return str(error), steps.count
    return "", steps.count


def test_disks_of_their_own_are_found_before_the_first_step(ranks: Pools, tmp_path: Path) -> None:
    texts = ranks(2, lightning=True).run(begun, str(tmp_path / "ckpts"), True, SHARDED, False)
    assert texts[0] == texts[1]
    assert "node1 does not see what node2 has written into the folder" in texts[0][0]
    assert texts[0][1] == 0


@pytest.mark.parametrize(
    ("checkpoints", "layout", "fast"),
    [(False, SHARDED, False), (True, SHARDED, True)],
    ids=["without ModelCheckpoint", "fast_dev_run"],
)
def test_who_saves_nothing_needs_no_shared_disk(
    ranks: Pools, tmp_path: Path, checkpoints: bool, layout: Any, fast: bool
) -> None:
    results = ranks(2, lightning=True).run(begun, str(tmp_path / "ckpts"), checkpoints, layout, fast)
    assert results == [("", 1)] * 2
