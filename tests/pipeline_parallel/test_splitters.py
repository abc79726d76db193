"""Ready-made splitters: nothing is lost, indices are those of a batch of its own, and counts are right."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import lightning_hybrid
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size, sizes, split_batch, split_into

# -- packed rows -------------------------------------------------------------------------------------------------------


def rows(lengths: list[int]) -> dict[str, Any]:
    """Tokens of documents, in one row; each token tells its document."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return {
        "ids": 100 * documents + positions,
        "position_ids": positions[None],
        "kind": torch.arange(len(lengths)),
        "names": [str(i) for i in range(len(lengths))],
        "cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "max_seqlen": max(lengths),
        "scale": torch.tensor(0.5),
    }


def documents_of(part: dict[str, Any]) -> list[list[int]]:
    ends = part["cu_seqlens"].tolist()
    assert ends[0] == 0
    assert ends[-1] == len(part["ids"]) == part["position_ids"].shape[1]
    return [part["ids"][a:b].tolist() for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    ("lengths", "number", "tokens"),
    [
        ([3, 4, 2, 3], 2, [7, 5]),
        ([1, 1, 1, 9], 2, [3, 9]),
        ([9, 1, 1, 1], 2, [9, 3]),
        ([2, 2, 2], 8, [2, 2, 2]),
        ([5], 4, [5]),
        ([4, 0, 0, 4, 0], 3, [4, 4]),
    ],
)
def test_documents_are_divided_by_tokens(lengths: list[int], number: int, tokens: list[int]) -> None:
    batch = rows(lengths)
    parts, counts = split_into(batch, number, lightning_hybrid.split_rows("cu_seqlens"))
    assert counts == tokens == [len(part["ids"]) for part in parts]
    assert [document for part in parts for document in documents_of(part)] == documents_of(batch)
    for part in parts:
        assert len(part["kind"]) == len(part["names"]) == len(part["cu_seqlens"]) - 1
        assert part["cu_seqlens"].dtype == torch.int32
        assert part["max_seqlen"] >= int(part["cu_seqlens"].diff().max())
        assert part["scale"] is batch["scale"]


def test_documents_of_any_lengths() -> None:
    rng = random.Random(1)
    for _ in range(100):
        lengths = [rng.randrange(5) for _ in range(rng.randrange(1, 9))] + [1]
        number = rng.randrange(1, 9)
        parts, counts = split_into(rows(lengths), number, lightning_hybrid.split_rows("cu_seqlens"))
        assert len(parts) == min(number, sum(n > 0 for n in lengths))
        assert min(counts) > 0
        assert [document for part in parts for document in documents_of(part)] == documents_of(rows(lengths))


def test_an_integer_is_a_key_of_a_mapping_and_not_a_position() -> None:
    batch = {3: torch.tensor([0, 3, 7]), 7: torch.arange(7)}
    parts, counts = split_into(batch, 2, lightning_hybrid.split_rows(3))
    assert counts == [3, 4]
    assert [part[7].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5, 6]]


def test_queries_and_keys_have_offsets_of_their_own() -> None:
    q, k = torch.arange(7), torch.arange(9)
    batch = (q, k, torch.tensor([0, 3, 7]), torch.tensor([0, 8, 9]))
    parts, counts = split_into(batch, 2, lightning_hybrid.split_rows(2, 3))
    assert counts == [3, 4]
    assert [tuple(each.tolist() for each in part) for part in parts] == [
        ([0, 1, 2], [*range(8)], [0, 3], [0, 8]),
        ([3, 4, 5, 6], [8], [0, 4], [0, 1]),
    ]


@pytest.mark.parametrize(
    ("keys", "batch", "message"),
    [
        (
            ("cu",),
            {"ids": torch.arange(4)},
            r"split_rows\('cu'\) needs a tensor of integers.*found NoneType.*'ids'",
        ),
        (("cu",), {"ids": torch.arange(4), "cu": torch.tensor([1, 4])}, "that start at 0 and never decrease"),
        (("cu",), {"ids": torch.arange(5), "cu": torch.tensor([0, 3])}, r"cannot split batch\['ids'\] \[5\].*3 tokens"),
        (
            ("cu",),
            {"ids": torch.arange(3), "cu": torch.tensor([0, 3]), "w": {"a": torch.rand(7)}},
            r"batch\['w'\]\['a'\] \[7\]",
        ),
    ],
)
def test_rows_that_are_not_packed_so(keys: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lightning_hybrid.split_rows(*keys)(batch, 2)


# -- graphs ------------------------------------------------------------------------------------------------------------


@dataclass
class Graphs:
    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    batch: Tensor
    y: Tensor
    names: list[str]


class Tuple(NamedTuple):
    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    batch: Tensor
    y: Tensor
    names: list[str]


def graph(number: int, nodes: int, edges: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.rand(nodes, 3, generator=generator),
        "edge_index": torch.randint(nodes, (2, edges), generator=generator),
        "edge_attr": torch.rand(edges, 2, generator=generator),
        "y": torch.rand(1, generator=generator),
        "name": str(number),
    }


def joined(graphs: list[dict[str, Any]], *, mixed: bool = False) -> dict[str, Any]:
    first = [0]
    for each in graphs:
        first.append(first[-1] + len(each["x"]))
    edges = torch.cat([each["edge_index"] + start for each, start in zip(graphs, first, strict=False)], 1)
    attributes = torch.cat([each["edge_attr"] for each in graphs])
    order = torch.randperm(edges.shape[1]) if mixed else torch.arange(edges.shape[1])
    return {
        "x": torch.cat([each["x"] for each in graphs]),
        "edge_index": edges[:, order],
        "edge_attr": attributes[order],
        "batch": torch.cat([torch.full((len(each["x"]),), i) for i, each in enumerate(graphs)]),
        "y": torch.cat([each["y"] for each in graphs]),
        "names": [each["name"] for each in graphs],
    }


#: (nodes, edges): as many edges as nodes, in all or in one; as many nodes as graphs.
SHAPES = [(3, 5), (4, 4), (2, 0), (5, 6), (1, 1)], [(3, 3), (2, 2), (4, 4)], [(1, 2), (1, 3), (1, 1)], [(2, 3)]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", [dict, Graphs, Tuple, SimpleNamespace])
def test_graphs_are_what_they_were(shapes: list[tuple[int, int]], kind: Any) -> None:
    graphs = [graph(i, *shape) for i, shape in enumerate(shapes)]
    whole = joined(graphs)
    batch = kind(**whole)
    assert find_batch_size(batch) == len(graphs)
    parts, counts = split_into(batch, 2, lightning_hybrid.split_graphs())
    assert counts == sizes(len(graphs), 2)
    assert all(type(part) is kind for part in parts)
    ends = [0, counts[0], len(graphs)]
    for part, a, b in zip(parts, ends, ends[1:], strict=False):
        found = part if kind is dict else part._asdict() if kind is Tuple else vars(part)
        expected = joined(graphs[a:b])
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value) if key != "names" else None
        assert found["names"] == expected["names"]
        assert find_batch_size(part) == b - a


def test_edges_may_be_in_any_order() -> None:
    torch.manual_seed(0)
    graphs = [graph(i, 3 + i, 5) for i in range(4)]
    batch = joined(graphs, mixed=True)
    parts, _ = split_into(batch, 3, lightning_hybrid.split_graphs())
    messages = [(part["x"][part["edge_index"][0]] * part["edge_attr"][:, :1]).sum() for part in parts]
    whole = (batch["x"][batch["edge_index"][0]] * batch["edge_attr"][:, :1]).sum()
    torch.testing.assert_close(torch.stack(messages).sum(), whole)


def test_pointers_and_numbers_are_those_of_the_part() -> None:
    batch = joined([graph(i, 3 + i, 4) for i in range(3)]) | {"num_graphs": 3, "num_nodes": 12}
    batch["ptr"] = torch.tensor([0, 3, 7, 12])
    first, second = lightning_hybrid.split_graphs()(batch, 2)
    assert (first["ptr"].tolist(), second["ptr"].tolist()) == ([0, 3, 7], [0, 5])
    assert (first["num_graphs"], second["num_graphs"], second["num_nodes"]) == (2, 1, 5)


def test_graphs_under_other_names() -> None:
    graphs = [graph(i, 3, 4) for i in range(2)]
    whole = joined(graphs)
    batch = (whole["x"], whole["edge_index"], whole["batch"], whole["y"])
    first, second = lightning_hybrid.split_graphs(2, 1)(batch, 2)
    assert torch.equal(second[0], graphs[1]["x"])
    assert torch.equal(second[1], graphs[1]["edge_index"])
    assert first[3].tolist() == graphs[0]["y"].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": torch.tensor([0, 1, 0, 1, 1, 1])}, "ascending"),
        ({"weights": torch.rand(5)}, r"cannot split batch\['weights'\] \[5\].*2 graphs, 6 nodes and 8 edges"),
        ({"edge_index": torch.rand(2, 8)}, "tensor of integers with 2 dimensions under 'edge_index'"),
    ],
)
def test_graphs_that_cannot_be_divided(change: dict[str, Any], message: str) -> None:
    batch = joined([graph(i, 3, 4) for i in range(2)]) | change
    with pytest.raises(ValueError, match=message):
        lightning_hybrid.split_graphs()(batch, 2)


class Batch:
    """The interface of PyTorch Geometric's `Batch`."""

    def __init__(self, graphs: list[dict[str, Any]]) -> None:
        self.graphs = graphs
        self.__dict__.update(joined(graphs))

    def to(self, *args: Any) -> Batch:
        return self

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)

    def to_data_list(self) -> list[dict[str, Any]]:
        return self.graphs

    @classmethod
    def from_data_list(cls, graphs: list[dict[str, Any]]) -> Batch:
        return cls(graphs)


def test_an_object_that_divides_itself_is_split_by_its_own_methods() -> None:
    batch = Batch([graph(i, 3 + i, 5) for i in range(5)])
    assert find_batch_size(batch) == 5
    for given in (batch, (batch, torch.arange(5))):
        parts, counts = split_batch(given, 2)
        assert counts == [3, 2]
        names = [(part[0] if isinstance(part, tuple) else part).names for part in parts]
        assert names == [["0", "1", "2"], ["3", "4"]]
    parts, counts = split_into(batch, 2, lightning_hybrid.split_graphs())
    assert counts == [3, 2]
    assert find_batch_size(parts[1]) == 2


def test_a_batch_of_pytorch_geometric() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(**{k: v for k, v in graph(i, 3 + i, 5).items() if k != "name"}) for i in range(5)]
    batch = data.Batch.from_data_list(graphs)
    parts, counts = split_batch(batch, 2)
    assert counts == [3, 2]
    assert [part.num_graphs for part in parts] == [3, 2]
    assert torch.equal(parts[1].edge_index, data.Batch.from_data_list(graphs[3:]).edge_index)
    assert torch.equal(parts[1].x, batch.x[12:])


# -- packed sequences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_packed_sequences_are_split_by_sequences(is_sorted: bool, number: int) -> None:
    lengths = [6, 5, 5, 2, 1] if is_sorted else [2, 5, 1, 6, 5]
    sequences = [torch.rand(n, 3) for n in lengths]
    packed = pack_sequence(sequences, enforce_sorted=is_sorted)
    y = torch.arange(5)
    parts, counts = split_batch({"words": packed, "y": y}, number)
    assert counts == sizes(5, number)
    found: list[Tensor] = []
    for part, count in zip(parts, counts, strict=True):
        assert isinstance(part["words"], PackedSequence)
        assert (part["words"].sorted_indices is None) == is_sorted
        padded, ends = pad_packed_sequence(part["words"], batch_first=True)
        assert len(padded) == count == len(part["y"])
        assert padded.shape[1] == int(ends.max())
        found += [row[:end] for row, end in zip(padded, ends, strict=True)]
    assert torch.cat([part["y"] for part in parts]).tolist() == y.tolist()
    assert all(torch.equal(a, b) for a, b in zip(found, sequences, strict=True))
    assert find_batch_size(packed) == 5
    assert split_batch(packed, number)[1] == counts


def test_an_lstm_reads_the_same_from_the_parts() -> None:
    lstm = nn.LSTM(3, 4, bidirectional=True)
    packed = pack_padded_sequence(torch.rand(7, 4, 3), torch.tensor([3, 7, 1, 5]), enforce_sorted=False)
    with torch.no_grad():
        whole = lstm(packed)[1][0]
        parts = [lstm(part)[1][0] for part in split_batch(packed, 3)[0]]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


# -- joined targets ----------------------------------------------------------------------------------------------------


def test_joined_targets_give_the_loss_of_the_batch() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3, 1, 4, 2, 2])
    batch = {
        "x": torch.rand(5, 9, 6),
        "input_lengths": torch.tensor([9, 9, 8, 9, 7]),
        "targets": torch.randint(1, 6, (int(lengths.sum()),)),
        "target_lengths": lengths,
        "names": list("abcde"),
        "blank": 0,
    }

    def loss(part: dict[str, Any]) -> Tensor:
        return F.ctc_loss(
            part["x"].log_softmax(-1).transpose(0, 1), part["targets"], part["input_lengths"], part["target_lengths"]
        )

    parts, counts = split_into(batch, 3, lightning_hybrid.split_targets())
    assert counts == [2, 2, 1]
    assert [len(part["targets"]) for part in parts] == [4, 6, 2]
    assert [name for part in parts for name in part["names"]] == list("abcde")
    mean = torch.stack([loss(part) * count for part, count in zip(parts, counts, strict=True)]).sum() / 5
    torch.testing.assert_close(mean, loss(batch))
    in_a_tuple = (batch["x"], batch["targets"], batch["input_lengths"], lengths)
    parts, _ = split_into(in_a_tuple, 3, lightning_hybrid.split_targets(1, 3))
    assert [len(part[1]) for part in parts] == [4, 6, 2]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"targets": torch.arange(5), "target_lengths": torch.tensor([2, 2])},
            r"needs 4 targets \(the sum of the lengths\) under .*, but found a tensor of shape \[5\]",
        ),
        (
            {"targets": torch.arange(4), "target_lengths": torch.tensor([2, 2]), "w": torch.rand(7)},
            r"cannot split batch\['w'\] \[7\] in a batch of 2 samples and 4 targets",
        ),
    ],
)
def test_targets_that_are_not_joined_so(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lightning_hybrid.split_targets()(batch, 2)


# -- lists of samples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_samples_are_divided(kind: Any) -> None:
    batch = kind({"image": torch.rand(3, 4 + i, 4), "label": i} for i in range(5))
    parts, counts = split_into(batch, 3, lightning_hybrid.split_samples())
    assert counts == [2, 2, 1]
    assert all(type(part) is kind for part in parts)
    assert [sample["label"] for part in parts for sample in part] == [*range(5)]


@pytest.mark.parametrize("batch", [torch.rand(4, 2), {"x": torch.rand(4)}, [torch.rand(3), 5]])
def test_batches_that_are_no_lists_of_samples(batch: Any) -> None:
    with pytest.raises(ValueError, match="needs a list or a tuple of samples"):
        lightning_hybrid.split_samples()(batch, 2)


# -- all of them -------------------------------------------------------------------------------------------------------


def test_splitters_are_assigned_in_a_class_or_called_from_a_method() -> None:
    class Assigned:
        split_batch = lightning_hybrid.split_rows("cu_seqlens")

    class Calling:
        def split_batch(self, batch: Any, num_microbatches: int) -> Any:
            return lightning_hybrid.split_rows("cu_seqlens")(batch, num_microbatches)

    for module in (Assigned(), Calling()):
        assert split_into(rows([3, 4, 2, 3]), 2, module.split_batch)[1] == [7, 5]
    for made in (
        Assigned.split_batch,
        lightning_hybrid.split_graphs("owner"),
        lightning_hybrid.split_targets(),
        lightning_hybrid.split_samples(),
    ):
        assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("make", [lightning_hybrid.split_rows, lightning_hybrid.split_graphs])
@pytest.mark.parametrize("key", [1.5, True, None])
def test_keys_that_are_none(make: Any, key: Any) -> None:
    with pytest.raises(TypeError, match=r"split_\w+\(...\) accepts keys"):
        make(key)
    with pytest.raises(TypeError, match="accepts keys"):
        lightning_hybrid.split_rows()
