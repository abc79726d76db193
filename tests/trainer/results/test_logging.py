from __future__ import annotations

import gc
import random
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.trainer.results.logging import (
    Log,
    LogRecorder,
    log_arguments,
    merge_logs,
    pack_logs,
    replay,
    unpack_logs,
)


class Module(LightningModule):
    """Notes what it is asked to log."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.acc = MeanMetric()
        self.nested = nn.ModuleDict({"total": SumMetric()})
        self.both = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.calls.append((name, value, kwargs))


def entry(value: Any, name: str = "x", metric: str | None = None, **arguments: Any) -> Log:
    return Log(name, value, metric, arguments)


def merged_value(values: list[Any], counts: list[int], **arguments: Any) -> Any:
    (log,) = merge_logs([[entry(value, **arguments)] for value in values], counts)
    return log.value


# -- recording ---------------------------------------------------------------------------------------------------------


def test_calls_are_recorded_by_microbatch() -> None:
    module = Module()
    recorder = LogRecorder(module)
    with recorder() as records:
        for i in range(2):
            recorder.next_microbatch(keep=True)
            module.log("loss", torch.tensor(float(i)), True, on_step=True)
            module.log("n", i)
    assert [[(log.name, log.value, log.arguments) for log in logs] for logs in records] == [
        [("loss", 0.0, {"prog_bar": True, "on_step": True}), ("n", 0, {})],
        [("loss", 1.0, {"prog_bar": True, "on_step": True}), ("n", 1, {})],
    ]
    assert module.calls == []
    module.log("after", 1)
    assert module.calls == [("after", 1, {})]


def test_every_positional_argument_keeps_its_name() -> None:
    values = (True, False, True, True, "sum", False, True, None, False, 8, "acc", True)
    assert log_arguments(values, {}) == {
        "prog_bar": True,
        "logger": False,
        "on_step": True,
        "on_epoch": True,
        "reduce_fx": "sum",
        "enable_graph": False,
        "sync_dist": True,
        "sync_dist_group": None,
        "add_dataloader_idx": False,
        "batch_size": 8,
        "metric_attribute": "acc",
        "rank_zero_only": True,
    }


def test_log_dict_is_recorded() -> None:
    module = Module()
    recorder = LogRecorder(module)
    with recorder() as records:
        recorder.next_microbatch(keep=True)
        module.log_dict({"a": 1.0, "b": torch.tensor(2.0)}, on_epoch=True, batch_size=3)
        module.log_dict(module.both)
    found = [(log.name, log.value, log.metric) for log in records[0]]
    assert found == [("a", 1.0, None), ("b", 2.0, None), ("mean", None, "both.mean"), ("sum", None, "both.sum")]
    assert records[0][0].arguments["batch_size"] == 3


def test_what_the_first_stage_logs_does_not_count_whatever_the_order() -> None:
    # One rank with the first and the last stage: 0F0 0F1 1F0 0F2 1F1 1F2 (interleaved 1F1B).
    module = Module()
    recorder = LogRecorder(module)
    with recorder() as records:
        for stage, microbatch in [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]:
            recorder.next_microbatch(keep=stage == 1)
            module.log("x", 10 * stage + microbatch)
    assert [[log.value for log in logs] for logs in records] == [[10], [11], [12]]


def test_values_are_those_of_the_moment() -> None:
    module = Module()
    recorder = LogRecorder(module)
    total = torch.zeros((), requires_grad=True) * 1
    with recorder() as records:
        for _ in range(2):
            recorder.next_microbatch(keep=True)
            module.log("total", total)
            total = total.add_(1)
    assert [logs[0].value.item() for logs in records] == [0.0, 1.0]
    assert not records[0][0].value.requires_grad


def test_metrics_are_recorded_by_name() -> None:
    module = Module()
    recorder = LogRecorder(module)
    with recorder() as records:
        recorder.next_microbatch(keep=True)
        module.log("acc", module.acc)
        module.log("total", module.nested["total"], on_step=True)
        module.log("other", MeanMetric(), metric_attribute="acc")
    assert [(log.metric, log.value) for log in records[0]] == [("acc", None), ("nested.total", None), ("acc", None)]


def test_errors_leave_no_trace() -> None:
    module = Module()
    with pytest.raises(ZeroDivisionError), LogRecorder(module)():
        _ = 1 / 0
    assert "log" not in vars(module)


def test_another_log_is_put_back() -> None:
    module = Module()
    vars(module)["log"] = mine = lambda *args, **kwargs: None
    with LogRecorder(module)():
        assert module.log is not mine
    assert module.log is mine


def test_a_method_that_was_taken_before_is_recorded_too() -> None:
    class Plain(LightningModule):
        """Logs as Lightning does."""

    class Results:
        """Lightning's results, as far as a log needs them."""

        def reset(self, **_: Any) -> None:
            pass

        def log(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a recorded log must not reach the Trainer")

    module = Plain()
    taken, results = module.log, Results()
    module._trainer = mock.Mock(_results=results, barebones=False)
    module._current_fx_name = "training_step"
    recorder = LogRecorder(module)
    with recorder() as records:
        recorder.next_microbatch(keep=True)
        taken("x", 2.0, on_step=True, batch_size=3)
    (log,) = records[0]
    assert (log.name, float(log.value), log.arguments["on_step"], log.arguments["batch_size"]) == ("x", 2.0, True, 3)
    assert not vars(results)


def test_a_metric_in_the_place_of_another_is_not_mistaken_for_it() -> None:
    module = Module()
    recorder = LogRecorder(module)
    with recorder() as records:
        recorder.next_microbatch(keep=True)
        for _ in range(3):
            module.log("x", module.acc)
            module.acc, module.other = None, None  # type: ignore[assignment]
            gc.collect()  # a new object may get the address of an old one
            module.other, module.acc = MeanMetric(), MeanMetric()
            module.log("y", module.other)
    assert [log.metric for log in records[0]] == ["acc", "other"] * 3


def test_values_of_metrics_become_those_of_the_batch() -> None:
    module = Module()
    recorder = LogRecorder(module)
    whole: list[Tensor | None] = [None]
    with recorder() as records:
        for i in range(2):
            recorder.next_microbatch(keep=True)
            value = torch.tensor(float(i))
            recorder.remember_value(value, lambda: whole[0])
            module.log("x", value, on_step=True)
            module.log("doubled", value * 2)
    assert [log.value.item() for log in merge_logs(records, [1, 1])] == [0.5, 1.0]  # the metric knows no better
    whole[0] = torch.tensor(7.0)
    assert [log.value.item() for log in merge_logs(records, [1, 1])] == [7.0, 1.0]


# -- merging -----------------------------------------------------------------------------------------------------------


def test_merged_values_are_those_of_the_whole_batch() -> None:
    # The oracle has all samples at once, as one process has.
    rng = random.Random(0)
    for _ in range(100):
        counts = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 6))]
        samples = torch.rand(sum(counts), dtype=torch.float64)
        parts = list(samples.split(counts))
        for name, one_process in {
            "mean": samples.mean(),
            "sum": samples.sum(),
            "min": samples.min(),
            "max": samples.max(),
        }.items():
            fx = rng.choice([name, name.upper(), name.title(), getattr(torch, name)])
            values = [getattr(part, name)() for part in parts]
            torch.testing.assert_close(merged_value(values, counts, reduce_fx=fx), one_process)
            plain = merged_value([value.item() for value in values], counts, reduce_fx=fx)
            assert type(plain) is float
            assert plain == pytest.approx(one_process.item(), rel=1e-12)


def test_the_default_is_the_mean_over_samples() -> None:
    assert merged_value([1.0, 4.0], [3, 1]) == 1.75
    assert merged_value([torch.tensor(1), torch.tensor(4)], [3, 1]) == 1.75
    assert merged_value([torch.tensor(1.0), 4.0], [3, 1]) == 1.75


def test_one_microbatch_changes_nothing() -> None:
    value = torch.tensor([2])
    assert merged_value([value], [5]) is value
    assert merged_value([3], [5]) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    for name in ("mean", "sum", "min", "max"):
        value = merged_value([torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)], [1, 2], reduce_fx=name)
        assert value.dtype == dtype


@pytest.mark.parametrize(
    ("sizes", "weights", "batch_size"),
    [
        ([None, None, None], [2, 2, 1], None),
        ([2, 2, 1], [2, 2, 1], 5),  # `len(x)`
        ([7, 4, 9], [7, 4, 9], 20),  # something else than samples
        ([7, None, 9], [7, 2, 9], 18),
        ([torch.tensor(7), torch.tensor(4), torch.tensor(9)], [7, 4, 9], 20),
        ([32, 32, 32], [2, 2, 1], 128),  # `self.hparams.batch_size`
        ([torch.tensor(32)] * 3, [2, 2, 1], 128),
        ([2, 2, 2], [2, 2, 1], 8),
        ([0, 0, 0], [2, 2, 1], 0),
    ],
)
def test_batch_sizes_that_were_given(sizes: list[Any], weights: list[int], batch_size: int | None) -> None:
    values = [1.0, 2.0, 4.0]
    records = [[entry(v, batch_size=size)] for v, size in zip(values, sizes, strict=True)]
    (log,) = merge_logs(records, [2, 2, 1], num_microbatches=4)
    assert log.value == pytest.approx(sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights))
    assert log.arguments == ({} if batch_size is None else {"batch_size": batch_size})
    assert not isinstance(log.arguments.get("batch_size"), Tensor)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 32])
def test_a_batch_size_that_is_always_the_same_makes_batches_count_the_same(size: int) -> None:
    counts = [[2, 2, 2, 2], [2, 2, 1, 1], [2, 2]]  # a full batch, a shorter one, one with fewer microbatches
    logs = [merge_logs([[entry(1.0, batch_size=size)] for _ in each], each, 4) for each in counts]
    found = [log.arguments["batch_size"] for (log,) in logs]
    assert found == [4 * size, 4 * size, 4 if size == 2 else 4 * size]  # two samples in each: taken for their number
    (alone,) = merge_logs([[entry(1.0, batch_size=size)]], [1])
    assert alone.arguments == {"batch_size": size}


def test_tokens_that_happen_to_be_as_many_in_each_microbatch_count_all() -> None:
    tokens = [[6, 6, 6], [6, 5, 7], [6, 3, 3]]
    counts = [[2, 2, 2], [2, 2, 2], [2, 1, 1]]
    for sizes, each in zip(tokens, counts, strict=True):
        (log,) = merge_logs([[entry(1.0, batch_size=size)] for size in sizes], each, 3)
        assert log.arguments == {"batch_size": sum(sizes)}


def test_a_microbatch_that_counts_nothing_does_not_spoil_the_mean() -> None:
    assert merged_value([float("nan"), 2.0], [4, 4], reduce_fx="mean", batch_size=3) != 2.0  # it counts
    (log,) = merge_logs([[entry(float("nan"), batch_size=0)], [entry(2.0, batch_size=5)]], [4, 4])
    assert (log.value, log.arguments) == (2.0, {"batch_size": 5})
    assert merged_value([1.0, 2.0], [0, 0]) == 1.5


def test_a_key_that_was_logged_in_some_microbatches_only() -> None:
    logs = merge_logs([[entry(1.0, "a")], [entry(3.0, "a"), entry(5.0, "b")], [entry(7.0, "b")]], [1, 1, 3])
    assert [(log.name, log.value) for log in logs] == [("a", 2.0), ("b", 6.5)]


def test_two_calls_with_one_key_stay_two() -> None:
    logs = merge_logs([[entry(1.0), entry(10.0)], [entry(3.0), entry(30.0)]], [1, 1])
    assert [log.value for log in logs] == [2.0, 20.0]


def test_nothing_logged() -> None:
    assert merge_logs([[], []], [1, 1]) == []
    assert merge_logs([], []) == []


def test_metrics_are_merged_to_one_log() -> None:
    logs = merge_logs([[entry(None, metric="acc", on_epoch=True)]] * 3, [1, 1, 1])
    assert [(log.metric, log.value, log.arguments) for log in logs] == [("acc", None, {"on_epoch": True})]


# -- sending and replaying ---------------------------------------------------------------------------------------------


def through(*logs: Log) -> list[Log]:
    packed = pack_logs(logs)
    hash(tuple(packed))
    assert all(isinstance(value, Tensor) for value, *_ in packed.values())
    return unpack_logs(packed, torch.device("cpu"))


def test_logs_come_back() -> None:
    value = torch.tensor([3.0], dtype=torch.float64)
    found = through(
        entry(value, "tensor", on_step=True, reduce_fx="max", batch_size=4),
        entry(0.25, "number"),
        entry(0.5, "number"),  # the same key twice
        entry(7, "integer"),
        entry(True, "flag"),
        entry(None, "metric", "acc"),
        entry(torch.tensor(2.0), "metric", "acc"),
        entry(torch.tensor(3), "tensor of an integer"),
    )
    assert [log.name for log in found][:3] == ["tensor", "number", "number"]
    assert found[0].value is value
    assert found[0].arguments == {"on_step": True, "reduce_fx": "max", "batch_size": 4}
    assert [float(log.value) for log in found[1:5]] == [0.25, 0.5, 7.0, 1.0]
    assert found[5].value is None
    assert found[6].value == 2
    assert found[7].value.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_numbers_get_the_default_dtype_as_in_lightning(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    (log,) = merge_logs([[entry(1 / 3)], [entry(1 / 3)]], [1, 1])
    (found,) = through(log)
    assert found.value.dtype == dtype
    assert found.value == torch.tensor(1 / 3)


@pytest.mark.parametrize("fx", [torch.mean, torch.max, max, sum, "mean"])
def test_reductions_travel_by_name(fx: Any) -> None:
    (found,) = through(entry(1.0, reduce_fx=fx))
    assert found.arguments["reduce_fx"] in ("mean", "max", "sum")


def test_numbers_do_not_change_what_has_to_be_sent() -> None:
    assert list(pack_logs([entry(1.0), entry(torch.rand(()))])) == list(pack_logs([entry(2.0), entry(torch.rand(()))]))


def test_batch_sizes_do_not_change_it_either() -> None:
    small, large = (pack_logs([entry(1.0, batch_size=size)]) for size in (3, 5))
    assert flatten(small)[1] == flatten(large)[1]


def test_replay() -> None:
    module = Module()
    logs = [entry(torch.tensor(1.0), "x", on_step=True), entry(torch.tensor(2.0), "acc", "acc")]
    replay(module, logs, alone=False, on_epoch=True)
    assert module.calls == [
        ("x", 1.0, {"on_step": True}),
        ("acc", module.acc, {"metric_attribute": "acc"}),
    ]
    assert module.acc._forward_cache == 2.0


def test_one_replica_has_nothing_to_reduce_and_is_not_told_to() -> None:
    module = Module()
    replay(module, [entry(1.0, on_epoch=True)], alone=True, on_epoch=False)
    assert module.calls == [("x", 1.0, {"on_epoch": True, "sync_dist": True})]


@pytest.mark.parametrize("on_epoch", [True, False])
def test_advice_is_for_what_is_logged_for_an_epoch(on_epoch: bool) -> None:
    module = Module()
    replay(module, [entry(1.0), entry(1.0, on_epoch=False)], alone=True, on_epoch=on_epoch)
    followed = {"sync_dist": True} if on_epoch else {}
    assert module.calls == [("x", 1.0, followed), ("x", 1.0, {"on_epoch": False})]
