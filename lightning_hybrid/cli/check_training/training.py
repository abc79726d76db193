"""A few training steps in float64, in one process or under a layout, with a record of the results.

Each run uses the same batches and initial weights. `cli.check` calls the methods of :class:`Training` several times,
each time in new processes, and compares the records. Lightning's own loop trains, because hooks, logging and gradient
accumulation must be compared, too.

::

    Training.in_one_process      _OneProcess     plain Lightning, the batches of all replicas as accumulated batches
    Training.under_layout        _UnderLayout    HybridStrategy, on every rank
    Training.microbatch_weights  _Microbatches   the gradients of a batch and of its microbatches, without training
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.cli.check_training.dropout import set_dropout_to_zero
from lightning_hybrid.cli.check_training.step_watch import StepWatch
from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.agreement import RankInfo
from lightning_hybrid.distributed.modes import FunctionMode
from lightning_hybrid.distributed.random import generator_marks, seed_generators
from lightning_hybrid.pipeline_parallel.splitting.microbatch import split_into
from lightning_hybrid.strategy.layout import find_frames, requested_plan
from lightning_hybrid.strategy.meta_init import Initialization, lacks_values
from lightning_hybrid.strategy.strategy import HybridStrategy
from lightning_hybrid.tensor_parallel.auto_plan.heads import missing_heads
from lightning_hybrid.tensor_parallel.layers import ParallelLayer

#: Functions that return the user's module, and its data: loaders, a data module, or ``None`` if the module has loaders.
MakeModule = Callable[[], LightningModule]
MakeData = Callable[[], Any]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class TrainingRecord:
    """The results of training on one rank.

    Attributes:
        data_rank: The replica of the rank.
        losses: The loss of each batch.
        logged: The numbers in `callback_metrics` after each batch, by name.
        epoch_logged: The numbers in `callback_metrics` at the end, by name.
        grad_norms: The global gradient norm before each optimizer step.
        weights: The tensors in the state dict of the full module at the end; empty on all ranks but the first.
        parameter_names: The names in `weights` that are parameters.
        dropouts: The number of dropout probabilities that were set to 0.
        batch_norms: The number of batch norm layers.
        has_own_plan: True if the user has written the tensor-parallel plan, and layers are sharded.
        plan_faults: Sentences about possible omissions in the tensor-parallel plan.
        float32: The file and line where the first batch first converted float64 to a narrower dtype; ``None`` if it did
            not. Always ``None`` under a layout, like `draws`.
        draws: A text about the place where the first batch first drew random numbers; ``None`` if it did not.
    """

    data_rank: int = 0
    losses: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    epoch_logged: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    parameter_names: frozenset[str] = frozenset()
    dropouts: int = 0
    batch_norms: int = 0
    has_own_plan: bool = False
    plan_faults: tuple[str, ...] = ()
    float32: str | None = None
    draws: str | None = None


@dataclass(frozen=True)
class MicrobatchWeights:
    """The weights with which the losses of microbatches add up to the loss of their batch, in the same order.

    Attributes:
        found: The weights for which the sum of the microbatches' gradients and losses best fits the full batch.
        residual: The norm of the error of this fit, relative to the gradient of the batch.
        used: The weights in a run under the layout.
    """

    found: tuple[float, ...]
    residual: float
    used: tuple[float, ...]


@dataclass(frozen=True)
class Training:
    """The training that is repeated in each run of a check.

    Attributes:
        make_module: Returns the module.
        make_data: Returns the data for `Trainer.fit`.
        steps: The number of optimizer steps.
        trainer: Arguments of the Trainer that affect steps, such as ``accumulate_grad_batches``.
        settings: The arguments of `HybridStrategy`.
        directory: The directory for batches, which the first run writes from the user's loaders. Processes of later
            runs read them, so that all runs have the same batches.
    """

    make_module: MakeModule
    make_data: MakeData
    steps: int
    trainer: Mapping[str, Any]
    settings: Settings
    directory: Path

    @property
    def accumulated(self) -> int:
        """The number of batches per optimizer step on each replica."""
        return int(self.trainer.get("accumulate_grad_batches", 1))

    def batches(self, loader: Any, number: int, count: int) -> list[Any]:
        """Return the first batches of a user's loader. If it has fewer batches, it starts again from its beginning.

        The first call writes the batches to a file, and later calls in any process read it.

        Args:
            loader: The loader.
            number: The index of the loader among the user's loaders.
            count: The number of batches.

        Raises:
            ValueError: If the loader has no batches.
        """
        file = self.directory / f"loader-{number}-batches-{count}"
        if not file.exists():
            found = list(itertools.islice(_repeated(loader), count))
            torch.save(found, file)
        loaded: list[Any] = torch.load(file, weights_only=False)
        return loaded

    def in_one_process(self, replicas: int, *, seed: int = 0, fixed_statistics: bool = False) -> TrainingRecord:
        """Train with plain Lightning, with the batches of several replicas as accumulated batches.

        Args:
            replicas: The number of replicas whose batches make up a step.
            seed: The seed of random numbers during training, not of the initial weights.
            fixed_statistics: If True, batch norms use their running statistics.

        Returns:
            The record. If `microbatch_weight` weights batches, the losses are without these weights.
        """
        recorder = _Recorder(seed=seed, fixed_statistics=fixed_statistics)
        strategy = _OneProcess(self, self.steps * self.accumulated * replicas, replicas)
        self._fit(strategy, 1, recorder, accumulated=self.accumulated * replicas)
        record = recorder.record
        record.float32, record.draws = strategy.float32, strategy.draws
        record.losses = [loss / factor for loss, factor in zip(record.losses, strategy.factors, strict=True)]
        return record

    def under_layout(self, layout: Mapping[str, Any], *, fixed_statistics: bool = False) -> TrainingRecord:
        """Train under a layout. All ranks call this.

        Args:
            layout: Arguments of `HybridStrategy`.
            fixed_statistics: If True, batch norms use their running statistics.
        """
        recorder = _Recorder(seed=0, fixed_statistics=fixed_statistics)
        strategy = _UnderLayout(self, **layout)
        self._fit(strategy, torch.distributed.get_world_size(), recorder, accumulated=self.accumulated)
        recorder.record.data_rank = strategy.distributed_sampler_kwargs["rank"]
        return recorder.record

    def microbatch_weights(self, num_microbatches: int, loss_reduction: str) -> MicrobatchWeights:
        """Return the weights with which microbatches of the first batch add up to its loss and gradient.

        Call it in one process.

        Args:
            num_microbatches: The number of microbatches.
            loss_reduction: The argument of `HybridStrategy`.
        """
        strategy = _Microbatches(self, num_microbatches, loss_reduction)
        self._fit(strategy, 1, _Recorder(seed=0, fixed_statistics=False), accumulated=1)
        return strategy.result()

    def _fit(self, strategy: Any, devices: int, recorder: _Recorder, *, accumulated: int) -> None:
        """Train a new module in this process, with the same initial weights in each run."""
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        seed_generators(0)
        module, data = self.make_module(), self.make_data()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a normal run shows the same warnings
            trainer = Trainer(
                accelerator="cpu",
                devices=devices,
                strategy=strategy,
                precision="64-true",
                callbacks=[recorder],
                logger=DummyLogger(),
                max_epochs=1,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=self.directory,
                **{**self.trainer, "accumulate_grad_batches": accumulated},
            )
            if isinstance(data, LightningDataModule):
                trainer.fit(module, datamodule=data)
            else:
                trainer.fit(module, data)


def _repeated(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError(f"The training loader, a {type(loader).__name__}, returned no batches. [LH131]")


# -- strategies --------------------------------------------------------------------------------------------------------


class _UnderLayout(HybridStrategy):
    """The strategy under test, on batches of the user's loaders that were stored in files."""

    def __init__(self, training: Training, **layout: Any) -> None:
        super().__init__(**layout)
        self._training = training
        self._loaders = itertools.count()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        replica = self.distributed_sampler_kwargs
        count = self._training.steps * self._training.accumulated * replica["num_replicas"]
        batches = self._training.batches(dataloader, next(self._loaders), count)
        return super().process_dataloader(batches[replica["rank"] :: replica["num_replicas"]])


class _SingleProcess(SingleDeviceStrategy):
    """Plain Lightning, but layers on the meta device are initialized with the same values as under a layout.

    They are also initialized at the same time: after `configure_model`, or after the hook `setup`.

    Args:
        training: The training.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(device="cpu")
        self._training = training
        self._seed = 0

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._seed = RankInfo.own().seed
        assert self.lightning_module is not None
        if not is_overridden("configure_model", self.lightning_module):
            self._initialize()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        with super().model_sharded_context():
            yield
        self._initialize()

    @override
    def setup(self, trainer: Trainer) -> None:
        self._initialize()  # layers that the hook `setup` has created
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        is_unfinished = module is not None and lacks_values(module)
        # After an error, a module on the meta device cannot be moved.
        with suppress(NotImplementedError) if is_unfinished else nullcontext():
            super().teardown()

    def _initialize(self) -> None:
        module = self.lightning_module
        assert module is not None
        if lacks_values(module):
            frames = find_frames(module, self._training.settings, 1)
            Initialization(module, self.root_device, self._seed, frames=frames).finish()


class _OneProcess(_SingleProcess):
    """Plain Lightning, on batches of the user's loaders that are stored in files. It watches the first batch.

    If the user has defined `microbatch_weight`, the batches of the replicas of a step are weighted with it, as if they
    were one batch. Otherwise, each batch has the same weight, as in Lightning's DDP.

    Attributes:
        factors: The factor of each batch's loss.
        float32: As in :class:`TrainingRecord`.
        draws: As in :class:`TrainingRecord`.
    """

    def __init__(self, training: Training, count: int, replicas: int) -> None:
        super().__init__(training)
        self._count, self._replicas = count, replicas
        self.factors: list[float] = [1.0] * count
        self.float32: str | None = None
        self.draws: str | None = None
        self._loaders, self._steps = itertools.count(), itertools.count()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        batches = self._training.batches(dataloader, next(self._loaders), self._count)
        assert self.lightning_module is not None
        weigh = getattr(self.lightning_module, "microbatch_weight", None)
        if weigh is not None and self._replicas > 1:
            weights = [float(weigh(batch)) for batch in batches]
            for first in range(0, self._count, self._replicas):
                of_step = slice(first, first + self._replicas)
                mean = sum(weights[of_step]) / self._replicas
                self.factors[of_step] = [weight / mean for weight in weights[of_step]]
        return batches

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        number = next(self._steps)
        if number == 0:
            before = generator_marks(self.root_device)
            watch = StepWatch()
            with FunctionMode(watch):
                output = super().training_step(*args, **kwargs)
            self.float32, self.draws = watch.float32, watch.draws
            if self.draws is None and generator_marks(self.root_device) != before:
                self.draws = "from numpy or `random`"
        else:
            output = super().training_step(*args, **kwargs)
        factor = self.factors[number]
        if factor == 1.0 or output is None:
            return output
        return {**output, "loss": output["loss"] * factor} if isinstance(output, Mapping) else output * factor


class _Microbatches(_SingleProcess):
    """A strategy that computes the gradients of a batch and of each of its microbatches, without changing weights."""

    def __init__(self, training: Training, num_microbatches: int, loss_reduction: str) -> None:
        super().__init__(training)
        self._num_microbatches, self._loss_reduction = num_microbatches, loss_reduction
        self._columns: list[Tensor] = []
        self._used: tuple[float, ...] = ()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        assert module is not None
        batch, *_ = self._training.batches(dataloader, 0, self._training.steps * self._training.accumulated)
        pieces, counts = split_into(batch, self._num_microbatches, getattr(module, "split_batch", None))
        weigh = getattr(module, "microbatch_weight", None)
        weights = [float(count) for count in counts] if weigh is None else [float(weigh(piece)) for piece in pieces]
        is_sum = self._loss_reduction == "sum"
        self._used = tuple(1.0 if is_sum else weight / sum(weights) for weight in weights)
        return [batch, *pieces]

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        loss = closure()
        module = self.lightning_module
        assert module is not None
        gradients = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in module.parameters()]
        self._columns.append(torch.cat([*gradients, loss.detach().reshape(1)]))
        return loss

    def result(self) -> MicrobatchWeights:
        """Return the weights that best fit the gradients."""
        whole, *pieces = self._columns
        matrix = torch.stack(pieces, 1)
        found = torch.linalg.lstsq(matrix, whole.unsqueeze(1), driver="gelsd").solution
        residual = torch.linalg.vector_norm(matrix @ found - whole.unsqueeze(1)) / torch.linalg.vector_norm(whole)
        return MicrobatchWeights(tuple(found.flatten().tolist()), float(residual), self._used)


# -- recording ---------------------------------------------------------------------------------------------------------


class _Recorder(Callback):
    """A callback that records results, in the same way in one process and under a layout.

    It also sets the dropout probabilities that it finds to 0, because microbatches draw other random numbers than a
    batch, so that results could not be compared. It seeds the generators again when training starts.

    Attributes:
        record: The results.
    """

    def __init__(self, *, seed: int, fixed_statistics: bool) -> None:
        self._seed, self._fixed_statistics = seed, fixed_statistics
        self.record = TrainingRecord()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            self.record.dropouts += set_dropout_to_zero(module)
            self.record.batch_norms += isinstance(module, _BATCH_NORMS)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed_generators(self._seed)
        strategy = trainer.strategy
        is_divided = any(isinstance(layer, ParallelLayer) for layer in pl_module.modules())
        if isinstance(strategy, HybridStrategy) and is_divided:
            self.record.has_own_plan = isinstance(requested_plan(pl_module, strategy.settings), Mapping)
            self.record.plan_faults = tuple(missing_heads(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fixed_statistics:
            for module in pl_module.modules():
                if isinstance(module, _BATCH_NORMS):
                    module.eval()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), Tensor):
            self.record.losses.append(float(loss) * trainer.accumulate_grad_batches)
        self.record.logged.append(_numbers(trainer.callback_metrics))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, HybridStrategy):
            norm = float(strategy.grad_norm())
        else:
            gradients = (p.grad for p in pl_module.parameters() if p.grad is not None)
            norm = math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in gradients))
        self.record.grad_norms.append(norm)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.epoch_logged = _numbers(trainer.callback_metrics)
        state = trainer.strategy.lightning_module_state_dict()
        self.record.weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.record.parameter_names = frozenset(name for name, _ in pl_module.named_parameters(remove_duplicate=False))


def _numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value.numel() == 1}
