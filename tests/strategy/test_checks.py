"""Wrong use is refused with what is wrong, the values and what to do: the same type and text on every rank."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_hybrid import Faults, HybridStrategy, Launch, Tuning
from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.strategy import checks
from lightning_hybrid.strategy.checks import check_tensor_groups
from tests.pool import Pools
from tests.training_jobs import PP2, Manual, Regression, assert_same, loader, make_trainer, train

# -- arguments --------------------------------------------------------------------------------------------------------


#: Arguments that cannot be, what refuses them, and what the text says.
IMPOSSIBLE: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"pipeline_parallel_size": 0}, ValueError, ["pipeline_parallel_size", "at least 1", "0"]),
    ({"pipeline_parallel_size": -2}, ValueError, ["pipeline_parallel_size", "-2"]),
    ({"pipeline_parallel_size": "2"}, TypeError, ["pipeline_parallel_size", "integer", "'2'", "str"]),
    ({"pipeline_parallel_size": True}, TypeError, ["pipeline_parallel_size", "integer", "bool"]),
    ({"pipeline_parallel_size": 2.0}, TypeError, ["pipeline_parallel_size", "2.0", "float"]),
    ({"pipeline_parallel_size": []}, ValueError, ["pipeline_parallel_size", "at least one size", "[]"]),
    ({"pipeline_parallel_size": [4, 0]}, ValueError, ["each pipeline_parallel_size", "at least 1", "0"]),
    ({"tensor_parallel_size": [2, "1"]}, TypeError, ["each tensor_parallel_size", "integer", "'1'"]),
    ({"global_batch_size": 0}, ValueError, ["global_batch_size", "at least 1 or None", "0"]),
    ({"global_batch_size": "auto"}, TypeError, ["global_batch_size", "integer or None", "'auto'"]),
    ({"partition": [3, 3], "pipeline_parallel_size": [2, 3]}, ValueError, ["[3, 3]", "pipeline_parallel_size=3"]),
    (
        {"tuning": {"extra_in_flight": [1]}, "pipeline_parallel_size": [2, 3]},
        ValueError,
        ["[1]", "pipeline_parallel_size=3"],
    ),
    ({"data_parallel_size": 0}, ValueError, ["data_parallel_size", "'auto'", "0"]),
    ({"data_parallel_size": "all"}, TypeError, ["data_parallel_size", "'auto'", "'all'"]),
    ({"num_microbatches": 0}, ValueError, ["num_microbatches", "'auto'", "0"]),
    ({"num_microbatches": None}, TypeError, ["num_microbatches", "'auto'", "None"]),
    ({"num_chunks": 0}, ValueError, ["num_chunks", "0"]),
    ({"faults": {"heartbeat_timeout": timedelta(seconds=1)}}, ValueError, ["heartbeat_timeout", "0:00:03", "0:00:01"]),
    ({"faults": {"heartbeat_timeout": 2.5}}, ValueError, ["heartbeat_timeout", "0:00:03", "0:00:02.500000"]),
    ({"faults": {"heartbeat_timeout": "soon"}}, TypeError, ["faults.heartbeat_timeout", "'soon'", "timedelta"]),
    ({"faults": {"heartbeat_timeout": True}}, TypeError, ["faults.heartbeat_timeout", "True", "timedelta"]),
    ({"tuning": {"extra_in_flight": -1}}, ValueError, ["extra_in_flight", "-1"]),
    ({"tuning": {"extra_in_flight": True}}, TypeError, ["extra_in_flight", "True"]),
    ({"tuning": {"extra_in_flight": "many"}}, TypeError, ["extra_in_flight", "'auto'", "'many'"]),
    ({"tuning": {"extra_in_flight": [1.5]}, "pipeline_parallel_size": 2}, TypeError, ["extra_in_flight", "[1.5]"]),
    (
        {"tuning": {"extra_in_flight": [1, 1]}, "pipeline_parallel_size": 2},
        ValueError,
        ["extra_in_flight", "[1, 1]", "1 links"],
    ),
    ({"tuning": {"extra_in_flight": 1}, "schedule": "gpipe"}, ValueError, ["extra_in_flight", "gpipe"]),
    ({"tensor_parallel_plan": ["colwise"]}, TypeError, ["tensor_parallel_plan", "a dict, a string or None"]),
    ({"sequence_parallel": 1}, TypeError, ["sequence_parallel", "bool", "1"]),
    ({"schedule": "2f2b"}, ValueError, ["schedule", "'2f2b'", "'1f1b'", "'gpipe'", "'interleaved_1f1b'"]),
    ({"schedule": ["1f1b"]}, TypeError, ["schedule", "['1f1b']", "list"]),
    ({"partition": "best"}, ValueError, ["partition", "'best'", "'uniform'", "'parameters'"]),
    ({"partition": 3}, TypeError, ["partition", "3", "list"]),
    ({"partition": [3, 3], "pipeline_parallel_size": 3}, ValueError, ["partition", "[3, 3]", "3"]),
    ({"partition": [6, 0], "pipeline_parallel_size": 2}, ValueError, ["partition", "[6, 0]", "at least one layer"]),
    ({"partition": [3, 3.0], "pipeline_parallel_size": 2}, ValueError, ["partition", "3.0"]),
    ({"partition": [1, 1, 2, 2], "pipeline_parallel_size": 2}, ValueError, ["stage of each layer", "start at 0"]),
    ({"partition": [0, 1, 0, 1], "pipeline_parallel_size": 2}, ValueError, ["[0, 1, 0, 1]", "decrease from 1 to 0"]),
    ({"partition": [0, 0, 1, 1], "pipeline_parallel_size": 3}, ValueError, ["do not contain stage 2;"]),
    ({"partition": [0, 1, 2], "pipeline_parallel_size": 2}, ValueError, ["contain stage 2", "from 0 to 1"]),
    ({"master_weights": "yes"}, TypeError, ["master_weights", "'yes'", "bool"]),
    ({"launch": {"rank_order": "pp-dp"}}, ValueError, ["rank_order", "'pp-dp'", "'pp-dp-tp'"]),
    ({"launch": {"rank_order": "pp-dp-dp"}}, ValueError, ["rank_order", "'pp-dp-dp'"]),
    ({"launch": {"rank_order": "pp-cp-dp"}}, ValueError, ["rank_order", "'pp-cp-dp'", "context_parallel_size"]),
    ({"context_parallel_size": 0}, ValueError, ["context_parallel_size", "at least 1", "0"]),
    ({"context_parallel_size": [2, 1]}, TypeError, ["context_parallel_size", "[2, 1]"]),
    ({"context_parallel": "spiral"}, ValueError, ["context_parallel", "'spiral'", "'ulysses'", "'ring'"]),
    (
        {"context_parallel_size": 2, "context_parallel": "ring", "recompute": "selective"},
        ValueError,
        ["'ring'", "recompute='selective'", "'ulysses'"],
    ),
    ({"context_parallel_size": 2, "sequence_parallel": True}, ValueError, ["context_parallel_size=2", "sequence"]),
    ({"launch": {"rank_order": None}}, TypeError, ["rank_order", "None"]),
    ({"loss_reduction": "none"}, ValueError, ["loss_reduction", "'none'", "'mean'", "'sum'"]),
    ({"body": 3}, TypeError, ["body", "3"]),
    ({"broadcast_batches": "yes"}, TypeError, ["broadcast_batches", "'yes'"]),
    ({"dynamic_shapes": 1}, TypeError, ["dynamic_shapes", "1"]),
    ({"gather_module_on_teardown": 1}, TypeError, ["gather_module_on_teardown", "1"]),
    ({"gather_module_on_teardown": "yes"}, ValueError, ["gather_module_on_teardown", "'yes'", "'auto'"]),
    ({"initial_weights": 3}, TypeError, ["initial_weights", "3"]),
    ({"timeout": "soon"}, TypeError, ["timeout", "'soon'", "timedelta"]),
    ({"faults": {"stall_timeout": "soon"}}, TypeError, ["faults.stall_timeout", "'soon'", "timedelta"]),
    ({"faults": {"stall_timeout": timedelta(seconds=-1)}}, ValueError, ["stall_timeout", "positive"]),
    ({"faults": {"detect_desync": 1}}, TypeError, ["detect_desync", "1"]),
    ({"launch": {"start_method": "thread"}}, ValueError, ["start_method", "'thread'", "'popen'", "'spawn'", "'fork'"]),
    ({"faults": {"on_nonfinite": "stop"}}, ValueError, ["on_nonfinite", "'stop'", "'raise'", "'skip'", "'ignore'"]),
    ({"launch": {"process_group_backend": 1}}, TypeError, ["process_group_backend", "1"]),
    (
        {"launch": {"process_group_backend": "nope"}},
        ValueError,
        ["process_group_backend", "'nope'", "'gloo'", "cpu:gloo,cuda"],
    ),
    ({"launch": {"process_group_backend": "cpu:gloo,cuda:nope"}}, ValueError, ["'nope'", "'gloo'"]),
    ({"timeout": timedelta(0)}, ValueError, ["timeout", "got 0:00:00", "positive"]),
    ({"timeout": timedelta(seconds=-5)}, ValueError, ["timeout", "got -1 day, 23:59:55"]),
    ({"initial_weights": ""}, ValueError, ["initial_weights", "''", "None"]),
    ({"body": ""}, ValueError, ["body", "''", "None"]),
    ({"body": []}, ValueError, ["body", "[]", "None"]),
    ({"zero_stage": 1.0}, ValueError, ["zero_stage", "1.0", "0, 1, 2, 3"]),
    ({"zero_stage": True}, ValueError, ["zero_stage", "True"]),
    ({"zero_stage": 4}, ValueError, ["zero_stage", "4", "0, 1, 2, 3"]),
    (
        {"tuning": {"reshard_after_forward": "never"}},
        ValueError,
        ["tuning.reshard_after_forward", "'never'", "'auto', True, False"],
    ),
    ({"pipeline_parallel_size": "aut"}, TypeError, ["pipeline_parallel_size", "'aut'", "or 'auto'"]),
    ({"context_parallel_size": "auto"}, TypeError, ["context_parallel_size", "layout='auto'"]),
    ({"num_chunks": "aut"}, TypeError, ["num_chunks", "'aut'", "or 'auto'"]),
    ({"schedule": "aut"}, ValueError, ["schedule", "'aut'", "'auto'"]),
    ({"zero_stage": "aut"}, ValueError, ["zero_stage", "'aut'", "'auto'"]),
    ({"recompute": "aut"}, ValueError, ["recompute", "'aut'", "'auto'"]),
    ({"tensor_parallel_plan": "automatic"}, ValueError, ["tensor_parallel_plan='automatic'", "'auto'"]),
    ({"tensor_parallel_plan": {"*.up": "colwse"}}, ValueError, ["tensor_parallel_plan", "Did you mean 'colwise'?"]),
    ({"tensor_parallel_plan": {"*.up": "S[0]"}}, ValueError, ["tensor_parallel_plan", "Did you mean 'S(0)'?"]),
    ({"num_chunks": 2, "schedule": "1f1b"}, ValueError, ["schedule='1f1b'", "num_chunks=2"]),
    ({"pipeline_size": 2}, TypeError, ["'pipeline_size'", "did you mean 'pipeline_parallel_size'?"]),
    ({"heartbeat_timeout": 60}, TypeError, ["belongs to `faults`: faults=Faults(heartbeat_timeout=...)"]),
    ({"rank_order": "pp-dp-tp"}, TypeError, ["belongs to `launch`: launch=Launch(rank_order=...)"]),
    ({"rank_ordr": "pp-dp-tp"}, TypeError, ["did you mean launch=Launch(rank_order=...)?"]),
    ({"faults": {"heartbeet_timeout": 60}}, TypeError, ["heartbeet_timeout'", "did you mean 'heartbeat_timeout'?"]),
    (
        {"tuning": {"xyz": 1}},
        TypeError,
        ["Tuning has no argument 'xyz'", "its arguments are extra_in_flight, reshard_after"],
    ),
    ({"faults": "all"}, TypeError, ["faults must be a Faults", "'all'"]),
    ({"xyz": 2}, TypeError, ["'xyz'", "its arguments are data_parallel_size, tensor_parallel_size"]),
]


def test_several_chunks_are_interleaved() -> None:
    assert HybridStrategy(num_chunks=2).settings.schedule == "interleaved_1f1b"
    assert HybridStrategy().settings.schedule == HybridStrategy(num_chunks="auto").settings.schedule == "1f1b"
    assert HybridStrategy(num_chunks=2, schedule="gpipe").settings.schedule == "gpipe"


def in_python(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments whose groups are as YAML has them."""
    groups: dict[str, Any] = {"faults": Faults, "launch": Launch, "tuning": Tuning}
    return {
        name: groups[name](**value) if isinstance(value, dict) and name in groups else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize(("arguments", "kind", "words"), IMPOSSIBLE)
def test_impossible_arguments_are_refused_with_their_values(
    arguments: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as error:
        HybridStrategy(**in_python(arguments))
    for word in words:
        assert word in str(error.value)


def refused_in_yaml(arguments: dict[str, Any]) -> str:
    """What reading a configuration says; no process has been started by then."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(HybridStrategy, "strategy")
    strategy = {"class_path": "lightning_hybrid.HybridStrategy", "init_args": arguments}
    try:
        parser.instantiate_classes(parser.parse_args(["--config", yaml.safe_dump({"strategy": strategy})]))
    except Exception as error:
        return str(error)
    return ""


def test_impossible_arguments_are_refused_in_yaml() -> None:
    said = 0
    for arguments, _, words in IMPOSSIBLE:
        (name, value), *_ = arguments.items()
        if isinstance(value, timedelta):
            arguments = {name: "-1:00:00"}
        if isinstance(value, dict) and any(isinstance(part, timedelta) for part in value.values()):
            arguments = {name: dict.fromkeys(value, "-1:00:00")}
        text = refused_in_yaml(arguments)
        if text:
            assert name in text or words[0] in text, (arguments, text)
            said += 1
        else:  # YAML's reader has made a possible value of it, such as 2 of '2', also in a list
            assert isinstance(value, (str, float, bool, int, list)), arguments
    assert said > len(IMPOSSIBLE) - 8


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2}, ["3", "2", "pipeline_parallel_size"]),
        ({"data_parallel_size": 2}, ["3", "data_parallel_size", "2"]),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, ["3", "pipeline_parallel_size", "2"]),
        ({"pipeline_parallel_size": 4}, ["3", "4"]),
        ({"data_parallel_size": 1}, ["3", "1"]),
    ],
)
def test_a_world_that_cannot_be_divided_is_refused_when_the_trainer_is_made(
    arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="process") as error:
        make_trainer(None, strategy=HybridStrategy(**arguments), devices=3)
    for word in words:
        assert word in str(error.value)


# -- modules ----------------------------------------------------------------------------------------------------------


class NoList(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        del self.body


class OneLayer(Regression):
    def __init__(self) -> None:
        super().__init__(num_layers=1)


class SmallBody(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        self.outside = nn.Linear(100, 100)


class Listed(Regression):
    """Its layers are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(self.body)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.order():
            x = layer(x)
        return self.head(x)

    def order(self) -> Any:
        return self.body


class Backwards(Listed):
    def order(self) -> Any:
        return reversed(self.body)


class DecidesBetween(Listed):
    def order(self) -> Any:
        for layer in self.body:
            yield layer
            if self.head.weight.sum() > 1000:
                break


class RankDependent(Listed):
    def order(self) -> Any:
        return [*self.body[:1], torch.sin if self.global_rank else torch.cos, *self.body[1:]]


class NamesBody(Regression):
    pipeline_body = "boddy"


class OwnBackward(Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class FetchesItself(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


class FetchesItselfInValidation(Regression):
    def validation_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


class HalfSplit(Regression):
    def split_body_input(self, x: Any, num_microbatches: int) -> Any:
        return [x]


class TwoOptimizers(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.body.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class Searches(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Factored(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class BadCall(Regression):
    """Does not call its body once, as a whole."""

    def __init__(self, how: str, at_batch: int = 0) -> None:
        super().__init__()
        self.how = how
        self.at_batch = at_batch
        self.batch_idx = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.batch_idx < self.at_batch:
            return self.head(self.body(h))
        if self.how == "loop":
            for layer in self.body:
                h = layer(h)
        elif self.how == "index":
            h = self.body[-1](self.body[0](h))
        elif self.how == "slice":
            h = self.body[:3](h)
        elif self.how == "twice":
            h = self.body(h) + self.body(h)
        elif self.how == "nested":
            h = self.body(self.body(h))
        elif self.how == "caught":
            try:
                h = self.body(h)
                h = self.body(h)
            except Exception:
                pass
        return self.head(h)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return self.loss(batch)


class Penalized(Regression):
    """Adds a derivative with respect to its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.requires_grad_()
        h = self.embed(x)
        z = self.body(h)
        out = self.head(z if self.how == "through" else z + h)  # or around the body, too
        if self.how == "backward":
            out.sum().backward(retain_graph=True)
            return nn.functional.mse_loss(out, y) + x.grad.norm()
        (gradient,) = torch.autograd.grad(out.sum(), z if self.how == "behind" else x, create_graph=True)
        return nn.functional.mse_loss(out, y) + gradient.square().mean()


def penalized(layout: Any) -> list[str | float]:
    """What follows from each kind of derivative: an error, or the last loss."""
    results: list[str | float] = []
    for how in ("through", "around", "backward", "behind"):
        try:
            results.append(train(Penalized(how), layout, loader()).losses[-1])
        except ValueError as error:
            results.append(str(error))
    return results


def test_a_derivative_through_the_body_is_refused_and_one_behind_it_is_not(ranks: Pools) -> None:
    expected = penalized(None)
    for *refused_texts, behind in ranks(2, lightning=True).run(penalized, PP2):
        for text in refused_texts:
            assert text.startswith("`training_step` computes derivatives through the body 'body'")
        assert_same(behind, expected[3])


class BadReturn(Regression):
    def __init__(self, value: str) -> None:
        super().__init__()
        self.value = value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx < 1:
            return loss
        return {"none": None, "no loss": {"lost": loss}, "number": 3.0, "list": [loss], "vector": loss.repeat(2)}[
            self.value
        ]


def refused(make: Callable[..., Regression], arguments: tuple[Any, ...], layout: Mapping[str, Any], how: str) -> Any:
    """Type, text and time of what a Trainer raises; whether the process is free for the next one."""
    trainer = make_trainer(layout, num_sanity_val_steps=0)
    with pytest.raises(Exception) as error:  # noqa: PT011 - the type is looked at in the tests
        getattr(trainer, how)(make(*arguments), loader())
    return type(error.value).__name__, str(error.value), time.time(), dist.is_initialized()


def check_refused(
    ranks: Pools,
    make: Callable[..., Regression],
    *arguments: Any,
    layout: Mapping[str, Any] | None = None,
    how: str = "fit",
    size: int = 2,
) -> tuple[str, str]:
    results = ranks(size, lightning=True).run(refused, make, arguments, layout or PP2, how, timeout=30)
    names, texts, times, initialised = zip(*results, strict=True)
    assert len(set(texts)) == 1, texts
    assert len(set(names)) == 1, names
    assert max(times) - min(times) < 5, times
    assert not any(initialised) or all(initialised)
    return names[0], texts[0]


@pytest.mark.rows(15, 16, 17, 18, 21)
@pytest.mark.parametrize(
    ("make", "layout", "kind", "words"),
    [
        (
            NoList,
            {},
            "ValueError",
            ["No list of layers", "NoList", "The module has no list", "body=['first', 'second', ...]"],
        ),
        (
            SmallBody,
            {},
            "ValueError",
            ["SmallBody", "large part", "'body'", "'other'", "6 layers", "body='...'"],
        ),
        (Regression, {"body": "boddy"}, "ValueError", ["'boddy'", "Regression", "Candidates", "'body'"]),
        (NamesBody, {}, "ValueError", ["'boddy'", "Candidates", "'body'"]),
        (Regression, {"body": "head"}, "TypeError", ["'head'", "Linear", "nn.Sequential", "'body'"]),
        (Regression, {"partition": [1, 2]}, "ValueError", ["[1, 2]", "3", "6"]),
        (OneLayer, {"body": "body"}, "ValueError", ["1 layer", "2 stages", "pipeline_parallel_size"]),
        (
            Backwards,
            {},
            "ValueError",
            ["At test_checks.py:", "on stage 0 needs the result of", "on stage 1", "body=['body.5', 'body.4',"],
        ),
        (
            DecidesBetween,
            {},
            "ValueError",
            [
                "`__bool__` at test_checks.py:",
                "the layer 'body.1' is called afterward",
                "decision depend only on the batch",
            ],
        ),
        (RankDependent, {}, "ValueError", ["not the same on every rank: call 2 is `cos` at", "`sin` at", "rank 1"]),
        (Manual, {}, "ValueError", ["Manual", "manual optimization", "automatic_optimization"]),
        (OwnBackward, {}, "ValueError", ["OwnBackward", "backward", "Remove"]),
        (FetchesItself, {}, "ValueError", ["FetchesItself.training_step", "dataloader_iter", "batch"]),
        (FetchesItselfInValidation, {}, "ValueError", ["validation_step", "dataloader_iter", "batch"]),
        (HalfSplit, {}, "ValueError", ["HalfSplit", "split_body_input", "join_body_output"]),
        (
            TwoOptimizers,
            {},
            "ValueError",
            ["returned several optimizers", "several parameter groups", "num_microbatches=1"],
        ),
        (Searches, {}, "ValueError", ["LBFGS", "AdamW"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_modules_that_cannot_be_cut_are_refused_on_every_rank(
    ranks: Pools, make: Any, layout: dict[str, Any], kind: str, words: list[str]
) -> None:
    name, text = check_refused(ranks, make, layout={**PP2, **layout})
    assert name == kind
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("make", "layout", "words"),
    [
        (
            Listed,
            {"tensor_parallel_plan": {"embed": ColwiseParallel()}},
            ["Listed", "'embed'", "by torch", "a style name"],
        ),
        (
            Regression,
            {"tensor_parallel_plan": {"body.*": "sequence_region"}, "sequence_parallel": True, "body": ["body"]},
            ["Regression", "'body.0'", "sequence shards", "nn.ModuleList"],
        ),
        (
            Listed,
            {"tensor_parallel_plan": {"body": "on_shards"}},
            ["Listed", "'on_shards'", "contains", "each of these layers"],
        ),
    ],
)
def test_shared_layers_that_cannot_be_followed_are_refused_on_every_rank(
    ranks: Pools, make: Any, layout: dict[str, Any], words: list[str]
) -> None:
    name, text = check_refused(ranks, make, size=4, layout={**PP2, "tensor_parallel_size": 2, **layout})
    assert name == "ValueError"
    for word in ("tensor_parallel_size=2", "'body'", "called by your own code", *words):
        assert word in text


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer({"tensor_parallel_size": 2, "tensor_parallel_plan": None}, devices=2, fast_dev_run=True)
        trainer.fit(Regression(), loader())
    return [str(each.message) for each in caught if "tensor_parallel_size" in str(each.message)]


def test_shared_layers_that_divide_nothing_are_worth_a_warning(ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(warned)
    assert len(first) == 1
    assert first[0].startswith("tensor_parallel_size=2 shards none of the parameters of Regression")
    assert second == []


def test_a_body_whose_refusal_differs_by_rank_is_still_one_text(ranks: Pools) -> None:
    name, text = check_refused(ranks, SmallBody, size=4, layout={**PP2, "data_parallel_size": 2})
    assert name == "ValueError"
    assert "SmallBody" in text


@pytest.mark.rows(75)
@pytest.mark.parametrize("how", ["none", "loop", "index", "slice", "twice", "nested", "caught"])
@pytest.mark.parametrize("at_batch", [0, 1])
def test_a_body_that_is_not_called_once_as_a_whole_is_refused_on_every_rank(
    ranks: Pools, how: str, at_batch: int
) -> None:
    """A body that is named; one that is found too, if the first step calls it as a whole."""
    layout = PP2 if at_batch or how == "none" else PP2 | {"body": "body"}
    name, text = check_refused(ranks, BadCall, how, at_batch, layout=layout)
    assert name in ("BodyCallError", "ValueError")
    for word in ("step" if how in ("loop", "index") else "`training_step`", "'body'", "exactly once", "self.body(x)"):
        assert word in text
    if how in ("twice", "nested"):
        assert "2 times" in text


@pytest.mark.rows(75)
@pytest.mark.parametrize("how", ["none", "loop", "twice"])
def test_a_body_that_is_not_called_once_in_validation_is_refused_on_every_rank(ranks: Pools, how: str) -> None:
    layout = {"pipeline_parallel_size": 3, "body": "body"}
    name, text = check_refused(ranks, BadCall, how, how="validate", size=3, layout=layout)
    assert name in ("BodyCallError", "ValueError")
    for word in ("step" if how == "loop" else "`validation_step`", "'body'", "exactly once"):
        assert word in text


def test_a_body_call_is_refused_in_every_model_group(ranks: Pools) -> None:
    _, text = check_refused(ranks, BadCall, "twice", size=4, layout={"pipeline_parallel_size": 2, "body": "body"})
    assert "2 times" in text


@pytest.mark.rows(19)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("none", ["returned None", "but contains no `return None`"]),
        ("no loss", ["'loss'", "lost"]),
        ("number", ["must return a tensor", "float"]),
        ("list", ["must return a tensor", "list"]),
        ("vector", ["scalar"]),
    ],
)
def test_a_step_without_a_loss_is_refused_on_every_rank(ranks: Pools, value: str, words: list[str]) -> None:
    results = ranks(2, lightning=True).run(refused, BadReturn, (value,), PP2, "fit", timeout=30)
    assert max(result[2] for result in results) - min(result[2] for result in results) < 5
    for _, text, _, _ in results:
        for word in words:
            assert word in text


SHARED = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"embed": "colwise_gather_output"}}


@pytest.mark.parametrize("layout", [{"zero_stage": 1}, SHARED], ids=["zero", "tp2"])
def test_adafactor_is_refused_where_a_rank_has_a_part_of_a_parameter(ranks: Pools, layout: dict[str, Any]) -> None:
    name, text = check_refused(ranks, Factored, layout=layout)
    assert name == "ValueError"
    for word in ("Adafactor", "zero_stage=0", "tensor_parallel_size=1", "AdamW"):
        assert word in text


def fused(layout: Mapping[str, Any]) -> str:
    from lightning.pytorch.plugins import MixedPrecision
    from torch.amp import GradScaler

    class Fused(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), fused=True)

    with pytest.raises(ValueError, match="fused") as error:
        make_trainer(layout, plugins=MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))).fit(Fused(), loader())
    return str(error.value)


@pytest.mark.rows(13)
def test_a_fused_optimizer_with_a_scaler_is_refused_on_every_rank(ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(fused, PP2)
    assert first == second
    assert "bf16-mixed" in first


def survivors() -> list[str]:
    """What is refused in a pipeline works on one process without microbatches, as Lightning's own."""
    done = []
    for make in (NoList, SmallBody, OwnBackward, FetchesItselfInValidation, Searches):
        if make is not NoList:
            make_trainer({}, fast_dev_run=True).fit(make(), loader())
            done.append(make.__name__)
    return done


@pytest.mark.rows(15, 16, 17, 18)
def test_what_a_pipeline_refuses_works_without_one(ranks: Pools) -> None:
    assert len(ranks(1, lightning=True).run(survivors)[0]) == 4


# -- what must be the same on every rank -------------------------------------------------------------------------------


class Marked(Regression):
    """On each rank other layers are on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.body):
            layer.pipeline_stage = int(index + int(os.environ["RANK"]) > 2)  # type: ignore[assignment]


class Planning(Regression):
    """The first rank has a plan of its own."""

    def tensor_parallel_plan(self) -> Any:
        return "auto" if self.global_rank else {"head": "rowwise_split_input"}


def planned(**plan: Any) -> dict[str, Any]:
    """Layers are shared so."""
    return {"tensor_parallel_size": 2, "tensor_parallel_plan": plan}


def differing(
    layouts: list[dict[str, Any]], arguments: list[dict[str, Any]], make: type[Regression] = Regression
) -> str:
    """Each rank has its own arguments of the strategy and of the Trainer; what it raises."""
    rank = int(os.environ["RANK"])
    trainer = make_trainer(layouts[rank], **arguments[rank])
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is returned
        trainer.fit(make(), loader())
    return str(error.value)


def runs_another_version(versions: list[str]) -> str:
    """Each rank has its own version of the package; what it raises."""
    with mock.patch.object(checks, "__version__", versions[int(os.environ["RANK"])]):
        return differing([PP2, PP2], [{}, {}])


def test_ranks_with_other_versions_of_the_package_are_told_apart(ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(runs_another_version, ["0.1.0", "0.1.1"])
    assert first == second
    assert first.startswith("`lightning_hybrid.__version__` is not the same on every rank: 0.1.0 on rank 0")


SAME: dict[str, Any] = {"layouts": [PP2, PP2], "arguments": [{}, {}], "make": Regression}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"layouts": [PP2, {**PP2, "schedule": "gpipe"}]},
            "`schedule` is not the same on every rank: '1f1b' on rank 0",
        ),
        (
            {"layouts": [PP2, {"tensor_parallel_size": 2, "num_microbatches": 4}]},
            "`tensor_parallel_size` is not the same",
        ),
        ({"arguments": [{}, {"accumulate_grad_batches": 2}]}, "`Trainer.accumulate_grad_batches` is not the same"),
        (
            {"arguments": [{"max_epochs": 2}, {}]},
            "`Trainer.max_epochs` is not the same on every rank: 2 on rank 0; 1 on",
        ),
        (
            {"layouts": [planned(**{"body.*.0": "colwise"}), planned(**{"body.*.0": "rowwise_split_input"})]},
            "`tensor_parallel_plan['body.*.0']` is not the same on every rank: 'colwise' on rank 0; 'rowwise_split",
        ),
        (
            {"layouts": [planned(head=ColwiseParallel()), planned(head=ColwiseParallel(use_local_output=False))]},
            "use_local_output=True) on rank 0; ColwiseParallel(",
        ),
        (
            {"layouts": [planned(embed="colwise", head="colwise"), planned(head="colwise", embed="colwise")]},
            "`tensor_parallel_plan` is not the same on every rank: ['embed', 'head'] on rank 0; ['head', 'embed'] on",
        ),
        (
            {"layouts": [{**PP2, "partition": [1, 5]}, {**PP2, "partition": [2, 4]}]},
            "`partition` is not the same on every rank: [1, 5] on rank 0; [2, 4] on rank 1",
        ),
        (
            {"make": Marked},
            "`body.2.pipeline_stage` is not the same on every rank: 0 on rank 0; 1 on rank 1",
        ),
        (
            {"make": Planning, "layouts": [{"tensor_parallel_size": 2}] * 2},
            "`tensor_parallel_plan` is not the same on every rank: ['head'] on rank 0; 'auto' on rank 1",
        ),
    ],
    ids=["schedule", "sizes", "accumulation", "epochs", "style", "style of torch", "order", "partition", "mark", "own"],
)
def test_ranks_that_were_given_different_things_are_refused_before_they_wait_for_each_other(
    ranks: Pools, change: dict[str, Any], text: str
) -> None:
    found = ranks(2, lightning=True).run(differing, *{**SAME, **change}.values(), timeout=30)
    assert found[0] == found[1]
    assert text in found[0]


def warned_of_machines(rank_order: str) -> list[str]:
    """What is said of four ranks, two on each of two machines."""
    mesh = Mesh(Sizes(1, 2, 2), rank_order=rank_order, hosts=["node0", "node0", "node1", "node1"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_tensor_groups(mesh)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("rank_order", "is_said"), [("pp-dp-tp", False), ("tp-dp-pp", True)])
def test_a_tensor_group_on_several_machines_is_said(ranks: Pools, rank_order: str, is_said: bool) -> None:
    texts, *_ = ranks(4).run(warned_of_machines, rank_order)  # a Trainer's other ranks are silent
    assert len(texts) == is_said
    assert all("spans several nodes: ranks 0, 2 are on node0 and node1" in text for text in texts)
