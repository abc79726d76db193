"""What a callback records of a step is what the schedule says, and changes nothing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid import HybridTimeline
from lightning_hybrid.pipeline_parallel.schedules import build
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer, train
from tests.zoo.tensor import NanoGPT

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {**PP2, "num_microbatches": 4}),
    "dp2 pp2 chunks 2": (4, {**PP2, "num_microbatches": 4, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "dp2": (2, {"num_microbatches": 2}),
}


def record(layout: dict[str, Any], folder: str) -> tuple[dict[str, torch.Tensor], dict[str, float], int]:
    """Train with a record of two batches: weights, what was logged, and whether a recorder stays."""
    callback = HybridTimeline(batches=[1, 3], dirpath=folder)
    result = train(Regression(), layout, loader(), max_epochs=2, callbacks=[callback])
    logged = result.trainer.logged_metrics.items()
    shares = {name: float(value) for name, value in logged if name.startswith("timeline/")}
    return result.weights, shares, callback._recorder is None


def plain(layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    return train(Regression(), layout, loader(), max_epochs=2).weights


class Uneven(IterableDataset[Any]):
    """Eight samples a batch on the first rank, and three on others, which make fewer microbatches."""

    def __iter__(self) -> Iterator[Any]:
        size = 8 if dist.get_rank() == 0 else 3
        for _ in range(4):
            yield torch.ones(size, 6, dtype=torch.float64), torch.ones(size, 1, dtype=torch.float64)


def uneven(folder: str) -> int:
    callback = HybridTimeline(batches=[1], dirpath=folder)
    trainer = make_trainer({"num_microbatches": 4}, use_distributed_sampler=False, callbacks=[callback])
    trainer.fit(Regression(), DataLoader(Uneven(), batch_size=None))
    return int(trainer.global_step)


def test_replicas_with_fewer_microbatches_are_recorded_too(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2, lightning=True).run(uneven, str(tmp_path)) == [4, 4]
    assert (tmp_path / "batch-1.svg").exists()


def of_shares(folder: str) -> None:
    layout = {"pipeline_parallel_size": 1, "context_parallel_size": 2, "num_microbatches": 2}
    trainer = make_trainer(layout, callbacks=[HybridTimeline(batches=[1], dirpath=folder)])
    trainer.fit(NanoGPT())


def test_ranks_that_share_sequences_are_recorded(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, lightning=True).run(of_shares, str(tmp_path))
    assert (tmp_path / "batch-1.svg").exists()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_record_has_the_actions_of_the_schedule_and_changes_nothing(name: str, ranks: Pools, tmp_path: Path) -> None:
    size, layout = LAYOUTS[name]
    results = ranks(size, lightning=True).run(record, layout, str(tmp_path))
    expected = ranks(size, lightning=True).run(plain, layout)
    for (weights, shares, is_over), wanted in zip(results, expected, strict=True):
        assert_same(weights, wanted)
        assert is_over
        assert shares.keys() == {f"timeline/{each}" for each in ("bubble", "wait", "messages", "reduce", "optimizer")}
        assert all(0 <= share <= 1 for share in shares.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("batch-1.json", "batch-1.svg", "batch-3.json", "batch-3.svg")
    ]
    num_ranks, num_chunks = layout.get("pipeline_parallel_size", 1), layout.get("num_chunks", 1)
    schedule = build(layout.get("schedule", "1f1b"), num_ranks, layout["num_microbatches"], num_chunks)
    trace = json.loads((tmp_path / "batch-1.json").read_text())
    found: dict[int, list[str]] = defaultdict(list)
    ends: dict[int, float] = defaultdict(float)
    for event in trace["traceEvents"]:
        # https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events and metadata
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index"}
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        assert event["ts"] >= ends[event["pid"]] - 1e-3, "ranges of a rank follow each other"
        ends[event["pid"]] = event["ts"] + event["dur"]
        if re.fullmatch(r"\d+[A-Z_]+\d+", event["name"]):
            found[event["pid"]].append(event["name"])
    for rank, names in found.items():
        label = next(each["args"]["name"] for each in trace["traceEvents"] if each["pid"] == rank)
        pipeline_rank = int(re.search(r"pipeline (\d+)", label).group(1))  # type: ignore[union-attr]
        assert names == [str(action) for action in schedule.actions[pipeline_rank]]
    assert sorted(found) == list(range(size))
    picture = ET.parse(tmp_path / "batch-1.svg").getroot()
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "measured" in texts
    assert f"{schedule.name}, simulated" in texts


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"HybridTimeline\(batches=\[-1\]\)"):
        HybridTimeline(batches=[-1])


def refused() -> str:
    trainer = make_trainer({}, max_epochs=1, callbacks=[HybridTimeline()])
    with pytest.raises(ValueError, match="this run has no schedule") as error:
        trainer.fit(Regression(), loader())
    return str(error.value)


def test_without_a_schedule_it_is_refused(ranks: Pools) -> None:
    assert all("num_microbatches" in text for text in ranks(1, lightning=True).run(refused))
