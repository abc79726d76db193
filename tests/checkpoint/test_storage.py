"""What is written to the disk is complete under its name, or not there at all."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_hybrid.checkpoint.storage import atomic, dcp_writer
from lightning_hybrid.checkpoint.storage.atomic import discard, new_file
from lightning_hybrid.checkpoint.storage.background import BackgroundWriter
from lightning_hybrid.checkpoint.storage.chunks import local_chunks
from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.checkpoint.storage.dcp_writer import write_directory
from lightning_hybrid.distributed.dtensor import flatten_blocks
from tests.pool import Pools

# -- atomic ------------------------------------------------------------------------------------------------------------

STEPS = ("_remove", "_exchange")
RENAMES = ("rename", "replace")


def killed_at(step: int, job: Callable[[], None], *, exchange: bool) -> bool:
    """Run a job in a process that dies when it comes to its `step`-th operation; whether it got there."""
    child = os.fork()
    if child == 0:
        left = step

        def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return operation(*args)

            return counted

        for name in STEPS:
            setattr(atomic, name, dying(getattr(atomic, name)))
        if not exchange:
            atomic._exchange = lambda *_: False
        for name in RENAMES:
            setattr(Path, name, dying(getattr(Path, name)))
        job()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def make(path: Path, kind: str, text: str) -> None:
    """A file, or a directory with a file that says that it is complete."""
    if kind == "file":
        path.write_text(text)
    else:
        path.mkdir()
        (path / ".metadata").write_text(text)


def content(path: Path) -> str:
    path = atomic.resolve(path)
    return (path / ".metadata" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("new", ["file", "directory"])
@pytest.mark.parametrize("old", ["file", "directory"])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path: Path, old: str, new: str, exchange: bool) -> None:
    found = []
    for step in range(20):
        path = tmp_path / f"{step}"
        make(path, old, "old")
        make(atomic.unfinished(path), new, "new")
        was_killed = killed_at(step, lambda path=path: atomic.commit(path), exchange=exchange)
        if (old, new, exchange) == ("directory", "file", False) and not path.exists():
            continue  # a file that takes the place of a directory: only with two renames, and only then
        found.append(content(path))
        if not was_killed:
            break
    else:
        pytest.fail("never came to an end")
    assert found == sorted(found, reverse=True)  # once new, always new
    assert found[0] == "old"
    assert found[-1] == "new"
    path = tmp_path / "0"  # leftovers are no obstacle
    atomic.rollback(path)
    make(atomic.unfinished(path), new, "newer")
    atomic.commit(path)
    assert content(path) == "newer"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".0.")] == []


def test_a_kill_while_something_is_removed_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    for step in range(10):
        path = tmp_path / f"{step}"
        make(path, "directory", "old")
        was_killed = killed_at(step, lambda path=path: discard(path), exchange=True)
        assert not path.exists() or content(path) == "old"
        if not was_killed:
            assert not path.exists()
            break


def write_half(path: Path) -> None:
    with new_file(path) as new:
        new.write_text("ne")
        raise OSError("no place")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "below" / "file"
    with new_file(path) as new:
        new.write_text("old")
    with pytest.raises(OSError, match="no place"):
        write_half(path)
    assert path.read_text() == "old"
    assert [each.name for each in path.parent.iterdir()] == ["file"]
    discard(path)
    discard(path)
    assert list(path.parent.iterdir()) == []


# -- chunks ------------------------------------------------------------------------------------------------------------


def reassembled(shape: tuple[int, ...], placements: list[Any], sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A tensor put together from the chunks of all ranks, and the tensor."""
    mesh = init_device_mesh("cpu", sizes)
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return gathered(distribute_tensor(full, mesh, placements)), full


def gathered(tensor: DTensor) -> Tensor:
    local = [(tuple(offset), chunk.clone()) for offset, chunk in local_chunks(tensor)]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, local)
    result = torch.full(tensor.shape, -1.0, dtype=tensor.dtype)
    for offset, chunk in (each for chunks in by_rank for each in chunks):
        result[tuple(slice(begin, begin + length) for begin, length in zip(offset, chunk.shape, strict=True))] = chunk
    return result


@pytest.mark.parametrize(
    ("shape", "placements", "sizes"),
    [
        ((6, 4), [Shard(0)], (4,)),
        ((5,), [Shard(0)], (4,)),
        ((3,), [Shard(0)], (4,)),
        ((4, 6), [Shard(1)], (4,)),
        ((4, 6), [Shard(0), Shard(1)], (2, 2)),
        ((8, 3), [Shard(0), Shard(0)], (2, 2)),
        ((4, 3), [Replicate(), Shard(0)], (2, 2)),
        ((), [Replicate()], (4,)),
    ],
    ids=str,
)
def test_chunks_of_all_ranks_are_the_tensor(ranks: Pools, shape: Any, placements: Any, sizes: Any) -> None:
    for result, full in ranks(4).run(reassembled, shape, placements, sizes):
        assert torch.equal(result, full)


def packed() -> tuple[Tensor, Tensor, int]:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(12 * 5, dtype=torch.float64).view(3, 4, 5)
    tensor = flatten_blocks(distribute_tensor(full, mesh, [Shard(1)]), 0)
    return gathered(tensor), full.flatten(0, 1), len(list(local_chunks(tensor)))


def test_a_packed_projection_falls_into_its_blocks(ranks: Pools) -> None:
    for result, full, count in ranks(2).run(packed):
        assert torch.equal(result, full)
        assert count == 3


def test_a_plain_tensor_is_one_chunk() -> None:
    ((offset, chunk),) = local_chunks(torch.ones(2, 3, requires_grad=True))
    assert (tuple(offset), chunk.shape, chunk.requires_grad) == ((0, 0), (2, 3), False)


# -- directories -------------------------------------------------------------------------------------------------------


def entries(rank: int, factor: float = 1.0) -> dict[Any, Any]:
    """A shared, an own, and a sharded tensor, and a value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    divided = distribute_tensor(factor * torch.arange(24, dtype=torch.float64).view(3, 8), mesh, [Shard(1)])
    return {
        ("model", "shared"): factor * torch.arange(4.0),
        ("model", f"own {rank}"): factor * torch.full((2,), float(rank)),
        ("model", "divided"): divided,
        ("groups", 0, "lr"): 0.1 * factor,
    }


def write(path: str, factor: float = 1.0) -> None:
    group = dist.group.WORLD
    assert group is not None
    write_directory(Path(path), entries(dist.get_rank(), factor), {"epoch": factor}, group)


def read(path: str) -> dict[Any, Any]:
    """Everything, sharded in another way."""
    directory = DistributedCheckpoint(Path(path))
    directory.check_files()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    targets: dict[Any, Any] = {}
    for tree_path, entry in directory.entries.items():
        targets[tree_path] = torch.empty(entry.size, dtype=entry.properties.dtype) if entry else None
    targets["model", "divided"] = distribute_tensor(torch.zeros(3, 8, dtype=torch.float64), mesh, [Shard(0)])
    values = directory.read(targets)
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}


def test_what_some_ranks_wrote_others_read(ranks: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    for factor in (1.0, 2.0):  # the second replaces the first
        ranks(2).run(write, path, factor)
        for values in ranks(3).run(read, path):
            assert torch.equal(values["model", "shared"], factor * torch.arange(4.0))
            assert torch.equal(values["model", "own 1"], factor * torch.ones(2))
            assert torch.equal(values["model", "divided"], factor * torch.arange(24, dtype=torch.float64).view(3, 8))
            assert values["groups", 0, "lr"] == 0.1 * factor
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    assert torch.load(tmp_path / "saved" / "meta.pt", weights_only=True) == {"epoch": 2.0}
    sizes = [file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp")]
    assert max(sizes) < 2 * min(sizes)  # both have written


def directories_made(path: str) -> int:
    """How many directories a rank makes, where an earlier save has left half of one."""
    make, made = Path.mkdir, []

    def counted(directory: Path, *arguments: Any, **options: Any) -> None:
        made.append(directory)
        make(directory, *arguments, **options)

    with mock.patch.object(Path, "mkdir", counted):
        write(path)
    return len(made)


def test_the_first_rank_alone_makes_the_directory(ranks: Pools, tmp_path: Path) -> None:
    """Another one that made it while the first removed what an earlier save had left found it, and found it gone."""
    assert ranks(3).run(directories_made, str(tmp_path / "saved")) == [1, 0, 0]


def write_on_own_disk(path: str, own: str, factor: float) -> str:
    """What a rank says whose machine has another disk under the same name, where there is a directory or not."""
    unfinished = dcp_writer.unfinished
    with (
        mock.patch.object(dcp_writer, "unfinished", lambda path: Path(own) if dist.get_rank() else unfinished(path)),
        mock.patch.object(atomic, "_LOOKS", 2),
    ):
        try:
            write(path, factor)
        except OSError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("is_there", [False, True], ids=["no directory", "another directory"])
def test_a_directory_whose_parts_are_on_several_disks_does_not_take_the_place_of_the_last(
    ranks: Pools, tmp_path: Path, is_there: bool
) -> None:
    path, own = tmp_path / "shared" / "saved", tmp_path / "own"
    if is_there:
        own.mkdir()
    ranks(2).run(write, str(path), 1.0)
    texts = ranks(2).run(write_on_own_disk, str(path), str(own), 2.0)
    assert texts[0] == texts[1]
    assert f"{socket.gethostname()} does not see " in texts[0]
    assert (f"bytes of '{path.parent}/.saved.unfinished/__1_0.distcp' that " in texts[0]) == is_there
    assert (f"the folder '{own}'" in texts[0]) != is_there
    assert "so the directory must be on a disk that all nodes share" in texts[0]
    assert [each.name for each in path.parent.iterdir()] == ["saved"]
    assert ranks(2).run(read, str(path))[0]["groups", 0, "lr"] == 0.1


def test_torch_alone_opens_a_directory(ranks: Pools, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    ranks(2).run(write, str(tmp_path / "saved"))
    dcp_to_torch_save(str(tmp_path / "saved"), str(tmp_path / "file"))
    tree = torch.load(tmp_path / "file", weights_only=True)
    assert torch.equal(tree["model"]["divided"], torch.arange(24, dtype=torch.float64).view(3, 8))
    assert tree["groups"] == [{"lr": 0.1}]


def damaged(path: Path, fault: str) -> None:
    shard = sorted(path.glob("*.distcp"))[1]
    if fault == "missing shard":
        shard.unlink()
    elif fault == "short shard":
        os.truncate(shard, shard.stat().st_size - 10)
    elif fault == "unfinished":
        (path / ".metadata").unlink()
    elif fault == "short metadata":
        os.truncate(path / ".metadata", 100)
    elif fault == "nothing":
        discard(path)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("missing shard", ValueError, "incomplete on .*: the file '__1_0.distcp' \\(at least .* bytes\\) is missing"),
        ("short shard", ValueError, "'__1_0.distcp' has .* bytes, but it must have at least "),
        ("unfinished", ValueError, "not a complete checkpoint"),
        ("short metadata", ValueError, "metadata cannot be read"),
        ("nothing", FileNotFoundError, "not found"),
    ],
)
def test_what_is_not_complete_is_an_error(ranks: Pools, tmp_path: Path, fault: str, kind: Any, words: str) -> None:
    path = tmp_path / "saved"
    ranks(2).run(write, str(path))
    damaged(path, fault)
    with pytest.raises(kind, match=words):
        DistributedCheckpoint(path).check_files()


class Harmful:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_code_of_an_index_runs(ranks: Pools, tmp_path: Path) -> None:
    path, witness = tmp_path / "saved", tmp_path / "witness"
    ranks(2).run(write, str(path))
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data["harmful"] = Harmful(witness)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert ranks(2).run(read, str(path))[0]["groups", 0, "lr"] == 0.1
    assert not witness.exists()


def write_without_space(path: str, victim: int) -> str:
    """What a rank is told when one of them has no space left for what it writes."""
    write(path)
    if dist.get_rank() == victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="could not be written") as caught:
            write(path, 2.0)
    finally:
        if dist.get_rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_is_an_error_on_every_rank_and_the_old_directory_stays(
    ranks: Pools, tmp_path: Path, victim: int
) -> None:
    path = tmp_path / "saved"
    texts = ranks(2).run(write_without_space, str(path), victim)
    assert texts[0] == texts[1]
    assert f"rank {victim}: " in texts[0]
    assert "File too large" in texts[0]
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    for values in ranks(2).run(read, str(path)):
        assert torch.equal(values["model", "own 1"], torch.ones(2))


# -- in the background -------------------------------------------------------------------------------------------------


def test_jobs_run_in_the_background_in_order_and_the_first_failure_is_returned() -> None:
    background, gate, done = BackgroundWriter(), threading.Event(), []

    def first() -> None:
        gate.wait(10)
        done.append("first")

    def second() -> None:
        done.append("second")
        raise OSError("no space")

    background.submit(first)
    background.submit(second)
    assert background.jobs
    assert done == []  # nobody waited
    gate.set()
    error = background.wait()
    assert done == ["first", "second"]
    assert str(error) == "no space"
    assert not background.jobs
    assert background.wait() is None
    background.submit(lambda: done.append("third"))
    assert background.wait() is None
    assert done[-1] == "third"


def test_the_file_system_exchanges_where_it_can(tmp_path: Path) -> None:
    make(tmp_path / "one", "directory", "1")
    make(tmp_path / "two", "directory", "2")
    if not atomic._exchange(tmp_path / "one", tmp_path / "two"):
        pytest.skip("this file system cannot exchange two names")
    assert (content(tmp_path / "one"), content(tmp_path / "two")) == ("2", "1")
    with mock.patch("sys.platform", "other"):
        assert not atomic._exchange(tmp_path / "one", tmp_path / "two")
    with pytest.raises(OSError, match="No such file"):
        atomic._exchange(tmp_path / "one", tmp_path / "three")
