"""Machines with disks of their own are found before training, and get the files that others have."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_hybrid.checkpoint import checkpointer
from lightning_hybrid.checkpoint.storage import atomic, disks
from lightning_hybrid.checkpoint.storage.disks import at_hand, check_shared
from tests.pool import Pools, RankError
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer, together, weights

SHARDED: dict[str, Any] = {**PP2, "save_distributed_checkpoint": True}


# -- before training ---------------------------------------------------------------------------------------------------


def said(folders: list[str], hosts: list[str]) -> tuple[str, int]:
    """What a rank is told of its folder, and how many gathers that takes."""
    gathers = mock.patch.object(disks, "all_gather_values", wraps=disks.all_gather_values)
    with mock.patch.object(atomic, "_LOOKS", 2), gathers as gather:
        text = ""
        try:
            assert dist.group.WORLD is not None
            check_shared([Path(folders[dist.get_rank()])], hosts, dist.group.WORLD)
        except (ValueError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
    return text, gather.call_count


def test_a_folder_that_not_all_machines_share_is_found(ranks: Pools, tmp_path: Path) -> None:
    own = [str(tmp_path / name / "ckpts") for name in ("one", "two", "two", "three")]
    hosts = ["node1", "node2", "node2", "node3"]
    texts = [text for text, _ in ranks(4).run(said, own, hosts)]
    assert len(set(texts)) == 1
    assert texts[0].startswith("ValueError: node1 does not see the files that node2 and node3 wrote to ")
    assert f"'{own[0]}'" in texts[0]
    assert "so the directory must be on a disk that all nodes share" in texts[0]
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
    assert "Error: node2 cannot write to the checkpoint folder: " in texts[0]


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
        mock.patch.object(checkpointer, "place_of", lambda path: Path(path).with_name(f"of {rank}")),
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
    assert "node1 does not see the files that node2 wrote to" in texts[0][0]
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


# -- loading -----------------------------------------------------------------------------------------------------------

NODES = ["node1", "node2", "node3", "node3"]


def received(base: str, hosts: list[str], victim: int | None) -> tuple[str, bytes | None, bool, list[str]]:
    """What a rank reads whose machine has a disk of its own, whether that is a copy, and what it is told."""
    rank = dist.get_rank()
    place = Path(base, hosts[rank], "last.ckpt")
    copied = mock.patch.object(disks, "reserve", side_effect=OSError("no space") if rank == victim else None)
    group = dist.group.WORLD
    assert group is not None
    found = None
    with (
        warnings.catch_warnings(record=True) as warned,
        mock.patch.multiple(disks, _MESSAGE=1000, _BLOCK=3000),
        mock.patch.object(rank_zero_only, "rank", rank, create=True),
        copied,
    ):
        warnings.simplefilter("always")
        try:
            with at_hand(place, hosts, group) as found:
                content = found.read_bytes() if found.is_file() else None
                dist.barrier()
        except (ValueError, OSError) as error:
            return f"{type(error).__name__}: {error}", None, False, []
    texts = [str(each.message) for each in warned if "is read on" in str(each.message)]
    dist.barrier()
    assert found == place or not found.exists()  # a copy goes, which ranks of one machine share
    return "", content, found != place, texts


def on_disks(base: Path, contents: dict[str, bytes]) -> str:
    for host, content in contents.items():
        (base / host).mkdir(parents=True)
        (base / host / "last.ckpt").write_bytes(content)
    return str(base)


CONTENT = bytes(range(256)) * 30 + b"the end"


@pytest.mark.parametrize(
    ("contents", "source", "receivers"),
    [
        ({"node1": CONTENT}, "node1", "node2 and node3"),
        ({"node2": CONTENT}, "node2", "node1 and node3"),
        ({"node1": CONTENT, "node2": b"another", "node3": CONTENT}, "node1", "node2"),
        ({"node3": b""}, "node3", "node1 and node2"),
    ],
    ids=["first", "second", "another file of the name", "empty"],
)
def test_a_file_is_sent_to_machines_that_do_not_see_it(
    ranks: Pools, tmp_path: Path, contents: dict[str, bytes], source: str, receivers: str
) -> None:
    results = ranks(4).run(received, on_disks(tmp_path, contents), NODES, None)
    expected = contents[source]
    assert [content for _, content, _, _ in results] == [expected] * 4
    assert [copied for _, _, copied, _ in results] == [contents.get(host) != expected for host in NODES]
    warned = [text for *_, texts in results for text in texts]
    assert len(warned) == 1
    assert f"/last.ckpt ({len(expected):,} bytes) is read on {source} and sent to {receivers}, where" in warned[0]


def test_what_no_machine_sees_or_all_see_is_not_sent(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(4).run(received, on_disks(tmp_path / "none", {}), NODES, None) == [("", None, False, [])] * 4
    everywhere = on_disks(tmp_path / "all", dict.fromkeys(NODES, CONTENT))
    assert ranks(4).run(received, everywhere, NODES, None) == [("", CONTENT, False, [])] * 4


def test_a_directory_that_some_machines_do_not_see_is_refused_by_name(ranks: Pools, tmp_path: Path) -> None:
    (tmp_path / "node2" / "last.ckpt").mkdir(parents=True)
    for node, (text, *_) in zip(NODES, ranks(4).run(received, str(tmp_path), NODES, None), strict=True):
        place = tmp_path / node / "last.ckpt"
        assert text.startswith(f"ValueError: The directory '{place}' exists on node2, but not on node1 and node3. ")


def test_a_machine_without_room_is_named_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    texts = [text for text, *_ in ranks(4).run(received, on_disks(tmp_path, {"node1": CONTENT}), NODES, 2)]
    assert len(set(texts)) == 1
    assert f"cannot create a copy of the checkpoint ({len(CONTENT):,} bytes) at " in texts[0]
    assert "last.ckpt: no space" in texts[0]


def resumed(path: str, other: str, max_steps: int) -> dict[str, Tensor]:
    """The weights after a run from a checkpoint that only rank 0 sees under its path."""
    rank, module = int(os.environ["RANK"]), Regression()
    trainer = make_trainer(PP2, max_epochs=2, max_steps=max_steps)
    with (
        mock.patch.object(socket, "gethostname", return_value=f"node{rank + 1}"),
        mock.patch.object(checkpointer, "place_of", lambda given: Path(other if rank else given)),
    ):
        trainer.fit(module, loader(), ckpt_path=path if max_steps > 2 else None)
        if max_steps == 2:
            trainer.save_checkpoint(path)
    return weights(module)


def test_a_run_goes_on_from_a_file_that_one_machine_sees(ranks: Pools, tmp_path: Path) -> None:
    path, other = str(tmp_path / "c.ckpt"), str(tmp_path / "elsewhere" / "c.ckpt")
    pool, whole = ranks(2, lightning=True), Regression()
    pool.run(resumed, path, other, 2)
    found = together(pool.run(resumed, path, other, 4))
    make_trainer(None, max_epochs=2, max_steps=4).fit(whole, loader())
    assert_same(found, weights(whole))


def test_a_file_that_no_machine_sees_is_missed_with_all_names(ranks: Pools, tmp_path: Path) -> None:
    missing = str(tmp_path / "c.ckpt")
    with pytest.raises(RankError, match=rf"Checkpoint file not found: {missing} \(searched on node1, nod"):
        ranks(2, lightning=True).run(resumed, missing, missing, 4)
