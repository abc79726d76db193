"""Evaluation steps whose control flow depends on results, under a pipeline: the tokens of one process, one by one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from tests.pool import Pools
from tests.training_jobs import make_trainer, plain, train
from tests.zoo.basic import Example
from tests.zoo.hugging_face import MODULES, VOCABULARY

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

END, MOST, WIDTH = 2, 8, 12

#: (world size, data-parallel size, arguments of the strategy).
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 1, {"pipeline_parallel_size": 2}),
    "pp3": (3, 1, {"pipeline_parallel_size": 3}),
    "pp2 x dp2": (4, 2, {"pipeline_parallel_size": 2}),
    "pp2 x tp2": (4, 1, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "chunks 2": (2, 1, {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "pp2 x zero3": (4, 2, {"pipeline_parallel_size": 2, "zero_stage": 3}),
}


class Writing(Example):
    """Writes texts in validation, and keeps them by what they begin with."""

    samples = 16
    spread = 4

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.texts: dict[tuple[int, ...], list[int]] = {}
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(self.spread if parameter.ndim > 1 else 1)  # texts of new models repeat one token

    def write(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        texts = self.write(self.begin(batch))
        lengths = (texts != 0).sum(1).double()
        self.log("length", lengths.mean(), sync_dist=True)
        for begin, text in zip(self.begin(batch).tolist(), texts.tolist(), strict=True):
            self.texts[tuple(begin)] = _without_padding(text)

    def begin(self, batch: Any) -> Tensor:
        tokens: Tensor = batch["input_ids"][:, :4]
        return tokens


def _without_padding(text: list[int]) -> list[int]:
    while text and text[-1] == 0:
        text = text[:-1]
    return text


class Block(nn.Module):
    """Each position sees the mean of those before it; the sums so far may be kept in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any = None, index: int = 0) -> Tensor:
        sums, count = self.inner(x).cumsum(1), torch.arange(1, x.shape[1] + 1, device=x.device)
        if cache is not None:
            sums, count = cache.extend(index, sums, count)
        return x + torch.tanh(self.outer(sums / count[:, None]))


class Decoder(Writing):
    """A loop of the user's own over an `nn.ModuleList`, which ends when each text has ended."""

    def build(self) -> None:
        torch.manual_seed(4)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.stack = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        x = self.embed(tokens) * self.scale
        for index, layer in enumerate(self.stack):
            x = layer(x, cache, index)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"][:, :-1]).flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def sample(self, index: int, generator: torch.Generator) -> Any:
        return {"input_ids": torch.randint(3, VOCABULARY, (10,), generator=generator)}

    def write(self, tokens: Tensor) -> Tensor:
        is_over = torch.zeros(len(tokens), dtype=torch.bool)
        while not is_over.all() and tokens.shape[1] < 4 + MOST:
            new = self.choose(self(tokens)[:, -1])
            tokens = torch.cat([tokens, new.masked_fill(is_over, 0)[:, None]], 1)
            is_over |= new == END
        return tokens

    def choose(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


class Sampler(Decoder):
    """Draws each token."""

    def write(self, tokens: Tensor) -> Tensor:
        torch.manual_seed(int(tokens.sum()))
        return super().write(tokens)

    def choose(self, logits: Tensor) -> Tensor:
        return torch.multinomial((logits / 4).softmax(-1), 1)[:, 0]


class Sums:
    """What the layers have summed up so far; its length is read around them."""

    def __init__(self) -> None:
        self.of_layers: dict[int, Tensor] = {}
        self.length = 0
        self.seen = torch.zeros(3)

    def extend(self, index: int, sums: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        if index in self.of_layers:
            sums = sums + self.of_layers[index][:, None]
        if index == 0:
            self.length += sums.shape[1]
        self.of_layers[index] = sums[:, -1]
        self.seen += 1  # in place, in a tensor that was made around the layers
        return sums, count + self.length - len(count)


class Cached(Decoder):
    """A cache of the user's own, which layers fill and code around them reads."""

    def write(self, tokens: Tensor) -> Tensor:
        cache, given = Sums(), tokens
        is_over = torch.zeros(len(tokens), dtype=torch.bool)
        while not is_over.all() and cache.length < 4 + MOST:
            new = self(given, cache)[:, -1].argmax(-1)
            tokens = torch.cat([tokens, new.masked_fill(is_over, 0)[:, None]], 1)
            is_over |= new == END
            given = new[:, None]
            assert cache.length == tokens.shape[1] - 1
            assert cache.of_layers[0].shape == (len(tokens), WIDTH)
            assert float(cache.seen[0]) == 4 * (cache.length - 3)
        # Of two layers on different stages.
        self.log("sums", (cache.of_layers[0] * cache.of_layers[3]).abs().mean(), sync_dist=True)
        return tokens


class InSequential(Decoder):
    """The layers are one `nn.Sequential`, called once for each token."""

    def build(self) -> None:
        super().build()
        self.stack = nn.Sequential(*self.stack)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        return self.head(self.stack(self.embed(tokens) * self.scale))


class Hooked(Decoder):
    """Code around the layers uses what hooks inside them have seen."""

    def build(self) -> None:
        super().build()
        self.seen: list[Tensor] = []
        for layer in self.stack:
            layer.inner.register_forward_hook(lambda module, given, output: self.seen.append(output.abs().mean()))

    def write(self, tokens: Tensor) -> Tensor:
        self.seen.clear()
        texts = super().write(tokens)
        assert len(self.seen) == 4 * (texts.shape[1] - 4)
        self.log("sums", torch.stack(self.seen).mean(), sync_dist=True)
        return texts


class Counting(Decoder):
    """Changes attributes, a metric and the batch before it shows that it calls layers again, and has to be undone."""

    def build(self) -> None:
        super().build()
        self.mean, self.starts, self.steps = MeanMetric(), list[int](), 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.starts.append(int(batch.pop("first")[0]))
        self.mean(self(batch["input_ids"]).mean())
        super().validation_step(batch, batch_idx)
        self.log("mean", self.mean)
        self.log("steps", float(self.steps + 100 * len(self.starts)), on_epoch=True, reduce_fx="max")

    def sample(self, index: int, generator: torch.Generator) -> Any:
        sample = super().sample(index, generator)
        return {**sample, "first": sample["input_ids"][0]}


class Exiting(Decoder):
    """Leaves the stack after the first layer whose output is large enough."""

    def write(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for index, layer in enumerate(self.stack):
            x = layer(x, None, index)
            if x.abs().mean() > 0.97:
                break
        return self.head(x).argmax(-1)


class Failing(Decoder):
    """Code around the layers fails on one rank, once some tokens have been written."""

    def choose(self, logits: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 5 and self.global_rank == 1:
            raise KeyError("of rank 1 alone")
        return super().choose(logits)


class StoppingEarly(Decoder):
    """A rank stops before the others do."""

    rank = 0

    def write(self, tokens: Tensor) -> Tensor:
        for _ in range(2 if self.global_rank == self.rank else 3):
            new = self(tokens)[:, -1].argmax(-1)
            if (new < 0).any():
                break
            tokens = torch.cat([tokens, new[:, None]], 1)
        return tokens


class StoppingEarlyOnTheLast(StoppingEarly):
    """The rank that has the head stops before the other one does."""

    rank = 1


class WithOtherTokens(Decoder):
    """A rank goes on with other tokens than the other one."""

    def choose(self, logits: Tensor) -> Tensor:
        return (super().choose(logits) + self.global_rank) % VOCABULARY


class InACircle(Decoder):
    """Each rank waits for a layer of the other one."""

    def write(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if float(x.sum()) > -1e9:  # results decide, so that the step cannot be followed
            x = self.stack[3 if self.global_rank == 0 else 0](self.stack[0](x))
        return self.head(x).argmax(-1)


def _written_by(name: str, options: dict[str, Any]) -> type[Writing]:
    """A model of transformers that writes by `generate`."""

    class Generating(Writing, MODULES[name]):  # type: ignore[misc, valid-type]
        spread = 16 if name == "bart" else 4

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if options.get("do_sample"):
                torch.manual_seed(int(batch["input_ids"].sum()))
            super().validation_step(batch, batch_idx)

        def write(self, tokens: Tensor) -> Tensor:
            mask = torch.ones_like(tokens)
            texts: Tensor = self.model.generate(
                tokens, attention_mask=mask, max_new_tokens=MOST, pad_token_id=0, eos_token_id=END, **options
            )
            return texts

    return Generating


OWN: dict[str, type[Writing]] = {"decoder": Decoder, "sampler": Sampler, "cached": Cached, "sequential": InSequential}
OWN |= {"hooked": Hooked, "counting": Counting, "exiting": Exiting}
WRONG: dict[str, type[Writing]] = {
    "failing": Failing,
    "stopping early": StoppingEarly,
    "stopping early on the last": StoppingEarlyOnTheLast,
    "with other tokens": WithOtherTokens,
    "in a circle": InACircle,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 8, "temperature": 2.0},
    "without a cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}
#: (name, way); all of them under each layout take minutes.
CASES = [(name, "") for name in OWN]
CASES += [(name, way) for way in ("greedy", "beams") for name in ("gpt2", "llama", "t5", "bart")]
CASES += [("llama", "sampling"), ("gpt2", "sampling"), ("llama", "without a cache"), ("llama", "static cache")]
DAILY: dict[str, list[tuple[str, str]]] = {
    "pp2": [
        *((name, "") for name in ("decoder", "cached", "sequential", "counting", "exiting")),
        *(("gpt2", "greedy"), ("t5", "beams"), ("llama", "sampling")),
    ],
    "pp3": [("llama", "greedy"), ("bart", "beams")],
    "pp2 x dp2": [("gpt2", "beams")],
    "pp2 x tp2": [("llama", "beams"), ("t5", "greedy")],
    "chunks 2": [("counting", ""), ("gpt2", "beams")],
    "pp2 x zero3": [("decoder", "")],
}


Found = tuple[dict[tuple[int, ...], list[int]], dict[str, float]]


@cache
def trained(name: str, way: str, layout: str | None) -> Found:
    """Train a little, and validate; return the texts that were written last, and the logged values."""
    _, replicas, arguments = (1, 1, None) if layout is None else LAYOUTS[layout]
    torch.manual_seed(0)
    kind = OWN[name] if name in OWN else _written_by(name, WAYS[way])
    module = kind(batch_size=4 // replicas).double()
    if arguments is not None:
        arguments = {"num_microbatches": 2, **arguments}
    result = train(module, arguments, limit_train_batches=2, num_sanity_val_steps=1)
    return module.texts, result.metrics


def all_trained(cases: list[tuple[str, str]], layout: str) -> list[Found]:
    """Train each."""
    return [trained(*case, layout) for case in cases]


def check(found: list[Found], name: str, way: str, replicas: int) -> None:
    texts, metrics = trained(name, way, None)
    assert len({tuple(text) for text in texts.values()}) > 4, "nothing is compared"
    together: dict[tuple[int, ...], list[int]] = {}
    for of_rank, logged in found:
        assert len(of_rank) == len(texts) // replicas
        assert logged == found[0][1]
        for begin, text in of_rank.items():
            assert together.setdefault(begin, text) == text, "ranks of a replica differ"
    assert together == texts
    if replicas == 1:
        written = [{name: each[name] for name in metrics if "loss" not in name} for each in (found[0][1], metrics)]
        assert written[0] == pytest.approx(written[1], rel=1e-10)


def _works(layout: str, name: str, way: str) -> bool:
    """Return whether one process draws the same, and no cache of tensor-parallel layers is read."""
    draws, reads = "sampl" in f"{name} {way}", name == "cached"
    return not (draws and LAYOUTS[layout][1] > 1) and not (reads and "tensor_parallel_size" in LAYOUTS[layout][2])


def _cases() -> list[Any]:
    daily = [pytest.param(layout, cases, id=layout) for layout, cases in DAILY.items()]
    others = [
        (layout, [case for case in CASES if case not in cases and _works(layout, *case)])
        for layout, cases in DAILY.items()
    ]
    return daily + [pytest.param(*each, id=f"{each[0]} others", marks=pytest.mark.thorough) for each in others]


@pytest.mark.parametrize(("layout", "cases"), _cases())
def test_writes_as_one_process_does(ranks: Pools, layout: str, cases: list[tuple[str, str]]) -> None:
    pytest.importorskip("transformers")
    size, replicas, _ = LAYOUTS[layout]
    found = ranks(size, lightning=True).run(all_trained, cases, layout, timeout=280)
    for (name, way), of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        check(list(of_ranks), name, way, replicas)


class Predicting(Decoder):
    """Texts are the result of `predict_step`, and the metric of `test_step`."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.write(self.begin(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


class Reading(Decoder):
    """A validation that reads a result, and calls no layer after that."""

    def build(self) -> None:
        super().build()
        self.runs = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val", loss.item(), sync_dist=True)
        self.runs += 1


def predicted(layout: str | None) -> tuple[list[list[list[int]]], dict[str, float], int]:
    """Predict, test, and return the texts and the logged values; and how often a step that reads a result has run."""
    arguments = None if layout is None else LAYOUTS[layout][2]
    trainer = make_trainer(arguments)
    module = Predicting(batch_size=4).double()
    [metrics] = trainer.test(module, module.val_dataloader(), verbose=False)
    texts = trainer.predict(module, module.val_dataloader())
    assert texts is not None
    reading = Reading(batch_size=4).double()
    [read] = make_trainer(arguments).validate(reading, reading.val_dataloader(), verbose=False)
    return [text.tolist() for text in texts], plain({**metrics, **read}), reading.runs


@pytest.mark.parametrize("layout", ["pp2", pytest.param("chunks 2", marks=pytest.mark.thorough)])
def test_prediction_test_and_steps_that_only_read(ranks: Pools, layout: str) -> None:
    expected = predicted(None)
    for found in ranks(LAYOUTS[layout][0], lightning=True).run(predicted, layout, timeout=60):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], rel=1e-10)
        assert found[2] == expected[2] == 3


def refused_sequences() -> str:
    """The error of a step that generates, with context parallelism."""
    module = _written_by("llama", WAYS["greedy"])(batch_size=4)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_trainer({"pipeline_parallel_size": 2, "context_parallel_size": 2}).fit(module)
    return str(error.value)


def test_context_parallelism_is_refused(ranks: Pools) -> None:
    pytest.importorskip("transformers")
    for found in ranks(4, lightning=True).run(refused_sequences, timeout=60):
        assert "without `context_parallel_size`" in found


def refused(name: str) -> str:
    """The error of a module that does not do the same on every rank."""
    with pytest.raises((KeyError, ValueError, RuntimeError)) as error:
        make_trainer(LAYOUTS["pp2"][2]).validate(WRONG[name](batch_size=4).double(), verbose=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("failing", "of rank 1 alone"),
        ("stopping early", "does not call the same layers on every rank"),
        ("stopping early on the last", "does not call the same layers on every rank"),
        ("with other tokens", "calls layers with different tokens on different ranks"),
        ("in a circle", "made different calls and are waiting for each other"),
    ],
)
def test_code_that_depends_on_the_rank_ends_all_ranks(ranks: Pools, name: str, text: str) -> None:
    for found in ranks(2, lightning=True).run(refused, name, timeout=30):
        assert text in found


class InTraining(Decoder):
    """Writes texts in `training_step`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(self.begin(batch))
        return super().training_step(batch, batch_idx)


def refused_in_training() -> str:
    """The error of a step that generates in training."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_trainer(LAYOUTS["pp2"][2], num_sanity_val_steps=0).fit(InTraining(batch_size=4).double())
    return str(error.value)


def test_training_is_refused(ranks: Pools) -> None:
    for found in ranks(2, lightning=True).run(refused_in_training, timeout=30):
        assert "works only in `validation_step`, `test_step` or `predict_step`" in found
