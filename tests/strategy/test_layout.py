"""Which stage gets which layers, and what the table says that each stage will hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_hybrid import HybridStrategy
from lightning_hybrid.axes import Sizes
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy.layout import describe, find_stages, misplaced_text
from lightning_hybrid.tuning.dry_run.dry_run import DryRun, dry_run
from tests.pool import Pools
from tests.training_jobs import make_trainer


class Block(nn.Module):
    """As large as a layer of a transformer: 12 squares of its width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(6 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Language(LightningModule):
    """An embedding, a loop over blocks, a norm, and a head."""

    def __init__(self, vocabulary: int = 32_000, width: int = 512, layers: int = 8, *, tied: bool = False) -> None:
        super().__init__()
        self.build(vocabulary, width, layers)
        if tied:
            self.head.weight = self.embed.weight

    def build(self, vocabulary: int, width: int, layers: int) -> None:
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def training_step(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.features(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randint(self.embed.num_embeddings, (16, 5)), 8)


class Chain(Language):
    """The same with its blocks in an `nn.Sequential`, which is called as a whole."""

    pipeline_body = "blocks"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = nn.Sequential(*self.blocks)

    def features(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(tokens)))


class Backwards(Language):
    """Calls its blocks in another order than they are divided in."""

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.norm(x)


class HeadFirst(Language):
    """The head is made before the blocks, but is used after them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("blocks", "norm"):
            self.add_module(name, self._modules.pop(name))


def strategy_of(ranks: int = 4, **arguments: Any) -> HybridStrategy:
    """As many stages as ranks, balanced by parameters."""
    return HybridStrategy(
        **{"pipeline_parallel_size": ranks, "num_microbatches": 4, "partition": "parameters"} | arguments
    )


def layers_of(module: LightningModule, ranks: int = 4, **arguments: Any) -> list[int]:
    """The number of layers of each stage."""
    _, stage_map = find_stages(module, strategy_of(ranks, **arguments).settings, ranks)
    return [len(positions) for positions in stage_map.stages]


def described(module: LightningModule, ranks: int = 4, **arguments: Any) -> list[str]:
    """The layout, as `plan` shows it."""
    return describe(module, strategy_of(ranks, **arguments).settings, Sizes(pipeline=ranks)).splitlines()


def dry(make: Any, ranks: int, **arguments: Any) -> DryRun:
    """The layout and the memory, as `memory` shows them."""
    settings = strategy_of(ranks, **arguments).settings
    return dry_run(lambda: (make(), None), settings, Sizes(pipeline=ranks), precision=Precision())


def columns(table: str) -> list[list[str]]:
    """The numbers of the stages: (in the layers, outside, all)."""
    rows = [line.replace("%", "").split() for line in table.splitlines()]
    return [row[-4:-1] for row in rows if row and row[0].isdigit()]


# -- a batch that has fewer samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Language, Chain])
def test_microbatches_and_bubble_are_those_of_the_batch_that_was_split(kind: type[Language]) -> None:
    """The loader's batches have 8 samples: they make no 32 microbatches."""
    first = dry(lambda: kind(100, 8, 4), 2, num_microbatches=32).layout.splitlines()[0]
    assert "8 microbatches" in first
    assert f"bubble {100 * (2 - 1) / (8 + 2 - 1):.1f}%" in first  # (p - 1) / (m + p - 1)


# -- balance -----------------------------------------------------------------------------------------------------------


def test_a_large_vocabulary_has_its_weight() -> None:
    """Embedding and head weigh as much as five blocks each: the first and the last stage get one block."""
    with torch.device("meta"):
        module = Language()
    assert layers_of(module) == [1, 3, 3, 1]
    assert layers_of(module, partition="uniform") == [2, 2, 2, 2]
    rows = columns("\n".join(described(module)))
    assert rows[0] == ["3,145,728", "16,385,024", "19,530,752"]
    assert rows[3] == ["3,145,728", "16,385,024", "19,530,752"]
    heaviest = [
        max(int(row[2].replace(",", "")) for row in columns("\n".join(described(module, partition=partition))))
        for partition in ("parameters", "uniform")
    ]
    assert heaviest == [19_530_752, 22_676_480]


# -- stages that layers name -------------------------------------------------------------------------------------------


def marked(kind: type[Language], stages: dict[str, Any], layers: int = 6) -> Language:
    module = kind(100, 8, layers)
    for name, stage in stages.items():
        module.get_submodule(name).pipeline_stage = stage
    return module


@pytest.mark.parametrize("kind", [Language, Chain])
def test_layers_name_their_stages(kind: type[Language]) -> None:
    blocks = {f"blocks.{number}": stage for number, stage in enumerate([0, 0, 0, 0, 1, 1])}
    module = marked(kind, {**blocks, "embed": 0, "head": 1})
    assert layers_of(module, 2, partition="uniform") == [4, 2]
    assert layers_of(kind(100, 8, 6), 2, partition=[0, 0, 0, 0, 1, 1]) == [4, 2]


def test_marks_of_what_lives_where_it_is_used_are_compared_with_that() -> None:
    module = marked(Language, {"blocks": 0, "embed": 0, "head": 0})
    layers = tuple(f"blocks.{number}" for number in range(6))
    outside = {"embed.weight": frozenset((0,)), "head.weight": frozenset((1,))}
    stage_map = StageMap("blocks", layers, (range(3), range(3, 6)), Placement.in_turns(2), outside=outside)
    text = misplaced_text(module, stage_map)
    assert text is not None
    assert "'head' (pipeline_stage 0, used on stage 1)" in text
    assert "embed" not in text
    assert "blocks" not in text
    assert misplaced_text(marked(Language, {"head": 1}), stage_map) is None


def test_numbers_are_those_of_all_chunks() -> None:
    blocks = {f"blocks.{number}": stage for number, stage in enumerate([0, 0, 1, 2, 3, 3])}
    how = {"partition": "uniform", "num_chunks": 2, "schedule": "interleaved_1f1b"}
    assert layers_of(marked(Language, {**blocks, "blocks.5.up": 3}), 2, **how) == [2, 1, 1, 2]


class Rows(LightningModule):
    """Its layers stand in several lists, each of which has a stage."""

    def __init__(self) -> None:
        super().__init__()
        for row in range(4):
            self.add_module(f"layer{row}", nn.Sequential(Block(8), Block(8)))
            self.get_submodule(f"layer{row}").pipeline_stage = int(row > 2)


def test_what_holds_layers_names_their_stage() -> None:
    assert layers_of(Rows(), 2, partition="uniform") == [6, 2]


@pytest.mark.parametrize(
    ("stages", "arguments", "words"),
    [
        ([0, 0, 1, 0, 1, 1], {}, ["`pipeline_stage` of the layers of 'blocks'", "decrease from 1 to 0 at layer 3"]),
        ([0, 0, 0, 2, 2, 2], {}, ["contain stage 2", "is 2"]),
        ([1, 1, 1, 1, 1, 1], {}, ["do not contain stage 0;"]),
        ([0, 0, 0, 1, 1, None], {}, ["'blocks.5'", "has no `pipeline_stage`", "'blocks.0' has one"]),
        ([0, 0, 0, 1, 1, 1], {"partition": "parameters"}, ["partition='parameters'", "Remove one"]),
        ([0, 0, 0, 1, 1, 1], {"partition": [3, 3]}, ["partition=[3, 3]", "Remove one"]),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: list[Any], arguments: dict[str, Any], words: list[str]) -> None:
    blocks = {f"blocks.{number}": stage for number, stage in enumerate(stages) if stage is not None}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        layers_of(marked(Language, blocks), 2, **{"partition": "uniform", **arguments})
    assert all(word in str(error.value) for word in words), error.value


def test_marks_that_decide_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks.0' in 'blocks' has no `pipeline_stage`, but 'head'"):
        layers_of(marked(Language, {"head": 1}), 2, partition="uniform")
    with pytest.raises(ValueError, match=r"'blocks.0.up' is a part of a layer of 'blocks', but has a different"):
        layers_of(marked(Language, {"blocks.0.up": 1}), 2, partition="uniform")
    with pytest.raises(TypeError, match=r"must be an integer, but 1\.5 is a float"):
        layers_of(marked(Language, {"blocks": 1.5}), 2, partition="uniform")


def test_the_table_in_the_documents_is_what_is_printed() -> None:
    with torch.device("meta"):
        table = described(Language())[1:-1]
    assert "\n".join(table) in (Path(__file__).parents[2] / "docs" / "concepts" / "pipeline.md").read_text()


def test_a_tied_vocabulary_is_on_both_sides() -> None:
    with torch.device("meta"):
        module = Language(tied=True)
    assert layers_of(module) == [1, 3, 3, 1]


def test_around_a_chain_that_is_not_followed_everything_is_on_the_first_and_the_last_stage() -> None:
    with torch.device("meta"):
        module = Chain()
    assert layers_of(module) == [1, 3, 3, 1]
    assert [row[1] for row in columns("\n".join(described(module)))] == ["16,384,000", "0", "0", "16,385,024"]
    rows = columns("\n".join(described(module, dynamic_shapes=True)))
    assert [row[1] for row in rows] == ["32,769,024", "0", "0", "32,769,024"]


class Aliased(Language):
    """Has a second name for its layers."""

    def __init__(self) -> None:
        super().__init__(20, 8, 8)
        self.trunk = self.blocks


def test_a_second_name_of_a_layer_weighs_nothing() -> None:
    assert layers_of(Aliased()) == [2, 2, 2, 2]


class TwoStacks(LightningModule):
    """An encoder and a decoder, each with an embedding before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(1000, 8)
        self.encoder = nn.ModuleList(Block(8) for _ in range(6))
        self.target = nn.Embedding(1000, 8)
        self.decoder = nn.ModuleList(Block(8) for _ in range(6))


def test_what_stands_between_layers_counts_with_those_that_follow() -> None:
    module = TwoStacks()
    rows = columns("\n".join(described(module, partition=[3, 3, 3, 3])))
    assert [row[1] for row in rows] == ["8,000", "0", "8,000", "0"]
    assert layers_of(module) == [1, 5, 1, 5]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_has_what_is_outside_and_a_total() -> None:
    lines = described(Language(50, 8, 6), 3)
    assert lines[1:] == [
        "stage  pp rank  layers of 'blocks'             in layers  outside, est.  parameters  share",
        "------------------------------------------------------------------------------------------",
        "    0        0  0-1                 2 x Block      1,536            400       1,936  35.7%",
        "    1        1  2-3                 2 x Block      1,536              0       1,536  28.3%",
        "    2        2  4-5                 2 x Block      1,536            416       1,952  36.0%",
        "total                                              4,608            816       5,424",
        "not in layers: 816 parameters (15.0%), stages are estimated until the first training batch",
    ]


def test_around_a_chain_that_is_not_followed_nothing_is_estimated() -> None:
    lines = described(Chain(50, 8, 6), 3, dynamic_shapes=True)
    assert lines[1].split()[-4:] == ["layers", "outside", "parameters", "share"]
    assert lines[-1] == "not in layers: 816 parameters (15.0%), on the first and the last stage, with summed gradients"


def test_a_list_with_the_name_of_a_chain_puts_what_is_outside_where_it_is_used() -> None:
    lines = described(Chain(50, 8, 6), 3, body=["blocks"])
    assert lines[1:6] == described(Language(50, 8, 6), 3)[1:6]


def test_without_anything_outside_there_is_one_number() -> None:
    class Alone(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])

    assert described(Alone(), 2)[1:] == [
        "stage  pp rank  layers of 'layers'              parameters  share",
        "-----------------------------------------------------------------",
        "    0        0  0-1                 2 x Linear           8  50.0%",
        "    1        1  2-3                 2 x Linear           8  50.0%",
        "total                                                   16",
    ]


# -- a step that is followed -------------------------------------------------------------------------------------------


def test_memory_knows_where_the_step_uses_them() -> None:
    """The head is made first, and is used last: so the table of `memory` says, and that of `plan` cannot know."""
    make = lambda: HeadFirst(50, 8, 6)  # noqa: E731
    arguments = {"partition": [2, 2, 2]}
    assert [row[1] for row in columns("\n".join(described(make(), 3, **arguments)))] == ["800", "0", "16"]
    found = dry(make, 3, **arguments)
    assert [row[1] for row in columns(found.layout)] == ["400", "0", "416"]
    assert "on the stages that use them in the first training batch" in found.layout
    assert "estimated" not in found.layout
    totals = [4 * int(row[2].replace(",", "")) for row in columns(found.layout)]
    assert [usage.parameters for usage in found.memory] == totals


def test_memory_says_once_why_a_step_cannot_be_followed() -> None:
    found = dry(lambda: Backwards(50, 8, 6), 3)
    (line,) = [line for line in found.layout.splitlines() if "cannot be traced" in line]
    assert "'blocks.1' on stage 0 needs the result of" in line
    assert "HybridStrategy(body=" in line
    assert [row[1] for row in columns(found.layout)] == ["400", "0", "416"]
    totals = [4 * int(row[2].replace(",", "")) for row in columns(found.layout)]
    assert [usage.parameters for usage in found.memory] == totals


class Counted(Language):
    """With a metric in its step, which asks whether a value is a number: so the last stage keeps all of them."""

    def build(self, *sizes: int) -> None:
        super().build(*sizes)
        self.mean = MeanMetric()

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = super().training_step(tokens)
        self.log("mean", self.mean(loss.detach()))
        return loss


def test_memory_follows_steps_with_metrics() -> None:
    found = dry(lambda: Counted(50, 8, 6), 3)
    assert "cannot be traced" not in found.layout
    assert [row[1] for row in columns(found.layout)] == ["400", "0", "816"]


class Later(Language):
    """Made in `configure_model`, without values; with a table beside its layers."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.build(50, 8, 6)
            self.register_buffer("scale", torch.ones(8))

    def features(self, tokens: Tensor) -> Tensor:
        return super().features(tokens) * self.scale

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randint(50, (16, 5)), 8)


@pytest.mark.parametrize("make", [lambda: Language(50, 8, 6), Later], ids=["made before", "made later"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_memory_follows_steps_of_shared_layers_and_of_modules_without_values(make: Any, tensor: int) -> None:
    plan = {"embed": "vocab", "head": "vocab"} if tensor == 2 else None
    settings = strategy_of(3, tensor_parallel_plan=plan, tensor_parallel_size=tensor).settings
    found = dry_run(lambda: (make(), None), settings, Sizes(1, tensor, 3), precision=Precision())
    assert "cannot be traced" not in found.layout
    assert [row[1] for row in columns(found.layout)] == ["400", "0", "416"]


# -- a run -------------------------------------------------------------------------------------------------------------


class Estimated(Callback):
    """Keeps the bytes of parameters that a run logs when it begins."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.parameters = strategy.attached.parallelizer.estimate_memory(trainer.optimizers).parameters


def _held(kind: type[Language]) -> tuple[int, int]:
    module, estimated = kind(50, 8, 6), Estimated()
    layout = {"pipeline_parallel_size": 3, "num_microbatches": 2, "partition": "parameters"}
    stays = {"gather_module_on_teardown": False}  # what the rank holds is counted after the run
    make_trainer({**layout, **stays}, max_steps=1, callbacks=[estimated]).fit(module)
    held = sum(parameter.numel() for parameter in module.parameters() if not is_placeholder(parameter))
    return held, estimated.parameters


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [Language, Chain])
def test_a_run_holds_what_the_table_says(ranks: Pools, kind: type[Language]) -> None:
    table = columns("\n".join(described(kind(50, 8, 6), 3)))
    found = ranks(3, lightning=True).run(_held, kind, timeout=90)
    assert [f"{held:,}" for held, _ in found] == [row[2] for row in table]
    assert [estimated for _, estimated in found] == [4 * held for held, _ in found]
