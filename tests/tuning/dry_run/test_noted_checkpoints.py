"""One forward shows the tensors that layers save with every kind of recomputation, as if they were recomputed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hybrid import HybridStrategy, axes
from lightning_hybrid.memory.activation_checkpoint.checkpoint import ActivationCheckpointing
from lightning_hybrid.strategy.open_arguments import RECOMPUTE
from lightning_hybrid.tuning.candidates import Layout
from lightning_hybrid.tuning.dry_run import dry_run as dry_runs
from lightning_hybrid.tuning.dry_run.dry_run import DryRunStrategy, dry_run
from lightning_hybrid.tuning.dry_run.saved_tensors import saved_bytes
from tests.daily import daily
from tests.tuning.test_module_profile import make_profile
from tests.zoo import context as zoo

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.fall(self.rise(self.norm(x)).relu() * mask)


class Dropping(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x, mask), 0.1)


class InPlace(Layer):
    """A layer that changes the result of a product, and its input."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x *= 2
        return x + self.fall(self.rise(self.norm(x)).relu_() * mask)


class Views(Layer):
    """A layer that returns its result and a view of its input."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return super().forward(x, mask), x[:, :2]


class Inner(Layer):
    """A layer that recomputes itself."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class Attending(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(*(x[:, None],) * 3, is_causal=True)
        return super().forward(attended[:, 0], mask)


class Detached(Layer):
    """A layer whose result needs no gradient."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask).detach()


class Normed(Layer):
    """A layer whose forward changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x), mask)


class Stack(LightningModule):
    layer: Any = Layer
    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.register_buffer("mask", torch.ones(2 * WIDTH))
        self.layers = nn.ModuleList(self.layer() for _ in range(self.depth))
        self.head = nn.Linear(WIDTH, 32)
        self.freeze()

    def freeze(self) -> None:
        """Freeze some parameters."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch)
        if not x.requires_grad:  # like the layout of a batch
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        for layer in self.layers:
            found = layer(x * 1, self.mask.expand(2, 1, -1))
            x = found[0] + found[1].mean() if isinstance(found, tuple) else found
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader([torch.arange(64) % 32] * 4, 2)  # type: ignore[arg-type]


class Frozen(Stack):
    def freeze(self) -> None:
        self.tokens.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)


class Twice(Stack):
    """Its layers run twice."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch)
        for layer in (*self.layers, *self.layers):
            x = layer(x, self.mask)
        return self.head(x).square().mean()


class Language(LightningModule):
    """A model of transformers."""

    def make(self) -> nn.Module:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        pytest.importorskip("transformers")
        self.model = self.make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    configure_optimizers = Stack.configure_optimizers
    train_dataloader = Stack.train_dataloader


class Llama(Language):
    def make(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=3, use_cache=False, **sizes))


class GPT2(Language):
    def make(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=3, n_head=4, use_cache=False))


STACKS = {
    layer.__name__: type(layer.__name__, (Stack,), {"layer": layer})
    for layer in (Layer, Dropping, InPlace, Views, Inner, Attending, Detached)
}
PP2 = {"pipeline_parallel_size": 2}
PRECISIONS = ["32", "bf16-mixed"]
CASES: dict[str, tuple[Callable[[], LightningModule], dict[str, Any]]] = {
    **{name: (make, {}) for name, make in STACKS.items()},
    **{f"{name} pp2": (make, PP2) for name, make in STACKS.items()},
    **{make.__name__: (make, {}) for make in (Frozen, Twice, Llama, GPT2)},
    **{f"{make.__name__} pp2": (make, PP2) for make in (Frozen, Llama, GPT2)},
    **{f"{make.__name__} tp2": (make, {"tensor_parallel_size": 2}) for make in (Frozen, Llama, GPT2)},
    "Llama tp2 pp2": (Llama, {"tensor_parallel_size": 2, **PP2}),
    "GPT2 2d": (GPT2, {"tensor_parallel_size": 4, "tensor_parallel_mode": "2d"}),
    **{
        f"{make.__name__} {kind}": (make, {"context_parallel_size": 2, "context_parallel": kind})
        for make in (Llama, zoo.Uneven, zoo.UsedTwice)
        for kind in ("ulysses", "all_gather", "ring")
    },
    "Llama ulysses pp2": (Llama, {"context_parallel_size": 2, **PP2}),
}


class Real(ActivationCheckpointing):
    """Layers that are recomputed, in place of layers whose tensors are recorded."""

    def __init__(self, layers: list[nn.Module], meter: Any, uncounted: Any, *, selective: bool) -> None:
        super().__init__(layers, torch.device("cpu"), selective=selective)


Sizes = dict[Any, list[int]]


def saved_in(make: Callable[[], LightningModule], precision: Precision, **arguments: Any) -> dict[bool | str, Sizes]:
    """Return the sizes of storages by label, and the bytes of the first one, two, ... labels, by recomputation."""
    found: list[Any] = []
    follow = DryRunStrategy._follow

    def kept(self: DryRunStrategy, *args: Any) -> Any:
        found.append(follow(self, *args))
        return found[-1]

    strategy = HybridStrategy(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DryRunStrategy, "_follow", kept)
        sizes = axes.Sizes(**axes.sizes_in(arguments))
        dry_run(lambda: (make(), None), strategy.settings, sizes, precision=precision)
    (by_kind,) = found
    return {
        recompute: {
            **{label: sorted(sizes.values()) for label, sizes in saved.items()},
            "together": [saved_bytes(saved, labels) for labels in accumulate([label] for label in saved)],
        }
        for recompute, saved in by_kind.items()
    }


@pytest.mark.parametrize(
    ("case", "precision"),
    daily(
        [(case, precision) for case in CASES for precision in PRECISIONS],
        *((case, PRECISIONS[number % 2]) for number, case in enumerate(CASES)),
    ),
)
def test_what_is_noted_is_what_layers_that_run_again_save(
    case: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, arguments = CASES[case]
    plugin = Precision() if precision == "32" else MixedPrecision("bf16-mixed", "cpu")
    noted = saved_in(make, plugin, **arguments, recompute=True)
    assert saved_in(make, plugin, **arguments)[False] == noted[False]
    assert (noted[True] == noted[False]) is case.startswith("Detached")
    for recompute in RECOMPUTE[1:]:
        if recompute == "selective" and arguments.get("context_parallel", "ulysses") != "ulysses":
            continue  # not supported

        def real(*given: Any, recompute: Any = recompute) -> AbstractContextManager[None]:
            return Real(*given, selective=recompute == "selective")  # type: ignore[return-value]

        monkeypatch.setattr(dry_runs, "NotedCheckpoints", real)
        assert saved_in(make, plugin, **arguments, recompute=recompute)[recompute] == noted[recompute], recompute
        monkeypatch.undo()


def test_layers_that_change_buffers_may_run_again_without_numbers() -> None:
    made = []

    class Counting(Stack):
        layer = Normed

        def __init__(self) -> None:
            made.append(1)
            super().__init__()

    assert make_profile(Counting).refuse(Layout(1, 1, 2, 2, recompute=True)) is None
    assert len(made) == 1, "it is made a second time if it cannot do without values"


def test_what_is_noted_adds_no_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(1, 1, 2, 2)
    noted = make_profile(STACKS["Attending"]).stages(layout, 2)
    monkeypatch.setattr(dry_runs, "NotedCheckpoints", lambda *given: nullcontext)
    assert make_profile(STACKS["Attending"]).stages(layout, 2) == noted
