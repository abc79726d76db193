"""`HybridStrategy`: joins the parts of the package to the Trainer's hooks. No algorithm lives here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from lightning_hybrid.config import HybridConfig, resolve_sizes
from lightning_hybrid.data_parallel.grad_clip import clip_by_total_norm, total_norm
from lightning_hybrid.distributed.dtensor import keeping_marks
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.strategy import checks as refusals
from lightning_hybrid.strategy import launch as processes
from lightning_hybrid.strategy.arguments import check_arguments
from lightning_hybrid.strategy.collectives import outside_of_steps
from lightning_hybrid.strategy.meta_init import lacks_values
from lightning_hybrid.strategy.run import RunState
from lightning_hybrid.strategy.stepping import SteppingStrategy
from lightning_hybrid.strategy.summary import batch_text
from lightning_hybrid.trainer import optimization
from lightning_hybrid.trainer.batch_hooks import pinned
from lightning_hybrid.trainer.precision import adapt, check_optimizer

__all__ = ["HybridStrategy"]


class HybridStrategy(SteppingStrategy):
    """Trains an unmodified LightningModule over data x tensor x pipeline parallel ranks, with one process's numbers.

    The body of the module, an `nn.Sequential`, is divided into stages, one or more on each pipeline rank. Each batch is
    split into micro-batches that flow through the stages by a schedule. Layers are shared by the tensor-parallel ranks
    of a stage, each with its part of the weights; replicas average their gradients.

    Example::

        trainer = Trainer(devices=4, strategy=HybridStrategy(pipeline_parallel_size=2))

    Args:
        data_parallel_size: The number of replicas. ``"auto"`` takes all processes that the other axes leave.
        tensor_parallel_size: The number of ranks that share each layer.
        pipeline_parallel_size: The number of ranks that share the layers.
        num_microbatches: The number of micro-batches of a batch. ``"auto"`` is ``4 * pipeline_parallel_size``, and 1
            without a pipeline.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        num_chunks: Stages per rank; more than one with ``"interleaved_1f1b"`` or ``"gpipe"``.
        partition: ``"uniform"`` for equally many layers per stage, ``"parameters"`` for the lightest possible heaviest
            stage, or the number of layers of each stage.
        body: The dotted name of the `nn.Sequential` to divide. ``None`` takes the module's ``pipeline_body``, or the
            outermost one that holds more than half of the parameters.
        tensor_parallel_plan: How layers are shared: a style by name of module, where ``*`` stands for anything between
            two dots. ``"auto"`` takes the module's ``tensor_parallel_plan()``, or divides the layers of torch that it
            knows; ``None`` divides nothing.
        sequence_parallel: Whether activations between shared layers are divided along the sequence, where the plan has
            regions for it; transformer layers of torch are some.
        zero_stage: What is divided over replicas (ZeRO): 1 the optimizers' states, 2 gradients too, 3 parameters too.
        zero_frees: When stage 3 lets go of the parameters of a layer: ``"step"`` after its last backward of a step,
            ``"microbatch"`` after each forward and each backward; ``"auto"`` is ``"step"`` with several micro-batches.
        recompute: What is computed again in backward instead of being kept: ``True`` for every layer of the body,
            ``"selective"`` for all of them but matrix products and attention; a number of layers of each stage, a share
            of them (``0.5``), a list with a number for each stage, or of names of modules, where ``*`` stands for
            anything between two dots.
        offload: What is kept on the host while the device does not need it: ``"activations"``, ``"optimizer"`` (its
            states) or a list of both. Where the device is the host it has no effect.
        float32_gradients: Whether gradients of parameters in half precision (``precision="bf16-true"``) are added up
            over micro-batches, and over ranks, in float32.
        measure_activations: Whether what activations take in the first step is measured, and logged with the rest.
        broadcast_batches: Whether one rank of each model group loads and the others receive. Otherwise all load, and
            checksums are compared.
        loss_reduction: How the loss of ``training_step`` reduces over the samples of a batch: ``"mean"`` or ``"sum"``.
        dynamic_shapes: Whether shapes between layers depend on values, and not only on the shapes of the batch.
        save_distributed_checkpoint: Whether a checkpoint is a directory to which every rank adds its part, instead of
            one file that rank 0 writes. Either can be loaded under any layout.
        async_save: Whether checkpoints are written beside training, from a copy on the host.
        gather_module_on_teardown: Whether every rank has the whole module after a run, as by :meth:`gather_module`.
        initial_weights: Where to take the weights from, unless a checkpoint is resumed: as for :meth:`load_weights`.
        rank_order: The axes from the outermost to the innermost: ``"pp-dp-tp"`` or another order.
        process_group_backend: The backend of the process groups; by default nccl on CUDA and gloo elsewhere.
        timeout: Of the process groups.

    Attributes:
        settings: The arguments, resolved.
        sizes: (data, tensor, pipeline) parallel size, once the Trainer knows how many processes there are.

    Raises:
        ValueError, TypeError: If an argument is not possible.
    """

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        num_chunks: int = 1,
        partition: str | list[int] = "uniform",
        body: str | None = None,
        tensor_parallel_plan: dict[str, str] | str | None = "auto",
        sequence_parallel: bool = False,
        zero_stage: Literal[0, 1, 2, 3] = 0,
        zero_frees: Literal["auto", "step", "microbatch"] = "auto",
        recompute: bool | int | float | str | list[int] | list[str] = False,
        offload: str | list[str] | None = None,
        float32_gradients: bool = False,
        measure_activations: bool = False,
        broadcast_batches: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        dynamic_shapes: bool = False,
        save_distributed_checkpoint: bool = False,
        async_save: bool = False,
        gather_module_on_teardown: bool = False,
        initial_weights: str | Path | None = None,
        rank_order: str = "pp-dp-tp",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(**given)
        usual = 4 * pipeline_parallel_size if pipeline_parallel_size > 1 else 1
        given["num_microbatches"] = usual if num_microbatches == "auto" else num_microbatches
        given["offload"] = (offload,) if isinstance(offload, str) else tuple(offload or ())
        self.settings = HybridConfig(**{field.name: given[field.name] for field in fields(HybridConfig)})
        self._wished_sizes = (data_parallel_size, tensor_parallel_size, pipeline_parallel_size)
        self._assembly: RunState | None = None
        self._started: WeakSet[LightningModule] | None = None  # modules that have had their initial weights
        self._process_group_backend = process_group_backend
        self.num_nodes = 1
        super().__init__()

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh with the axes ``"data_parallel"``, ``"tensor_parallel"`` and ``"pipeline_parallel"``."""
        return self._parts.mesh.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The world that a sampler divides the data over: the replicas."""
        if self._assembly is None and self.sizes[0] == 1:
            return {"num_replicas": 1, "rank": 0}
        mesh = self._parts.mesh
        return {"num_replicas": mesh.data_parallel_size, "rank": mesh.data_rank}

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self._parts.mesh

    @property
    def is_alone(self) -> bool:
        """Whether there are no process groups: before a run, or after they were destroyed."""
        return self._assembly is None or not _distributed_is_initialized()

    @property
    def in_step(self) -> bool:
        """Whether the user's step runs, and not on every rank."""
        pipeline = None if self._assembly is None else self._assembly.pipeline
        return pipeline is not None and pipeline.in_step

    def __getstate__(self) -> dict[str, Any]:
        # Process groups, and what is known of modules, stay with their process.
        return {**super().__getstate__(), "_assembly": None, "_started": None}

    @property
    def precision_plugin(self) -> Precision:
        """The plugin, made to agree over the model group."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            adapt(plugin, model_group=self._owners, clip_by_norm=self._clip_by_norm)
        self._precision_plugin = plugin

    def _owners(self) -> dist.ProcessGroup | None:
        """The ranks that together own the parameters: the model group, or with ZeRO all."""
        if self._assembly is None:
            return None
        return dist.group.WORLD if self.settings.zero_stage else self._assembly.mesh.model_group

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.sizes = resolve_sizes(self.num_nodes * self.num_processes, *self._wished_sizes)
        self._launcher = processes.make_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment, and everything that logs on rank 0 only, which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        processes.announce(self.global_rank)

    def connect(self, model: LightningModule) -> None:
        """Attach the user's module."""
        refusals.check_module(model, cut=self.settings.cut(self.sizes, model))
        super().connect(model)

    def setup_environment(self) -> None:
        """Start the process groups, make the mesh, and divide the module if its body exists already."""
        super().setup_environment()
        self.set_world_ranks()
        if not _distributed_is_initialized():
            assert self.cluster_environment is not None
            self._process_group_backend = processes.start_groups(
                self.cluster_environment, self._process_group_backend, self.root_device, self.settings.timeout
            )
            self._assembly = None
        if self._assembly is None:
            self._started = WeakSet() if self._started is None else self._started
            self._assembly = RunState(self.settings, self.sizes, self.root_device, self._started)
        module = self._module
        module._device_mesh = self.device_mesh
        self._assembly.attach(module)
        self._assembly.divide_early()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where tensors are made: with ``empty_init=True`` nowhere, until the module is divided."""
        with torch.device("meta") if empty_init else self.root_device, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`; the module is divided when it leaves."""
        with super().model_sharded_context():
            yield
        self._parts.divide()

    def setup(self, trainer: Trainer) -> None:
        """Make everything ready for the Trainer's loops."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._parts.divide()
        assert self.model is not None
        with keeping_marks(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        self._parts.assemble(sync_batch_norm=self._layer_sync is not None)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            if self._parts.is_cut:
                optimization.install(trainer)
        self._parts.install(trainer)
        if self._parts.is_cut:
            self.remember_log_dir(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the user configure optimizers over the whole module, and keep what lives here."""
        super().setup_optimizers(trainer)
        refusals.check_optimizers(self.optimizers, self._module, cut=self._parts.is_cut)
        for optimizer in self.optimizers:
            check_optimizer(self.precision_plugin, optimizer)
            self._parts.archive.optimizers.strip(optimizer)

    def model_to_device(self) -> None:
        """Move what lives here; placeholders stay where they are."""
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """One loader for each model group, over this replica's samples."""
        if self._assembly is None and self.sizes[0] == 1:
            return dataloader  # asked for before a run, such as for `Trainer.estimated_stepping_batches`
        return self._parts.loading(dataloader, self._module.trainer)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; the user's transfer hooks draw the same random numbers on every rank of the model group."""
        if self._module.trainer.training and self._parts.moves_microbatches:
            return pinned(batch)
        with self._parts.transfer(self._module):
            return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        """Say what a step takes, and go on where a checkpoint was."""
        trainer = self._module.trainer
        num_microbatches = self.settings.num_microbatches if self._parts.is_cut else None
        size = getattr(trainer.train_dataloader, "batch_size", None)
        replicas, accumulated = self.mesh.data_parallel_size, trainer.accumulate_grad_batches
        rank_zero_info(batch_text(size, replicas, accumulated, num_microbatches=num_microbatches))
        if self.settings.offload and not self._parts.offload.has_effect:
            rank_zero_info(f"offload={list(self.settings.offload)} has no effect: the device is the host.")
        self._parts.continuation.resume(trainer)

    def _clip_by_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        owners = self._owners()
        if owners is None or owners.size() == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return clip_by_total_norm(parameters, max_norm, **self._norm_arguments())

    @outside_of_steps
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model; to be called on every rank.

        Args:
            norm_type: The exponent p > 0, or ``float("inf")``.

        Returns:
            A float64 scalar on the root device.
        """
        parameters = [parameter for parameter in self._module.parameters() if not parameter.is_meta]
        return total_norm(parameters, norm_type, **self._norm_arguments())

    def _norm_arguments(self) -> dict[str, Any]:
        parts = self._parts
        return {"group": self._owners(), "counts": parts.grad_sync.counts_in_norm, "device": self.root_device}

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, and leave every group without a collective."""
        super().on_exception(exception)
        if self._assembly is None or self.world_size == 1 or not isinstance(exception, Exception):
            return
        cause = self._assembly.departure.leave(exception)
        if cause is not None:
            self.teardown()  # the Trainer comes no further than this
            raise cause from exception

    def teardown(self) -> None:
        """Give the module and the Trainer back as they were."""
        if self._assembly is not None and self.lightning_module is not None:
            optimization.uninstall(self.lightning_module.trainer)
            self._assembly.remove(self.lightning_module.trainer)
            self._assembly.close()
        module = self._lightning_module
        if module is not None and lacks_values(module):  # after an error, which torch's about moving it would hide
            self._lightning_module = None
        with keeping_marks(module):
            super().teardown()
        self._lightning_module = module
        if self.settings.gather_module_on_teardown and module is not None and not module.trainer.interrupted:
            self._parts.gather()  # on the host, where there is more room

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``"hybrid"`` and presets such as ``"hybrid_pp2"`` and ``"hybrid_tp2_pp2"``."""
        for tensor, pipeline in itertools.product((1, 2, 4, 8), repeat=2):
            parts = [f"{axis}{size}" for axis, size in (("tp", tensor), ("pp", pipeline)) if size > 1]
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline} if parts else {}
            text = f"Pipeline of {pipeline} stages, layers shared by {tensor} ranks, data parallel over the rest"
            strategy_registry.register("_".join(["hybrid", *parts]), cls, description=text, **sizes)


HybridStrategy.register_strategies(StrategyRegistry)
