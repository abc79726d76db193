from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.trainer.dataloader import ComparedLoader, ReplicaSampler, SharedLoader, checksum, prepare_loader
from tests.pool import Pools


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Epochs(Sampler[int]):
    """An order that depends on the epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % self.count for i in range(self.count)])

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Pairs(BatchSampler):
    """A batch sampler of the user's."""


def loader_of(kind: str, count: int) -> Any:
    data = Numbers(count)
    return {
        "plain": lambda: DataLoader(data, batch_size=2),
        "drop last": lambda: DataLoader(data, batch_size=2, drop_last=True),
        "shuffled": lambda: DataLoader(data, batch_size=2, shuffle=True),
        "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)),
        "own batch sampler": lambda: DataLoader(data, batch_sampler=Pairs(RandomSampler(data), 2, True)),
        "single samples": lambda: DataLoader(data, batch_size=None),
        "stream": lambda: DataLoader(Stream(), batch_size=2),
        "divided by the user": lambda: DataLoader(data, batch_size=2, sampler=_halves(data)),
        "batches divided by the user": lambda: DataLoader(data, batch_sampler=BatchSampler(_halves(data), 2, False)),
        "list": lambda: [torch.tensor([i]) for i in range(count)],
    }[kind]()


def _halves(data: Dataset[Tensor]) -> Sampler[Any]:
    return DistributedSampler(data, 2, dist.get_rank() % 2, shuffle=False)


def iterated(kind: str, count: int, sizes: tuple[int, int], stage: RunningStage, share: bool) -> Any:
    data, pipeline = sizes
    torch.manual_seed(dist.get_rank())  # the ranks have drawn different numbers before
    mesh = Mesh(Sizes(data, 1, pipeline))
    loader: Any = prepare_loader(loader_of(kind, count), mesh, divide=True, share=share, stage=stage)
    batches = [batch.tolist() for batch in loader]
    return batches, len(loader) if kind != "stream" else None


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def run(ranks: Pools, kind: str, count: int, stage: RunningStage = RunningStage.TRAINING) -> list[Any]:
    """On two replicas without a pipeline."""
    found = ranks(2).run(iterated, kind, count, (2, 1), stage, True)
    assert all(length in (None, len(batches)) for batches, length in found)
    return [batches for batches, _ in found]


@pytest.mark.parametrize("count", [8, 10])
def test_a_step_takes_the_samples_of_one_process_with_larger_batches(ranks: Pools, count: int) -> None:
    first, second = run(ranks, "plain", count)
    one_process = [batch.tolist() for batch in DataLoader(Numbers(count), batch_size=4)]
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == one_process


@pytest.mark.parametrize("kind", ["shuffled", "batch sampler", "own batch sampler"])
def test_shuffled_samples_are_divided(ranks: Pools, kind: str) -> None:
    first, second = run(ranks, kind, 16)
    assert sorted(flat(first + second)) == list(range(16))
    assert all(len(batch) == 2 for batch in first + second)
    assert flat(first) != sorted(flat(first))


def test_samples_are_repeated_for_training_so_that_all_replicas_get_equally_many(ranks: Pools) -> None:
    assert run(ranks, "plain", 5) == [[[0, 2], [4]], [[1, 3], [0]]]
    assert run(ranks, "drop last", 5) == [[[0, 2]], [[1, 3]]]


def test_samples_are_not_repeated_for_predictions(ranks: Pools) -> None:
    assert run(ranks, "plain", 5, RunningStage.PREDICTING) == [[[0, 2], [4]], [[1, 3]]]


def test_samples_without_batches_are_divided(ranks: Pools) -> None:
    assert run(ranks, "single samples", 4) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("kind", ["divided by the user", "batches divided by the user"])
def test_what_the_user_has_divided_is_left_alone(ranks: Pools, kind: str) -> None:
    assert run(ranks, kind, 8) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_streams_and_other_iterables_are_left_alone(ranks: Pools) -> None:
    assert run(ranks, "stream", 0) == [[[0, 1], [2, 3], [4]]] * 2
    assert run(ranks, "list", 2) == [[[0], [1]]] * 2


@pytest.mark.parametrize("share", [True, False])
def test_the_ranks_of_a_model_group_get_the_same_batches(ranks: Pools, share: bool) -> None:
    kind = "shuffled" if share else "plain"
    found = ranks(4).run(iterated, kind, 8, (2, 2), RunningStage.TRAINING, share)
    # Pipeline outermost: the ranks 0 and 2 are a model group, 1 and 3 the other one.
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert sorted(flat(found[0][0] + found[1][0])) == list(range(8))


def iterated_before() -> Any:
    mesh = Mesh(Sizes(2, 1, 1))
    loader = DataLoader(Numbers(4), batch_size=1, num_workers=1, persistent_workers=True)
    before = len(list(loader))
    prepared: Any = prepare_loader(loader, mesh, divide=True, share=True, stage=RunningStage.TRAINING)
    return before, [batch.tolist() for batch in prepared], len(list(loader))


def test_a_loader_that_was_iterated_before_is_divided(ranks: Pools) -> None:
    assert ranks(2).run(iterated_before, timeout=150) == [(4, [[0], [2]], 4), (4, [[1], [3]], 4)]


def with_other_batch_samplers() -> str:
    class Lists:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3]])

    loader: Any = DataLoader(Numbers(4), batch_sampler=Lists())  # type: ignore[arg-type]
    try:
        prepare_loader(loader, Mesh(Sizes(2, 1, 1)), divide=True, share=True, stage=RunningStage.TRAINING)
    except TypeError as error:
        return str(error)
    return "nothing"


def test_batch_samplers_that_cannot_be_divided_are_refused(ranks: Pools) -> None:
    for text in ranks(2).run(with_other_batch_samplers):
        assert text.startswith("The batch sampler Lists has no attribute `sampler`")
        assert "Trainer(use_distributed_sampler=False)" in text


class Source:
    """Of an exchange, on the rank that loads."""

    is_source, about = True, 0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def __call__(self, tree: Any) -> None:
        self.sent.append(tree)

    def fail(self, error: BaseException) -> None:
        self.sent.append(str(error))


@pytest.mark.parametrize(
    ("error", "sent"),
    [(ValueError("broken data"), ["broken data"]), (dist.DistError("gloo: Connection closed by peer"), [])],
    ids=["of the data", "of the transport"],
)
def test_a_rank_that_has_left_while_data_were_loaded_is_no_message_for_the_others(
    error: Exception, sent: list[str]
) -> None:
    """They may be waiting for it elsewhere, and the message would wait for them."""

    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise error

    exchange: Any = Source()
    with pytest.raises(type(error)):
        next(iter(SharedLoader(Broken(), exchange)))
    assert exchange.sent == sent


# -- the sampler -------------------------------------------------------------------------------------------------------


def sampled(count: int, num_replicas: int, repeat: bool) -> tuple[list[int], int]:
    group = dist.group.WORLD
    assert group is not None
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    mine = order if dist.get_rank() == 0 else ["never asked"] * count
    sampler = ReplicaSampler(mine, num_replicas, dist.get_rank(), group, repeat=repeat)
    return list(sampler), len(sampler)


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_replicas_take_turns_in_one_order(ranks: Pools, count: int, repeat: bool) -> None:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    found = ranks(3).run(sampled, count, 3, repeat)
    assert all(len(samples) == length for samples, length in found)
    dealt = [samples[i] for i in range(-(-count // 3)) for samples, _ in found if i < len(samples)]
    if repeat and count:
        assert dealt == (order * 3)[: -(-count // 3) * 3]
    else:
        assert dealt == order


def next_epoch() -> list[list[int]]:
    group = dist.group.WORLD
    assert group is not None
    sampler = ReplicaSampler(Epochs(4), 2, dist.get_rank(), group, repeat=True)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    plain = ReplicaSampler(SequentialSampler(range(2)), 2, dist.get_rank(), group, repeat=True)
    plain.set_epoch(3)  # it does not want to know
    return epochs


def test_samplers_that_want_to_know_the_epoch_are_told(ranks: Pools) -> None:
    assert ranks(2).run(next_epoch) == [[[0, 2], [1, 3]], [[1, 3], [2, 0]]]


# -- one rank loads ----------------------------------------------------------------------------------------------------


class Augmented:
    """Batches that no two ranks would make alike; counts how often it is iterated."""

    custom = "attribute"

    def __init__(self, count: int, error: bool = False) -> None:
        self.count, self.error, self.iterations = count, error, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        self.iterations += 1
        for i in range(self.count):
            yield {"x": torch.full((i % 3 + 1,), float(dist.get_rank())), "id": f"{i} of rank {dist.get_rank()}"}
        if self.error:
            raise KeyError("a file is missing")


def shared(error: bool) -> Any:
    mesh = Mesh(Sizes(1, 1, 2))
    source = Augmented(4, error)
    loader: Any = prepare_loader(source, mesh, divide=True, share=True, stage=RunningStage.TRAINING)
    assert isinstance(loader, SharedLoader)
    assert (len(loader), loader.custom) == (4, "attribute")
    assert not hasattr(loader, "missing")
    epochs = []
    for _ in range(2):
        batches = []
        try:
            batches += [(batch["x"].tolist(), batch["id"]) for batch in loader]
        except (KeyError, RuntimeError) as raised:
            batches.append(f"{type(raised).__name__}: {raised}")
        epochs.append(batches)
    return epochs, source.iterations


def test_one_rank_loads_and_the_others_receive(ranks: Pools) -> None:
    (first, loaded), (second, never) = ranks(2).run(shared, False)
    assert first == second
    assert first[0] == [([0.0] * (i % 3 + 1), f"{i} of rank 0") for i in range(4)]
    assert (loaded, never) == (2, 0)


def test_an_error_while_loading_reaches_every_rank(ranks: Pools) -> None:
    (first, _), (second, _) = ranks(2).run(shared, True)
    assert first[0] == ["KeyError: 'a file is missing'"]
    assert second[0] == ["PeerFailedError: Rank 0 failed: KeyError: 'a file is missing'"]


def interleaved() -> Any:
    """Validation inside of training: two loaders take turns on one group."""
    mesh = Mesh(Sizes(1, 1, 2))
    loaders: list[Any] = [
        prepare_loader(Augmented(3), mesh, divide=False, share=True, stage=RunningStage.TRAINING) for _ in range(2)
    ]
    seen = []
    for batch in loaders[0]:
        seen.append(batch["id"])
        seen += [inner["id"] for inner in loaders[1]]
    partial = iter(loaders[0])
    seen.append(next(partial)["id"])  # and leave: a limited number of batches
    seen += [batch["id"] for batch in loaders[1]]
    return seen


def test_loaders_take_turns_and_may_be_left_early(ranks: Pools) -> None:
    first, second = ranks(2).run(interleaved)
    assert first == second
    assert len(first) == 3 * 4 + 1 + 3


def iterated_alone() -> Any:
    """Rank 0 looks at a batch before all ranks begin."""
    loader: Any = prepare_loader(
        [torch.tensor([n]) for n in range(4)], Mesh(Sizes(1, 1, 2)), divide=True, share=True, stage=None
    )
    if dist.get_rank() == 0:
        next(iter(loader))
    seen: list[Any] = []
    try:
        for batch in islice(loader, 2):
            seen.append(batch.tolist())
    except ValueError as error:
        seen.append(str(error))
    return seen


def test_batches_of_another_iteration_are_not_taken_for_those_of_this_one(ranks: Pools) -> None:
    loaded, received = ranks(2).run(iterated_alone)
    assert loaded == [[0], [1]]
    assert len(received) == 2
    assert received[-1].startswith(
        "The ranks of a model group are out of step. Rank 0 sent 2, but this rank expected 1."
    )


# -- all ranks load ----------------------------------------------------------------------------------------------------


def compared(batches: list[Any]) -> Any:
    mesh = Mesh(Sizes(1, 1, 2))
    loader: Any = prepare_loader(batches[dist.get_rank()], mesh, divide=True, share=False, stage=None)
    assert isinstance(loader, ComparedLoader)
    seen: list[Any] = []
    try:
        for batch in loader:
            seen.append(batch.tolist())
    except ValueError as error:
        seen.append(str(error))
    return seen


def test_equal_batches_pass(ranks: Pools) -> None:
    batches = [torch.tensor([1, 2]), torch.tensor([3])]
    assert ranks(2).run(compared, [batches, batches]) == [[[1, 2], [3]]] * 2


@pytest.mark.parametrize("other", [[torch.tensor([1, 2]), torch.tensor([4])], [torch.tensor([1, 2])]])
def test_different_batches_are_an_error_on_every_rank(ranks: Pools, other: list[Tensor]) -> None:
    found = ranks(2).run(compared, [[torch.tensor([1, 2]), torch.tensor([3])], other])
    for seen in found:
        assert seen[0] == [1, 2]
        assert seen[1].startswith("Batch 1 differs between the ranks of one model group")
        assert "HybridStrategy(broadcast_batches=True)" in seen[1]
    assert found[0][1] == found[1][1]


BATCHES: list[Any] = [
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.zeros(2, 3, dtype=torch.int32),
    torch.ones(2, 3),
    torch.zeros(0),
    torch.tensor(True),
    torch.tensor(1, dtype=torch.int8),
    torch.zeros(2, dtype=torch.bfloat16),
    torch.ones(2, dtype=torch.complex64),
    (torch.ones(2, dtype=torch.complex64) * 1j).conj(),
    [torch.zeros(2, 3), "a"],
    [torch.zeros(2, 3), "b"],
    [torch.zeros(2, 3), None],
    {"x": torch.zeros(2, 3), "n": 1},
    {"x": torch.zeros(2, 3), "n": 2},
]


def test_checksums_differ_where_batches_differ() -> None:
    sums = [checksum(batch) for batch in BATCHES]
    assert len(set(sums)) == len(BATCHES)
    assert 0 not in sums


def test_checksums_are_of_values_and_not_of_memory() -> None:
    x = torch.arange(6).view(2, 3)
    assert checksum(x.t()) == checksum(x.t().contiguous())
    assert checksum(torch.arange(12)[::2]) == checksum(torch.arange(12)[::2].clone())
    assert checksum(torch.rand(2, requires_grad=True).detach() * 0) == checksum(torch.zeros(2))


# -- workers -----------------------------------------------------------------------------------------------------------


def seeds(wanted: str) -> list[Any]:
    os.environ["PL_SEED_WORKERS"] = wanted
    mesh = Mesh(Sizes(2, 1, 1))
    mine = DataLoader(Numbers(4), worker_init_fn=print)
    found: list[Any] = []
    for loader in (DataLoader(Numbers(4)), mine):
        prepared: Any = prepare_loader(loader, mesh, divide=True, share=True, stage=RunningStage.TRAINING)
        function = prepared.worker_init_fn
        found.append(
            function.keywords["rank"] if hasattr(function, "keywords") else getattr(function, "__name__", None)
        )
    return found


def test_workers_are_seeded_by_replica_where_the_user_wants_it(ranks: Pools) -> None:
    assert ranks(2).run(seeds, "1") == [[0, "print"], [1, "print"]]
    assert ranks(2).run(seeds, "0") == [[None, "print"], [None, "print"]]


def test_iterables_are_not_touched_without_a_model_group(ranks: Pools) -> None:
    assert ranks(1).run(untouched) == [True]


def untouched() -> bool:
    batches: Iterable[int] = [1, 2]
    return prepare_loader(batches, Mesh(Sizes(1, 1, 1)), divide=True, share=True, stage=None) is batches
