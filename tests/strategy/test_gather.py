"""A module that was divided is made whole again, and is then as if it had never been divided."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_hybrid import Launch
from lightning_hybrid.cli.consolidate import consolidate
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer
from tests.zoo import tensor as zoo

Layout = Mapping[str, Any] | None
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "tp2 pp2": (4, {**TP2, **PP2}),
    "tp2 pp2 units": (4, {**TP2, **PP2, "body": ["body"], "launch": Launch(rank_order="tp-dp-pp")}),
    "tp2 dp2 sequences": (4, {**TP2, "sequence_parallel": True}),
    "dp2 pp2 chunks 2": (4, {**PP2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
}


class Counting(nn.Module):
    """A layer with buffers of every kind and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(zoo.LENGTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("again", self.calls)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.what = "new"

    def get_extra_state(self) -> str:
        return self.what

    def set_extra_state(self, state: str) -> None:
        self.what = state

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.passing += x.detach().mean().float()
            self.what = "used"
        return self.norm(x)


class Mixed(zoo.TiedWords):
    """Shared layers of every kind, and what only pipelines divide."""

    def build(self) -> None:
        encoder = nn.TransformerEncoderLayer(zoo.DIM, zoo.HEADS, 32, 0.0, batch_first=True)
        self.embed = nn.Embedding(zoo.TOKENS, zoo.DIM)
        self.register_buffer("seen", torch.zeros(()))
        self.body = nn.Sequential(
            encoder,
            Counting(),
            zoo.OwnBlock(),
            nn.TransformerEncoder(copy.deepcopy(encoder), 1),
            zoo.OwnBlock(),
            Counting(),
        )
        self.norm, self.head = nn.LayerNorm(zoo.DIM), nn.Linear(zoo.DIM, zoo.TOKENS)
        self.head.weight = self.embed.weight
        self.body[4].norm1.weight = self.body[2].norm1.weight  # type: ignore[union-attr]
        self.body[0].linear1.requires_grad_(False)  # type: ignore[union-attr]
        self.body[3].layers[0].linear2.weight.mark = 7  # type: ignore[union-attr,index]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(tokens))))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        assert self.body[3].layers[0].linear2.weight.mark == 7  # type: ignore[union-attr,index]
        return super().configure_optimizers()

    def tensor_parallel_plan(self) -> dict[str, str]:
        own = {
            name.replace("body.*", "body.[24]"): style
            for name, style in zoo.OwnAttention.tensor_parallel_plan(self).items()
        }  # type: ignore[arg-type]
        layers = {"self_attn": "attention", "linear1": "colwise", "linear2": "rowwise"}
        return {
            **own,
            **{f"{name}.{layer}": style for name in ("body.0", "body.3.layers.0") for layer, style in layers.items()},
            "embed": "vocab",
            "head": "vocab",
        }


def made() -> Mixed:
    torch.manual_seed(5)
    return Mixed(batch_size=8).double()


def look(module: nn.Module) -> dict[str, Any]:
    """Everything about a module by which it can be told from another one."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    parts = dict(module.named_modules(remove_duplicate=False))
    return {
        "kinds": {name: (type(x), x.dtype, x.requires_grad, sorted(vars(x))) for name, x in named},
        "ties": [name for name, x in named if any(x is other for before, other in named if before < name)],
        "layers": {name: type(part) for name, part in parts.items()},
        "attributes": {
            name: {
                key: value for key, value in vars(part).items() if isinstance(value, (bool, int)) and key != "training"
            }
            for name, part in parts.items()
            if name
        },
        "hooks": {name: len(part._forward_pre_hooks) + len(part._forward_hooks) for name, part in parts.items()},
    }


def trained(module: Mixed, layout: Layout, path: str | None = None, **arguments: Any) -> dict[str, Any]:
    trainer = make_trainer(layout, max_steps=3, **arguments)
    trainer.fit(module)
    if path is not None:
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
    metrics = trainer.validate(module, verbose=False)[0]
    return {"trainer": trainer, "val": metrics["val"]}


def gathered(layout: dict[str, Any], path: str) -> dict[str, Any]:
    """Train, make whole, look, run alone; then on in another layout."""
    module = made()
    passing = module.body[5].passing  # type: ignore[union-attr]
    run = trained(module, layout, path)
    keeps = module.body[5].passing is passing
    run["trainer"].strategy.gather_module()
    (value,) = {module.body[5].what}  # type: ignore[union-attr]
    batches = list(module.val_dataloader())
    module.eval()
    with torch.no_grad():
        alone = sum(module.loss(batch) * len(batch[0]) for batch in batches) / sum(len(batch[0]) for batch in batches)
    return {
        "look": look(module),
        "state": copy.deepcopy(module.state_dict()),
        "passing": module.body[5].passing.clone(),  # type: ignore[union-attr,operator]
        "extra": value,
        "alone": float(alone),
        "val": run["val"],
        "keeps": keeps,
    }


@pytest.mark.parametrize("name", daily(LAYOUTS, "tp2 pp2 units", "tp2 dp2 sequences", "dp2 pp2 chunks 2"))
def test_the_module_is_whole_again_on_every_rank(ranks: Pools, tmp_path: Any, name: str) -> None:
    size, layout = LAYOUTS[name]
    path = str(tmp_path / "before.ckpt")
    results = ranks(size, lightning=True).run(gathered, layout, path)
    expected, like = torch.load(path, weights_only=False)["state_dict"], look(made())
    for result in results:
        assert list(result["state"]) == list(expected)
        for tensor_name, value in result["state"].items():
            assert type(value) is type(expected[tensor_name])
            assert (
                value == expected[tensor_name] if isinstance(value, str) else torch.equal(value, expected[tensor_name])
            )
        for key, found in result["look"].items():
            assert found == like[key], key
        assert_same(result["alone"], float(result["val"]))
        assert torch.equal(result["passing"], results[-1]["passing"])
        assert result["extra"] == "used"
    assert results[0]["passing"].abs().sum() > 0


# -- what comes after --------------------------------------------------------------------------------------------------


def again(layouts: list[Layout]) -> dict[str, Tensor]:
    """The weights after one run of each layout with the same module."""
    torch.manual_seed(5)
    module = zoo.Words(batch_size=8).double()
    for layout in layouts:
        trainer = make_trainer(None if layout is None else {**layout, "gather_module_on_teardown": True}, max_steps=3)
        trainer.fit(module)
        module.eval()
        with torch.no_grad():
            module.body(torch.zeros(1, zoo.LENGTH, zoo.DIM, dtype=torch.float64))
    return copy.deepcopy(module.state_dict())


@pytest.mark.parametrize("layouts", [[TP2, PP2], [PP2, TP2, {**PP2, "num_chunks": 2, "schedule": "gpipe"}]])
def test_it_trains_on_under_any_other_layout(ranks: Pools, layouts: list[Layout]) -> None:
    expected = again([None] * len(layouts))
    for state in ranks(2, lightning=True).run(again, layouts):
        assert_same(state, expected, 1e-9)


def saved_afterwards(layout: dict[str, Any], path: str, gathers: Any) -> bool:
    module = made()
    layout = {**layout, "gather_module_on_teardown": "auto" if gathers == "auto" else False}
    trainer = make_trainer(layout, max_steps=2)
    trainer.strategy.gather_module()  # nothing is divided yet
    trainer.fit(module)
    if gathers == "by hand":
        trainer.strategy.gather_module()
        trainer.strategy.gather_module()
    trainer.save_checkpoint(f"{path} weights", weights_only=True)
    trainer.save_checkpoint(path)
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(f"{path} after validation")
    if gathers == "by hand":
        trainer.strategy.gather_module()
    return any(parameter.is_meta or isinstance(parameter, DTensor) for parameter in module.parameters())


SAVED = {**LAYOUTS, "zero3": (2, {"zero_stage": 3}), "tp2 zero1": (4, {**TP2, "zero_stage": 1})}


@pytest.mark.parametrize(
    ("name", "form", "how"),
    daily(
        [(name, ("file", "directory")[number % 2], "auto") for number, name in enumerate(SAVED)]
        + [("zero3", "directory", "auto"), ("tp2 pp2", "directory", "by hand")],
        ("tp2", "file", "auto"),
        ("dp2 pp2 chunks 2", "directory", "auto"),
        ("zero3", "file", "auto"),
        ("tp2 pp2", "directory", "by hand"),
    ),
)
def test_checkpoints_saved_afterwards_are_those_of_a_divided_module(
    ranks: Pools, tmp_path: Any, name: str, form: str, how: str
) -> None:
    size, layout = SAVED[name]
    saved = {}
    for gathers in (False, how):
        path = tmp_path / str(gathers)
        given = {**layout, "save_distributed_checkpoint": form == "directory"}
        divided = ranks(size, lightning=True).run(saved_afterwards, given, str(path), gathers)
        assert divided == [not gathers] * size
        for kind in ("", " weights", " after validation"):
            saved[gathers, kind] = read(Path(f"{path}{kind}"), tmp_path / "read")
    for kind in ("", " weights", " after validation"):
        assert_same(saved[how, kind], saved[False, kind], 0.0)
    assert "optimizer_states" not in saved[how, " weights"]
    assert len(saved[how, ""]["optimizer_states"][0]["state"]) > 20
    assert_same(saved[how, " after validation"]["optimizer_states"], saved[how, ""]["optimizer_states"], 0.0)


def read(path: Path, file: Path) -> dict[str, Any]:
    """What training is continued with of a checkpoint."""
    if path.is_dir():
        consolidate(path, file, overwrite=True)
        path = file
    checkpoint = torch.load(path, weights_only=False)
    return {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "callbacks") if key in checkpoint}


class Early(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.gather_module()


class Failing(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        raise KeyError("mine")


def refused(layout: dict[str, Any], what: str) -> str:
    module, callbacks = Regression(), []
    if what == "styles of torch":
        layout = {**layout, "tensor_parallel_plan": {"body.*.0": ColwiseParallel()}}
    elif what == "in the run":
        callbacks.append(Early())
    elif what == "a failure":
        module = Failing()
    with pytest.raises(Exception) as error:  # noqa: PT011 - of several types
        make_trainer(layout, callbacks=callbacks).fit(module, loader())
    assert any(parameter.is_meta for parameter in module.parameters()) == (what == "a failure")
    return str(error.value)


@pytest.mark.parametrize(
    ("layout", "what", "text"),
    [
        (TP2, "styles of torch", "'body.0.0' was sharded by a torch parallel style"),
        (PP2, "in the run", "`strategy.gather_module\\(\\)` was called during the run"),
        (PP2, "a failure", "mine"),
    ],
)
def test_what_is_refused(ranks: Pools, layout: dict[str, Any], what: str, text: str) -> None:
    texts = ranks(2, lightning=True).run(refused, {**layout, "gather_module_on_teardown": True}, what)
    assert texts[0] == texts[1]
    assert re.search(text, texts[0])
