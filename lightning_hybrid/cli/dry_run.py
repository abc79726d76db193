"""What a run will hold, found out beforehand: without devices, without processes, without computing a number."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_hybrid.config import HybridConfig
from lightning_hybrid.data_parallel.zero.param import find_owners, set_parameter
from lightning_hybrid.distributed.dtensor import copy_attributes, to_local
from lightning_hybrid.distributed.mesh import AXES
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.memory.account import MemoryUsage, SavedTensorMeter, most_kept
from lightning_hybrid.memory.activation_checkpoint.checkpoint import ActivationCheckpointing
from lightning_hybrid.memory.estimate import estimate
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy.layout import (
    describe,
    find_own_layers,
    find_plan,
    find_recomputed,
    find_schedule,
    find_stages,
)
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from lightning_hybrid.trainer.results.logging import LogRecorder
from lightning_hybrid.trainer.training_step import split_into

Fake: Any
try:
    from torch._subclasses.fake_tensor import FakeTensorMode as Fake
except ImportError:  # then the step is run with numbers
    Fake = None
Store: Any
try:
    from torch.testing._internal.distributed.fake_pg import FakeStore as Store
except ImportError:
    Store = None

__all__ = ["Forecast", "forecast"]

_BEFORE, _AFTER = "before the body", "after the body"


@dataclass(frozen=True)
class Forecast:
    """What a run will be.

    Attributes:
        layout: The layout, the stages and the plan of shared layers.
        accounts: For each pipeline rank what its first tensor-parallel rank in the first replica holds.
    """

    layout: str
    accounts: tuple[MemoryUsage, ...]


def forecast(
    make: Callable[[], tuple[LightningModule, LightningDataModule | None]],
    settings: HybridConfig,
    sizes: tuple[int, int, int],
    *,
    precision: Precision,
    **trainer: Any,
) -> Forecast:
    """What the ranks of a run will hold.

    Lightning's own loop runs up to the first training step, which is run on one micro-batch whose tensors have shapes
    and no memory; on numbers only if it reads some. So is what `configure_model` makes. Layers are divided over
    ranks that are not there.

    Args:
        make: Makes the user's module and its data (``None`` if the module has loaders itself). It is called a second
            time if the module cannot do without numbers.
        settings: The settings.
        sizes: (data, tensor, pipeline) parallel size.
        precision: The precision plugin.
        trainer: Other arguments of the Trainer that decide about steps, such as ``accumulate_grad_batches``.

    Returns:
        What was found out.

    Raises:
        ValueError, TypeError: As at the start of training, or if a step needs numbers that a module on the meta device
            has not.
    """
    trainer |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer |= {"logger": DummyLogger(), "num_sanity_val_steps": 0, "limit_val_batches": 0, "plugins": [precision]}

    def attempt(probe: _Probe, module: LightningModule, data: LightningDataModule | None) -> Forecast:
        dry = Trainer(accelerator="cpu", devices=1, strategy=probe, **trainer)
        with _alone_among(math.prod(sizes)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run says them too
            try:
                dry.fit(module, datamodule=data)
            except _EnoughError:
                return Forecast(probe.layout, tuple(probe.accounts))
        raise ValueError(
            f"{type(module).__name__} was not trained with any batch: its loader is empty, or limited to 0."
        )

    module, data = make()
    if Fake is not None and is_overridden("configure_model", module):
        try:
            return attempt(_Probe(settings, sizes, with_values=False), module, data)
        except Exception:  # whatever it is, with numbers it is what a run says
            module, data = make()
    return attempt(_Probe(settings, sizes, with_values=True), module, data)


@contextmanager
def _alone_among(size: int) -> Iterator[None]:
    """As one of so many processes, of which the others are not there."""
    if Store is None:
        raise ValueError(f"torch {torch.__version__} cannot pretend that there are other processes.")
    dist.init_process_group("fake", store=Store(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _EnoughError(Exception):
    """The first step has told what there is to know."""


class _Probe(SingleDeviceStrategy):
    """A strategy whose first training step is looked at, and is the last.

    Attributes:
        layout: The layout as text.
        accounts: What was found out, by pipeline rank.
    """

    def __init__(self, settings: HybridConfig, sizes: tuple[int, int, int], *, with_values: bool) -> None:
        super().__init__(device="cpu")
        self._settings, self._sizes, self._with_values = settings, sizes, with_values
        self._mode = Fake(allow_non_fake_inputs=True) if Fake is not None else None
        self.layout = ""
        self.accounts: list[MemoryUsage] = []

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """What `configure_model` makes needs no memory, if it can be without values."""
        with nullcontext() if self._with_values else torch.device("meta"):
            yield

    def model_to_device(self) -> None:
        """It stays where it is."""

    def teardown(self) -> None:
        """The module is of no use any more."""

    def setup_environment(self) -> None:
        """Give the module the mesh that it has in a run."""
        super().setup_environment()
        module = self.lightning_module
        assert module is not None
        names = tuple(AXES[axis] for axis in ("dp", "tp", "pp"))
        self._mesh = module._device_mesh = init_device_mesh("cpu", self._sizes, mesh_dim_names=names)

    def setup(self, trainer: Trainer) -> None:
        """Share layers as a run does, and let the user configure optimizers."""
        module = self.lightning_module
        assert module is not None
        self._has_values = not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        self.layout = describe(module, self._settings, self._sizes)
        self._body, self._stage_map = None, StageMap(None, (), (range(0),), 1)
        if self._sizes[2] > 1:
            self._body, self._stage_map = find_stages(module, self._settings, self._sizes[2])
        with nullcontext() if self._has_values else self._without_memory():
            if not self._has_values:
                _give_shapes(module)
            if self._sizes[1] > 1:
                mesh, device = self._mesh[AXES["tp"]], torch.device("cpu")
                group = TensorGroup(mesh.get_group())
                find_plan(module, self._settings, self._sizes[1]).apply(module, mesh, group, device, lambda name: None)
            super().setup(trainer)

    def _without_memory(self) -> AbstractContextManager[Any]:
        if self._mode is None:
            raise ValueError(f"torch {torch.__version__} cannot run a module without values; make them in `__init__`.")
        mode: AbstractContextManager[Any] = self._mode
        return mode

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Look at one micro-batch.

        Raises:
            _EnoughError: Always.
        """
        module = self.lightning_module
        assert module is not None
        data, _, pipeline = self._sizes
        microbatches, _ = split_into(batch, self._settings.num_microbatches, module)
        kept = self._kept(module, microbatches, args)
        schedule = find_schedule(self._settings, pipeline, len(microbatches))
        for rank in range(pipeline):
            layers = find_own_layers(module, self._body, self._stage_map, rank)
            self.accounts.append(
                estimate(
                    module,
                    self._stage_map,
                    layers,
                    self._settings,
                    self.optimizers,
                    rank=rank,
                    num_replicas=data,
                    num_batches=module.trainer.accumulate_grad_batches,
                    activations=None if kept is None else most_kept(schedule, rank, dict(enumerate(kept))),
                )
            )
        raise _EnoughError

    def _kept(self, module: LightningModule, microbatches: Sequence[Any], args: Sequence[Any]) -> list[int] | None:
        """The bytes that autograd keeps of a micro-batch in each stage."""
        if not module.automatic_optimization:
            return None  # its step is forward and backward, as often as it likes
        if self._mode is not None:
            try:
                return self._look(module, microbatches[0], args, self._mode)
            except Exception as error:
                if not self._has_values:
                    raise ValueError(
                        f"The training step of {type(module).__name__} cannot be run without numbers: {error} Make the"
                        " module's values in `__init__` for this."
                    ) from error
        return self._look(module, microbatches[0], args, nullcontext())

    def _look(self, module: LightningModule, microbatch: Any, args: Sequence[Any], mode: Any) -> list[int]:
        keeping = SavedTensorMeter()
        layers = find_recomputed(module, self._settings, self._body, self._stage_map)
        recompute = ActivationCheckpointing(
            layers, torch.device("cpu"), selective=self._settings.recompute == "selective"
        )
        with mode, LogRecorder(module)(), recompute():
            leaves, spec = flatten(microbatch)
            leaves = [_seen(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            tensors = [to_local(tensor) for tensor in (*module.parameters(), *module.buffers())]
            keeping.leave_out([*tensors, *(_seen(tensor, mode) for tensor in tensors)])
            keeping.leave_out(leaf for leaf in leaves if isinstance(leaf, Tensor))
            with self.precision_plugin.train_step_context(), keeping(), _labelled(self._body, keeping):
                output = to_plain_tensors(module.training_step(unflatten(leaves, spec), *args))
            kept = _by_stage(keeping, self._stage_map)
            del output
        return kept


def _seen(tensor: Tensor, mode: Any) -> Tensor:
    """What a step in this mode sees of a tensor."""
    seen: Tensor = tensor if isinstance(mode, nullcontext) else mode.from_tensor(tensor)
    return seen


def _by_stage(keeping: SavedTensorMeter, stage_map: StageMap) -> list[int]:
    stages: list[list[Any]] = [list(layers) for layers in stage_map.stages]
    stages[0].insert(0, _BEFORE)
    stages[-1] += [_BEFORE, _AFTER]  # the last stage runs the step from its beginning, too
    return [keeping.together(labels) for labels in stages]


@contextmanager
def _labelled(body: tuple[str, nn.Sequential] | None, keeping: SavedTensorMeter) -> Iterator[None]:
    """While this is entered, what is kept is known by the layer of the body that needs it."""
    keeping.label = _BEFORE
    if body is None:
        yield
        return

    def forward(x: Any) -> Any:
        for keeping.label, layer in enumerate(body[1]):
            x = layer(x)
        keeping.label = _AFTER
        return x

    body[1].forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del body[1].forward


def _give_shapes(module: nn.Module) -> None:
    """Let what lies on the meta device be tensors like any others, still without memory."""
    for parameter, owners in [(each, find_owners(module)[id(each)]) for each in module.parameters() if each.is_meta]:
        made = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        copy_attributes(parameter, made)
        set_parameter(made, owners)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
