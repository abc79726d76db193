"""Checkpoints on file systems that are not mounted: complete or invisible, and the same as on a disk.

Three of them: ``memory://`` in one process; a folder that has a protocol of its own, which several processes see; and
S3, where the extra `remote-tests` is installed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors.torch import load_file
from torch import Tensor

from lightning_hybrid.checkpoint.file_io import FileIO
from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.checkpoint.storage.remote import RemotePath, is_directory, place_of
from lightning_hybrid.cli.main import main
from tests.checkpoint.test_storage import read, write
from tests.pool import Pools, RankError
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer, together, weights

SHARDED: dict[str, Any] = {**PP2, "save_distributed_checkpoint": True}


class Folder(LocalFileSystem):
    """A folder of this machine, under a protocol that is not that of a disk."""

    protocol = "folder"
    local_file = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        stripped: str = LocalFileSystem._strip_protocol(str(path).removeprefix("folder://"))
        return stripped

    def unstrip_protocol(self, name: str) -> str:
        return f"folder://{self._strip_protocol(name)}"


def register(environment: Mapping[str, str]) -> None:
    """In each process: the protocol of the folder, and where S3 is."""
    fsspec.register_implementation("folder", Folder, clobber=True)
    os.environ.update(environment)
    if "AWS_ENDPOINT_URL" in environment:
        fsspec.config.conf["s3"] = {"endpoint_url": environment["AWS_ENDPOINT_URL"]}


@pytest.fixture
def memory() -> Iterator[str]:
    """A place in the memory of this process."""
    yield "memory://ckpts"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[dict[str, str]]:
    """A server with the interface of S3, and what a process must know of it."""
    pytest.importorskip("s3fs", reason="S3 is tried with the extra `remote-tests`: pip install -e '.[remote-tests]'")
    server = pytest.importorskip(
        "moto.server", reason="S3 is tried with the extra `remote-tests`: pip install -e '.[remote-tests]'"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    running.start()
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    environment = dict(zip(names, ("test", "test", "us-east-1"), strict=True))
    environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    with mock.patch.dict(os.environ, environment), mock.patch.dict(fsspec.config.conf):
        register(environment)
        yield environment
    running.stop()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A place that several processes see, and what they must know of it."""
    register({})
    if request.param == "folder":
        return f"folder://{tmp_path}/ckpts", {}
    environment = request.getfixturevalue("s3_environment")
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/ckpts", environment


several = pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)


# -- directories -------------------------------------------------------------------------------------------------------


def written(path: str, factor: float, environment: dict[str, str]) -> None:
    register(environment)
    with mock.patch("tests.checkpoint.test_storage.Path", place_of):
        write(path, factor)


def found(path: str, environment: dict[str, str]) -> dict[Any, Any]:
    register(environment)
    with mock.patch("tests.checkpoint.test_storage.Path", place_of):
        return read(path)


@several
def test_what_some_ranks_wrote_others_read(ranks: Pools, place: tuple[str, dict[str, str]]) -> None:
    folder, environment = place
    path = f"{folder}/saved"
    for factor in (1.0, 2.0):  # the second replaces the first
        ranks(2).run(written, path, factor, environment)
        for values in ranks(3).run(found, path, environment):
            assert torch.equal(values["model", "shared"], factor * torch.arange(4.0))
            assert torch.equal(values["model", "own 1"], factor * torch.ones(2))
            assert torch.equal(values["model", "divided"], factor * torch.arange(24, dtype=torch.float64).view(3, 8))
            assert values["groups", 0, "lr"] == 0.1 * factor
    names = RemotePath(path).sizes()
    assert sorted(name.rpartition("/")[2] for name in names) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    assert len({name.partition("/")[0] for name in names}) == 2


def write_and_fail(path: str, environment: dict[str, str], victim: int) -> str:
    """What a rank is told when one of them cannot write."""
    register(environment)
    opened = RemotePath.open

    def failing(file: RemotePath, mode: str) -> Any:
        if mode == "wb" and dist.get_rank() == victim:
            raise OSError("no connection")
        return opened(file, mode)

    with mock.patch.object(RemotePath, "open", failing):
        try:
            written(path, 2.0, environment)
        except OSError as error:
            return str(error)
    return ""


@several
@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_fails_leaves_the_former_one(ranks: Pools, place: tuple[str, dict[str, str]], victim: int) -> None:
    folder, environment = place
    path = f"{folder}/saved"
    ranks(2).run(written, path, 1.0, environment)
    before = RemotePath(path).sizes()
    texts = ranks(2).run(write_and_fail, path, environment, victim)
    assert texts[0] == texts[1]
    assert (
        f"could not be written. If an earlier checkpoint exists at this path, it is unchanged. Error on rank {victim}:"
        " OSError: no conn" in texts[0]
    )
    assert RemotePath(path).sizes() == before
    assert ranks(2).run(found, path, environment)[0]["groups", 0, "lr"] == 0.1


class StoreError(Exception):
    """As stores have them: of no kind that Python knows."""


def write_where_a_call_fails(path: str, call: str, is_done: bool) -> str:
    """What a rank is told when a call of the store fails, which may have done what it was asked for."""
    register({})
    real = getattr(RemotePath, call)

    def failing(place: RemotePath, *args: Any, **kwargs: Any) -> None:
        if is_done:
            real(place, *args, **kwargs)
        raise StoreError("no answer")

    with mock.patch.object(RemotePath, call, failing):
        try:
            written(path, 2.0, {})
        except OSError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("call", ["write", "remove_below"])
def test_a_call_that_fails_at_the_end_leaves_a_checkpoint(
    ranks: Pools, tmp_path: Path, call: str, is_done: bool
) -> None:
    """What says that the new files count may be there, whatever the store answers."""
    register({})
    path = f"folder://{tmp_path}/saved"
    ranks(2).run(written, path, 1.0, {})
    texts = ranks(2).run(write_where_a_call_fails, path, call, is_done)
    fails = call == "write" and not is_done
    assert texts[0] == texts[1]
    assert ("both are complete. Error on rank 0: NotAnsweredError" in texts[0]) is fails
    for values in ranks(2).run(found, path, {}):
        assert values["groups", 0, "lr"] == (0.1 if fails else 0.2)
        assert torch.equal(values["model", "shared"], (1 if fails else 2) * torch.arange(4.0))
    ranks(2).run(written, path, 3.0, {})
    assert len({name.partition("/")[0] for name in RemotePath(path).sizes()}) == 2


def test_a_directory_that_cannot_be_removed_beside_a_new_file_is_told(memory: str) -> None:
    file = f"{memory}/saved.ckpt"
    RemotePath(f"{file}/.metadata").write(b"")
    with (
        mock.patch.object(RemotePath, "remove", side_effect=StoreError("not allowed")),
        pytest.raises(
            OSError,
            match=r"was written, but a directory with an earlier checkpoint at the same path could not be removed",
        ),
    ):
        FileIO().save_checkpoint({"epoch": 1}, file)


def write_and_die(path: str) -> None:
    """Break a save off where its end would be written."""
    register({})
    with mock.patch.object(RemotePath, "write", side_effect=lambda _: os._exit(1)):
        written(path, 2.0, {})


def test_a_save_that_is_broken_off_does_not_count_and_the_next_one_clears_up(ranks: Pools, tmp_path: Path) -> None:
    register({})
    path = f"folder://{tmp_path}/saved"
    with pytest.raises(RankError):
        ranks(2).run(write_and_die, path)
    assert not is_directory(RemotePath(path), or_unfinished=False)
    text = r"is not a complete checkpoint\. The file '\.metadata', which is written last, is missing"
    with pytest.raises(ValueError, match=text):
        DistributedCheckpoint(RemotePath(path))
    ranks(2).run(written, path, 1.0, {})
    with pytest.raises(RankError):
        ranks(2).run(write_and_die, path)
    assert len({name.partition("/")[0] for name in RemotePath(path).sizes()}) == 3
    assert ranks(2).run(found, path, {})[0]["groups", 0, "lr"] == 0.1
    ranks(2).run(written, path, 3.0, {})
    assert len({name.partition("/")[0] for name in RemotePath(path).sizes()}) == 2


def test_a_place_that_ranks_do_not_share_is_refused(ranks: Pools, memory: str) -> None:
    with pytest.raises(RankError, match=r"__1_0\.distcp' that .* wrote. Every rank writes its part"):
        ranks(2).run(written, f"{memory}/saved", 1.0, {})


@several
def test_a_bit_that_changed_is_found(ranks: Pools, place: tuple[str, dict[str, str]]) -> None:
    folder, environment = place
    path = f"{folder}/saved"
    ranks(2).run(written, path, 1.0, environment)
    (shard,) = (RemotePath(path) / name for name in RemotePath(path).sizes() if name.endswith("__1_0.distcp"))
    content = bytearray(shard.read(0, 1 << 20))
    content[content.index(torch.ones(2).numpy().tobytes())] ^= 1
    shard.write(bytes(content))
    with pytest.raises(
        RankError,
        match=r"__1_0.distcp is damaged: 'model.own 1' failed the CRC-32 check .*, so the file changed after it "
        "was written",
    ):
        ranks(2).run(found, path, environment)


@several
def test_a_copy_on_a_disk_is_a_directory_as_any(
    ranks: Pools, place: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder, environment = place
    ranks(2).run(written, f"{folder}/saved", 1.0, environment)
    files, root = fsspec.core.url_to_fs(f"{folder}/saved")
    files.get(root, str(tmp_path / "copy"), recursive=True)
    directory = DistributedCheckpoint(tmp_path / "copy")
    directory.check_files()
    assert directory.read_extra(torch.load) == {"epoch": 1.0}
    dcp_to_torch_save(str(tmp_path / "copy"), str(tmp_path / "file"))
    assert torch.load(tmp_path / "file", weights_only=True)["groups"] == [{"lr": 0.1}]


# -- in the Trainer's hands --------------------------------------------------------------------------------------------


def trained(
    layout: Any, folder: str, environment: dict[str, str], max_steps: int, ckpt_path: str | None
) -> tuple[int, dict[str, Tensor]]:
    """Where a run has begun, and the weights at its end."""
    register(environment)
    best: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 2}
    saver = ModelCheckpoint(folder, "{step}", save_last=True, every_n_train_steps=1, **best)
    module, begins = Regression(), Begins()
    trainer = make_trainer(
        layout, callbacks=[saver, begins], enable_checkpointing=True, max_epochs=3, max_steps=max_steps
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return begins.step, weights(module)


class Begins(Callback):
    """Knows where a run has begun."""

    step = -1

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Look."""
        self.step = trainer.global_step


def names_in(folder: str) -> list[str]:
    files, path = fsspec.core.url_to_fs(folder)
    files.invalidate_cache()
    return sorted(name.rstrip("/").rpartition("/")[2] for name in files.ls(path, detail=False))


@several
@pytest.mark.parametrize(
    "layout",
    [PP2, SHARDED, {**PP2, "async_save": True}, {**SHARDED, "async_save": True}],
    ids=["file", "directory", "file, async", "directory, async"],
)
def test_a_run_saves_removes_and_goes_on_from_the_last(
    ranks: Pools, place: tuple[str, dict[str, str]], layout: Any
) -> None:
    folder, environment = place
    pool, whole = ranks(2, lightning=True), Regression()
    first = pool.run(trained, layout, folder, environment, 4, "last")
    assert [step for step, _ in first] == [0, 0]
    assert names_in(folder) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    second = pool.run(trained, layout, folder, environment, 7, "last")
    assert [step for step, _ in second] == [4, 4]
    make_trainer(None, max_epochs=3, max_steps=7).fit(whole, loader())
    assert_same(together([part for _, part in second]), weights(whole))
    assert names_in(folder) == ["last.ckpt", "step=6.ckpt", "step=7.ckpt"]
    named = pool.run(trained, PP2, f"{folder}/other", environment, 8, f"{folder}/step=6.ckpt")
    assert [step for step, _ in named] == [6, 6]


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_one_process_saves_to_memory(memory: str, sharded: bool) -> None:
    layout = {"num_microbatches": 2, "save_distributed_checkpoint": sharded}
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
        assert trained(layout, memory, {}, 4, "last")[0] == 0
    assert names_in(memory) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
        step, found = trained(layout, memory, {}, 7, "last")
    whole = Regression()
    make_trainer(None, max_epochs=3, max_steps=7).fit(whole, loader())
    assert step == 4
    assert_same(found, weights(whole))


def test_commands_read_what_is_not_on_a_disk(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sharded, name in ((True, "directory"), (False, "file")):
        with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
            layout = {"num_microbatches": 2, "save_distributed_checkpoint": sharded}
            _, expected = trained(layout, f"{memory}/{name}", {}, 2, None)
        capsys.readouterr()
        main(["inspect", f"{memory}/{name}/last.ckpt"])
        shown = capsys.readouterr().out
        assert shown.startswith(f"memory://ckpts/{name}/last.ckpt: {name}")
        assert re.search(r"progress +epoch 0, step 2", shown)
        main(["export", f"{memory}/{name}/last.ckpt", str(tmp_path / name)])
        assert_same(load_file(tmp_path / name / "model.safetensors"), expected)
    main(["consolidate", f"{memory}/directory/last.ckpt", str(tmp_path / "one.ckpt")])
    assert_same(torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"], expected)
    with pytest.raises(SystemExit) as refused:
        main(["consolidate", f"{memory}/directory/last.ckpt", f"{memory}/one.ckpt"])
    assert refused.value.code == 2
    assert "'memory://ckpts/one.ckpt' is not a local path" in capsys.readouterr().err


# -- files -------------------------------------------------------------------------------------------------------------


@several
def test_a_file_and_a_directory_take_each_others_places(ranks: Pools, place: tuple[str, dict[str, str]]) -> None:
    folder, environment = place
    if folder.startswith("folder"):
        pytest.skip("a disk has no file and directory of one name")
    path = f"{folder}/c.ckpt"
    FileIO().save_checkpoint({"a": 1}, path)
    ranks(2).run(written, path, 1.0, environment)
    assert is_directory(RemotePath(path), or_unfinished=False)
    assert not RemotePath(path).is_file()
    FileIO().save_checkpoint({"a": 2}, path)
    assert not is_directory(RemotePath(path))
    assert RemotePath(path).sizes() == {}
    FileIO().remove_checkpoint(path)
    assert not RemotePath(path).exists()


class Database(TorchCheckpointIO):
    """A user's way, to places that nobody else knows."""

    saved: Any = None

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Keep it."""
        Database.saved = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Give it."""
        return Database.saved


def test_places_that_a_plugin_knows_are_its_own() -> None:
    def trainer(**arguments: Any) -> Any:
        with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
            return make_trainer({"num_microbatches": 2}, plugins=[Database()], max_epochs=2, **arguments)

    first, second = trainer(max_steps=2), trainer(max_steps=4)
    first.fit(Regression(), loader())
    first.save_checkpoint("database://row/1")
    second.fit(Regression(), loader(), ckpt_path="database://row/1")
    assert (Database.saved["global_step"], second.global_step) == (2, 4)
