"""`HybridStrategy`, which connects the parts of the package to the Trainer's hooks. It contains no algorithms.

The user passes it to the Trainer, which calls its methods in this order::

    Trainer(...)      __init__, precision_plugin, checkpoint_io, _configure_launcher
    trainer.fit(...)  connect, setup_environment, model_sharded_context (configure_model), setup, on_train_start
    each batch        batch_to_device, optimizer_step (training_step, backward), or validation_step and so on
    at the end        teardown; after an error on_exception, then teardown

`run.World`, `run.AttachedModule` and `run.Run` hold the objects of these hooks, see :mod:`~.run`. `HybridStrategy`
inherits from Lightning's `ParallelStrategy`. It does not inherit from `DDPStrategy`, which wraps the full module on
each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.axes import Sizes
from lightning_hybrid.checkpoint.file_io import FileIO
from lightning_hybrid.checkpoint.weights.weights import Source
from lightning_hybrid.config import HybridConfig, Settings, explains_errors, takes, usual_microbatches
from lightning_hybrid.data_parallel.grad_clip import clip_by_total_norm, total_norm
from lightning_hybrid.data_parallel.master_weights import MasterWeights
from lightning_hybrid.distributed.dtensor import moving
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.process_group import has_nccl
from lightning_hybrid.distributed.sizes import check_expert_parallel_size, check_zero_size, resolve_sizes
from lightning_hybrid.distributed.watch.connections import Connections
from lightning_hybrid.error_codes.printing import print_once_per_node
from lightning_hybrid.pipeline_parallel.batch_norm import batch_norms, limit_microbatches
from lightning_hybrid.pipeline_parallel.placeholders import absent_gradients
from lightning_hybrid.strategy import checks, full_parameters, launch
from lightning_hybrid.strategy.collectives import ReplicaCollectives, outside_of_steps
from lightning_hybrid.strategy.layout import is_cut, runs_backward
from lightning_hybrid.strategy.layout_search import load_choose_layout
from lightning_hybrid.strategy.meta_init import lacks_values
from lightning_hybrid.strategy.open_arguments import ALL_SIZES, resolve_open
from lightning_hybrid.strategy.patches import add_callbacks
from lightning_hybrid.strategy.rendezvous import Stores, stores_of_groups
from lightning_hybrid.strategy.run import AttachedModule, Run, World
from lightning_hybrid.strategy.summary import batch_text
from lightning_hybrid.strategy.watch.start_watch import StartWatch
from lightning_hybrid.tensor_parallel.layouts.layout import distribute
from lightning_hybrid.trainer import lightning_internals
from lightning_hybrid.trainer.batch_hooks import pinned
from lightning_hybrid.trainer.debug.desync import DesyncDetector
from lightning_hybrid.trainer.debug.nonfinite_gradients import (
    GradientWatch,
    NoGradientWatch,
    NonfiniteGuard,
    NonfiniteWarning,
)
from lightning_hybrid.trainer.exceptions import print_shortly, stops_together
from lightning_hybrid.trainer.gradient_functions import GradientFunctions
from lightning_hybrid.trainer.optimization import GlobalBatch, ReplicaClosure, check_accumulation
from lightning_hybrid.trainer.precision import adapt, autocasts, check_master_weights, check_optimizer, scale_half


@explains_errors
class HybridStrategy(ReplicaCollectives):
    """Strategy that trains a LightningModule with data, tensor, context and pipeline parallelism.

    Losses, metrics and weights are the same as in a run with one process, up to rounding. The layers of the module are
    split into stages, and each pipeline rank runs one or more stages. Each batch is split into microbatches. A schedule
    defines the order in which the stages process the microbatches. The weights of a layer are sharded over the
    tensor-parallel ranks. Replicas average their gradients.

    Example::

        trainer = Trainer(devices=4, strategy=HybridStrategy(pipeline_parallel_size=2))

    Args:
        data_parallel_size: Number of replicas of the model. ``"auto"`` means the number of processes divided by the
            product of the other parallel sizes.
        tensor_parallel_size: Number of ranks over which the weights of each layer are sharded. These ranks should be on
            the same node. You can also pass a list of allowed sizes; see ``pipeline_parallel_size``.
        pipeline_parallel_size: Number of pipeline ranks over which the layers are split. To allow a job to restart on
            fewer nodes, pass a list of sizes in order of preference, such as ``[4, 2]``. The strategy uses the first
            size that is compatible with the number of processes, an allowed ``tensor_parallel_size`` and, if you set
            it, ``data_parallel_size``. If you pass such a list, all arguments that contain one value for each stage or
            rank must be valid for every size in the list.
        num_microbatches: Number of microbatches into which each batch is split. ``"auto"`` means ``4 *
            pipeline_parallel_size``, or 1 without a pipeline. If the module has batch norm, ``"auto"`` splits small
            batches into fewer microbatches, so that each microbatch has at least two samples.
        schedule: Order in which the forward and backward passes of microbatches run: ``"gpipe"``, ``"1f1b"`` or
            ``"interleaved_1f1b"``. Default: ``"1f1b"``, or ``"interleaved_1f1b"`` if ``num_chunks`` is greater than 1.
        num_chunks: Number of stages on each pipeline rank. Values greater than 1 require
            ``schedule="interleaved_1f1b"`` or ``"gpipe"``.
        partition: How layers are assigned to stages. ``"uniform"`` assigns the same number of layers to every stage. If
            layers remain, the last stages get one extra layer each. ``"parameters"`` minimizes the number of parameters
            of the largest stage, including the parameters of the embedding and the head. A list assigns the layers
            explicitly. It contains either the number of layers of each stage, such as ``[6, 7, 7, 4]``, or the stage
            index of each layer. Stages are numbered from 0 across all ranks, in the order in which a microbatch passes
            through them. With `num_chunks` above 1, each rank has several stages, and each stage has its own index. You
            can also set the stage index as an attribute of a layer or of a container of layers:
            ``layer.pipeline_stage = 1``.
        body: Dotted name of the layers that the pipeline splits into stages, or a list of dotted names. A string names
            either one list of layers (such as an `nn.ModuleList`) or one `nn.Sequential`. If a string names an
            `nn.Sequential`, `training_step` must call it as a whole. If you pass a list of strings, each string names a
            list of layers or a single layer. Put the names in the order in which `training_step` calls the layers. With
            a list of strings, your code can call each layer individually, even in an `nn.Sequential`. In a name, ``*``
            matches any text without a dot. With ``None``, the strategy uses the module's ``pipeline_body`` if it is
            defined. Otherwise, the strategy uses the outermost `nn.Sequential` that contains more than half of the
            parameters. If no `nn.Sequential` contains that many, the strategy uses the layer lists with the most
            parameters.
        tensor_parallel_mode: Arrangement of the tensor-parallel ranks. ``"1d"`` shards weights by columns or rows, as
            Megatron-LM does. ``"2d"``, ``"2.5d"`` and ``"3d"`` also shard activations. For an integer q,
            ``tensor_parallel_size`` must be q x q with ``"2d"``, ``tensor_parallel_depth`` x q x q with ``"2.5d"``, and
            q x q x q with ``"3d"``.
        tensor_parallel_depth: Number of square grids into which ``tensor_parallel_mode="2.5d"`` divides the
            tensor-parallel ranks. Each grid holds all weights and processes a part of the samples.
        tensor_parallel_plan: How layers are sharded over the tensor-parallel ranks. A mapping assigns styles to module
            names, or placements to names of parameters and buffers. A placement is a string such as ``"S(0)"``; see
            :meth:`distribute`. In a name, ``*`` matches any text without a dot. ``"auto"`` uses the module's
            ``tensor_parallel_plan()`` if it is defined. Otherwise, ``"auto"`` uses a built-in plan for the supported
            layers of torch and Hugging Face. ``None`` shards no layers.
        sequence_parallel: If True, activations between tensor-parallel layers are sharded along the sequence dimension.
            The sharding applies only inside modules to which the plan assigns the style ``"sequence_region"``. The
            built-in plan assigns this style to torch's transformer layers.
        context_parallel_size: Number of ranks over which the layers of the body (see ``body``) split each sequence. The
            last norm, the head and the loss also compute on sequence shards. All other code outside the body receives
            full sequences.
        context_parallel: How context-parallel ranks communicate in attention (`F.scaled_dot_product_attention`).
            ``"ulysses"`` changes the sharding from positions to attention heads before attention, and back to positions
            after attention. ``"ring"`` passes blocks of keys and values from rank to rank. ``"all_gather"`` gathers all
            keys and values on each rank.
        global_batch_size: Number of samples per optimizer step, summed over all replicas. Each replica accumulates
            gradients over as many batches as are necessary to reach this number. The number of samples per step
            therefore stays the same if a job restarts with a different number of replicas. With ``None``,
            ``Trainer(accumulate_grad_batches=...)`` sets the number of accumulated batches.
        zero_stage: ZeRO stage, which determines what is sharded over replicas. Stage 0 shards nothing, and stage 1
            shards optimizer states. Stage 2 also shards gradients, and stage 3 also shards parameters.
        zero_size: Number of consecutive replicas over which ZeRO shards (hybrid sharding). Gradients are
            reduce-scattered within each group of this size, and then summed across the groups. If a group is on one
            node, ZeRO gathers and reduces parameters and gradients only within nodes. Default: all replicas.
        expert_parallel_size: Number of consecutive replicas over which the experts of mixture-of-experts layers are
            sharded. Each rank holds its share of the experts of a layer, and tokens are sent to the ranks that hold
            their experts. The number must divide the number of replicas, and the number of experts. All other layers
            stay as they are.
        expert_parallel: Ranks over which experts are sharded. ``"data"`` shards them over `expert_parallel_size`
            replicas. ``"tensor"`` shards them over the tensor-parallel ranks, which have the same tokens: each rank
            computes its experts, and the results are summed. ``"tensor"`` requires ``expert_parallel_size=1``.
        recompute: Layers to which activation checkpointing is applied. The activations of these layers are not stored
            in the forward pass, but recomputed in the backward pass. ``True`` selects every layer. ``"selective"`` also
            selects every layer, but stores the results of matrix multiplications and attention. An int sets how many
            layers are selected in each stage, and a float sets which fraction of the layers is selected in each stage.
            A list of ints contains the number of selected layers for each stage. A list of module names selects the
            named layers. In a name, ``*`` matches any text without a dot.
        offload: Tensors to move to CPU memory while the device does not need them: ``"activations"``, ``"optimizer"``
            (optimizer states), or a list of both. Offloading has no effect if the device is the CPU.
        master_weights: If True, half-precision parameters (``precision="bf16-true"`` or ``"16-true"``) have float32
            master weights. Optimizers update the master weights with float32 gradients, and checkpoints contain the
            master weights. With ``"16-true"``, the loss is scaled, as it is with ``"16-mixed"``.
        broadcast_batches: If True, only one rank of each replica loads the batches. This rank sends the other ranks of
            the replica only the tensors that they need. If False, every rank loads all batches of its replica, and the
            ranks of a replica compare checksums of each batch.
        loss_reduction: How your ``training_step`` reduces the loss over the samples of a batch: ``"mean"`` or
            ``"sum"``.
        dynamic_shapes: Set this argument to True if the shapes of tensors between layers depend on the values in a
            batch. If False, these shapes must depend only on the shapes of the tensors in the batch.
        save_distributed_checkpoint: If True, a checkpoint is a directory to which every rank writes its own part. If
            False, a checkpoint is one file, which rank 0 writes. You can load both kinds of checkpoints under any
            layout.
        async_save: If True, a checkpoint is first copied to CPU memory and then written in the background while
            training continues.
        gather_module_on_teardown: If True, the strategy calls :meth:`gather_module` at the end of each run, so that
            every rank has the full module. You can then save, call or export the module as you would after training
            with DDP. If False, the module stays sharded. ``"auto"`` gathers the module if each node has enough memory
            for three copies of the module per process. Otherwise, the module stays sharded, and a log message explains
            how to gather it. If the module was gathered, the next run shards it again.
        initial_weights: Path of the initial weights. All formats that :meth:`load_weights` accepts are supported. A run
            that resumes from a checkpoint ignores this argument.
        timeout: Time after which an unfinished collective fails. For all arguments that set a time, a number means
            seconds.
        layout: If ``"auto"``, the strategy searches for the fastest layout when a run starts. The search chooses a
            value for each of the following arguments, unless you set the argument: `tensor_parallel_size`,
            `pipeline_parallel_size`, `context_parallel_size`, `tensor_parallel_mode`, `tensor_parallel_depth`,
            `context_parallel`, `num_microbatches`, `schedule`, `num_chunks`, `tuning.extra_in_flight`, `zero_stage` and
            `recompute`. If you set a parallel size to a list, the search tries only the sizes in the list. All ranks
            measure the speed of their devices and of the links between the devices. Rank 0 then estimates the step time
            of all layouts that fit within `tuning.memory_limit`, and logs the fastest layout as arguments that you can
            copy. To let the search choose only some arguments, do not set `layout`. Instead, set one or more of
            `tensor_parallel_size`, `pipeline_parallel_size`, `schedule`, `num_chunks`, `zero_stage` and `recompute` to
            ``"auto"``.
        faults: A `Faults` object with settings for detecting lost ranks, deadlocks, diverging ranks and non-finite
            gradients.
        launch: A `Launch` object with settings that control how processes are started and how ranks are numbered.
        tuning: A `Tuning` object with settings that trade memory for speed or precision.

    Attributes:
        settings: The arguments of the strategy. If the strategy chose a value, as with ``num_microbatches="auto"``, the
            settings contain the chosen value.
        sizes: The parallel sizes, as the attributes `data`, `tensor`, `pipeline` and `context`. The sizes are available
            after the Trainer has been created. If the layout search chooses them, they are available only after a run
            has started.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """

    @takes(HybridConfig)
    def __init__(self, config: HybridConfig) -> None:
        # Errors before the ranks are connected, such as a wrong number of processes, are printed once per node.
        print_once_per_node()
        provisional, searched = resolve_open(config)
        checks.check_arguments(provisional)
        self.settings = self._requested = Settings.of(config, provisional, searched)
        self._process_group_backend = self.settings.launch.process_group_backend
        self._world: World | None = None
        self._attached: AttachedModule | None = None
        self._run: Run | None = None
        self._has_precision = False  # True if this run has converted the module to the run's precision
        self._start: StartWatch | None = None
        self._started: WeakSet[LightningModule] | None = None  # modules that have received their initial weights
        self._connections = Connections()
        self._global_batch: GlobalBatch | None = None
        self._sync_blocked = False
        self.num_nodes = 1
        super().__init__()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups and knowledge of modules are not pickled.
        empty = {
            "_start": None,
            "_world": None,
            "_attached": None,
            "_run": None,
            "_started": None,
            "_global_batch": None,
        }
        return {**super().__getstate__(), **empty}

    # -- properties --------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """Objects that exist as long as the process groups exist."""
        if self._world is None:
            raise RuntimeError("The device mesh exists only after the processes have been set up. [LH140]")
        return self._world

    @property
    def attached(self) -> AttachedModule:
        """The user's module, available once the processes are connected."""
        if self._attached is None:
            raise RuntimeError("The device mesh exists only after the processes have been set up. [LH140]")
        return self._attached

    @property
    def run(self) -> Run:
        """The current run or, between runs, the last run."""
        assert self._run is not None, "no run has begun"
        return self._run

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def is_distributed(self) -> bool:
        """True if the job has several processes."""
        return self.world_size > 1

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        first = self.parallel_devices[0]  # On the CPU, a cluster may start more processes per node than `devices`.
        return first if first.type == "cpu" else self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh of all ranks.

        The mesh has the axes ``"data_parallel"``, ``"tensor_parallel"`` and ``"pipeline_parallel"``. If
        ``context_parallel_size`` is greater than 1, it also has the axis ``"context_parallel"``.
        """
        return self.world.mesh.device_mesh

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that together hold one replica."""
        return self.mesh.model_group

    def distribute(self, tensor: Tensor, layout: str | Mapping[str, str]) -> DTensor:
        """Distribute a tensor over the ranks of a stage, and return it as a DTensor.

        Torch operators redistribute the DTensor when necessary. Use this method to shard tensors in your own code, for
        example a buffer, an activation, or a parameter that `configure_model` creates. To shard a parameter without
        changing the code, add its name to `tensor_parallel_plan`.

        Args:
            tensor: The full tensor, of any dtype, with the same values on every rank of the stage. If you pass a
                DTensor, it is redistributed to the placements in ``layout``.
            layout: The placements of the tensor along the axes of the device mesh. Along an axis, ``"S(d)"`` shards
                dimension ``d``, ``"B"`` replicates the tensor, and ``"P"`` stores partial sums that add up to the
                tensor. A single placement such as ``"S(0)"`` applies to the tensor-parallel axis. A string such as
                ``"S(0),S(1)"`` contains one placement for each axis except the pipeline axis, in the order of
                `rank_order`. ``"data_parallel=S(0)"`` or ``{"data_parallel": "S(0)"}`` sets the placement for the named
                axis.

        Returns:
            The DTensor. It is part of the autograd graph of ``tensor``, so that a parameter that you distribute in a
            step receives its gradient. Its method `full_tensor()` returns the full tensor. If you distribute a
            parameter before a run starts, for example in `configure_model`, the result is a new parameter. Assign it to
            the module in place of the old parameter.

        Raises:
            TypeError: If the layout is neither a string nor a mapping.
            ValueError: If the layout cannot be parsed, or if it is not supported for parameters.
        """
        begins = self._run is None or not self._run.is_installed
        return distribute(tensor, layout, self.device_mesh, makes_parameters=begins)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for a `DistributedSampler`.

        `num_replicas` is the number of replicas, and `rank` is the data-parallel rank.
        """
        if self._world is None and self.sizes.num_replicas == 1:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.mesh.num_replicas, "rank": self.mesh.data_rank}

    @property
    @override
    def mesh(self) -> Mesh:
        """The ranks and their process groups."""
        return self.world.mesh

    @property
    @override
    def is_alone(self) -> bool:
        """True if no process groups exist, for example before a run or after the groups have been destroyed."""
        return self._world is None or not dist.is_initialized()

    @property
    @override
    def in_step(self) -> bool:
        """True while a step runs that is split into several stages, so that ranks do not run the same code."""
        context = None if self._run is None else self._run.context
        return context is not None and context.in_step

    # -- processes, and the beginning and end of a run ---------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        environment = self.cluster_environment
        # Lightning's own environment does not know this number.
        environment.set_world_size(self.num_nodes * self.num_processes)
        self._resolve(environment.world_size())
        numbers = self.num_processes, self.num_nodes
        self._launcher = launch.make_launcher(self, environment, *numbers, self.settings.launch.start_method)

    def _resolve(self, world_size: int) -> None:
        """Find the sizes of the axes. If the layout search chooses them, :meth:`_find_layout` replaces them.

        Args:
            world_size: The number of processes of the job.

        Raises:
            ValueError: If no allowed sizes fit the number of processes.
        """
        is_found = bool(self._requested.searched) and not self.settings.searched
        if is_found and self.sizes.num_ranks == world_size:
            return  # a run under another Trainer has found them
        self.settings = self._requested
        if set(ALL_SIZES) & set(self.settings.searched):
            self.sizes = Sizes(data=world_size)
        else:
            self.sizes = resolve_sizes(world_size, self.settings.requested_sizes)
            if "zero_stage" not in self.settings.searched:
                check_zero_size(self.settings.zero_size, self.settings.zero_stage, self.sizes.num_replicas)
            check_expert_parallel_size(self.settings.expert_parallel_size, self.sizes.num_replicas)
        if self.settings.auto_microbatches:
            self.settings = replace(self.settings, num_microbatches=usual_microbatches(self.sizes.pipeline))

    def set_world_ranks(self) -> None:
        """Set the rank in the cluster environment, and in Lightning's utilities that log only on rank 0."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        launch.announce(self.global_rank)

    @override
    def connect(self, model: LightningModule) -> None:
        """Connect the user's module to the strategy."""
        super().connect(model)
        self._check_module()
        if self.settings.master_weights:
            check_master_weights(self.precision_plugin)

    @property
    def _runs_steps(self) -> bool:
        """Return True if this strategy runs the steps of the module, and not the Trainer."""
        return is_cut(self.settings, self.sizes, self._module)

    @property
    def _runs_backward(self) -> bool:
        """Return True if this strategy calls backward."""
        return runs_backward(self.settings, self.sizes, self._module)

    def _check_module(self) -> None:
        checks.check_module(self._module, cut=self._runs_steps, runs_backward=self._runs_backward)

    @override
    def setup_environment(self) -> None:
        """Start the process groups, create the mesh, and shard the module if its body already exists."""
        super().setup_environment()
        self._has_precision = False
        self.set_world_ranks()
        trainer, samples = self._module.trainer, self.settings.global_batch_size
        if samples is not None and trainer.state.fn == TrainerFn.FITTING:
            check_accumulation(samples, trainer, self._module)
        if not dist.is_initialized():
            assert self.cluster_environment is not None
            if self._start is not None:  # the watch of earlier process groups: new errors do not concern it
                self._start.close()
            self._world = self._start = None
            with self._connections.opened():
                given = (
                    self.cluster_environment,
                    self._process_group_backend,
                    self.root_device,
                    self.settings.time_limit,
                )
                self._process_group_backend = launch.start_groups(*given, watch=self._watch_start)
            if not has_nccl():  # nccl opens and closes connections during a run
                self._connections.watch_opened(self.cluster_environment.main_port)
        elif self._world is None:
            self._watch_start(stores_of_groups())
        ranks = checks.check_ranks(self.settings, self.sizes, self._module.trainer)
        if self.settings.searched:
            self._find_layout()
        if self._world is None:
            assert self._start is not None
            self._world = World(self.settings, self.sizes, self.root_device, self._start, ranks)
            checks.check_tensor_groups(self._world.mesh)
            self._attached, self._run = None, None
        module = self._module
        lightning_internals.set_device_mesh(module, self.device_mesh)
        if self._attached is None or self._attached.module is not module:
            self._started = WeakSet() if self._started is None else self._started
            self._attached, self._run = AttachedModule(self._world, module, self._started), None
        self._world.open(module.trainer)
        checks.check_trainer(module.trainer, module, num_stages=self._attached.parallelizer.num_stages)
        self._attached.divide_early()

    def _find_layout(self) -> None:
        """Search for the arguments that the user left open, once for all runs with this device mesh; on every rank."""
        open_sizes = set(ALL_SIZES) & set(self.settings.searched)
        sizes = self.settings.requested_sizes if open_sizes else asdict(self.sizes)
        given = self._module, self.root_device, self.precision_plugin, self.num_nodes
        found = load_choose_layout()(self.settings, sizes, *given)
        self.sizes = found.sizes
        changed = {"searched": (), **found.arguments}
        if self.settings.auto_microbatches:
            changed = {"num_microbatches": usual_microbatches(self.sizes.pipeline)} | changed
        self.settings = self.settings.changed(changed)
        self._check_module()

    def _watch_start(self, stores: Stores) -> None:
        rank, size = self.global_rank, self.world_size
        self._start = StartWatch(*stores, self.settings, self._connections, rank=rank, size=size)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors on the device or, with ``empty_init=True``, on the meta device until the module is sharded."""
        with torch.device("meta") if empty_init else self.root_device, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """The context in which `configure_model` runs. At the end of the context, the module is sharded."""
        with super().model_sharded_context():
            yield
        self.attached.divide()

    @override
    def setup(self, trainer: Trainer) -> None:
        """Prepare the module, its optimizers and its steps for the Trainer's loops."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.attached.divide()
        assert self.model is not None
        self._convert_module()
        self._has_precision = True
        with moving(self.model):
            self.model_to_device()
        self.attached.master_weights.to(self.root_device)
        self._run = Run(
            self.world,
            self.attached,
            sync_batch_norm=self._layer_sync is not None,
            autocasts=autocasts(self.precision_plugin, self.root_device),
        )
        fitting = trainer.state.fn == TrainerFn.FITTING
        closure: partial[ReplicaClosure] | None = None
        if fitting:
            self._reset_optimizers_and_schedulers()
            if self.settings.global_batch_size is not None:  # before schedulers read the number of steps
                self._global_batch = GlobalBatch(self.settings.global_batch_size, self.mesh.num_replicas, trainer)
                self._global_batch.accumulate()
                add_callbacks(trainer, self._global_batch)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            lightning_internals.move_optimizer_states(self.optimizers, self.root_device)
            closure = partial(
                ReplicaClosure,
                backward_without_loss=self._backward_without_loss,
                has_gradients=self._run.training_step.has_gradients,
            )
        functions = GradientFunctions(self._run.grad_sync, self._norm_arguments) if self._shares_model else None
        self._run.install(trainer, closure, self._guard_steps() if fitting else None, functions)
        self.remember_log_dir(trainer)

    def _convert_module(self) -> None:
        """Convert parameters to the dtype of the precision plugin, if it has one."""
        assert self.model is not None
        if self.settings.master_weights:
            self.attached.master_weights = MasterWeights(self.model)
        with moving(self.model):
            self.model = self.precision_plugin.convert_module(self.model)

    @override
    def model_to_device(self) -> None:
        """Move this rank's parameters and buffers to the device; meta parameters stay on the meta device."""
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def on_train_start(self) -> None:
        """Log the effective batch size, and resume at the position that a loaded checkpoint contains."""
        trainer = self._module.trainer
        size = getattr(trainer.train_dataloader, "batch_size", None)
        num_microbatches = requested = self.settings.num_microbatches
        if self.settings.auto_microbatches:
            num_microbatches = limit_microbatches(num_microbatches, size, batch_norms(self._module))
        replicas, accumulated = self.mesh.num_replicas, trainer.accumulate_grad_batches
        text = batch_text(size, replicas, accumulated, num_microbatches=num_microbatches, requested=requested)
        rank_zero_info(text)
        if self.settings.offloaded and not self.run.offload.has_effect:
            rank_zero_info(f"offload={list(self.settings.offloaded)} has no effect on the CPU.")
        self.world.resume.restore(trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Report the exception to the other ranks, and leave all process groups without waiting for these ranks."""
        super().on_exception(exception)
        if self._start is None or self.world_size == 1 or stops_together(exception, self._module.trainer):
            return
        exceptions = None if self._world is None else self._world.exceptions
        cause = (exceptions or self._start).leave(exception)
        told_elsewhere = cause is not None or (exceptions is not None and exceptions.are_told_elsewhere(exception))
        print_shortly(
            cause or exception,
            self.global_rank,
            told_elsewhere=told_elsewhere,
            is_first=self._start.failures.is_first,
            is_terminated=bool if self._world is None else self._world.watch.is_terminated,
        )
        if cause is not None:
            self.teardown()  # the Trainer does not call it after an exception in this hook
            raise cause from exception

    @override
    def teardown(self) -> None:
        """End the run, and undo the changes to the module and the Trainer."""
        if self._world is not None:
            self._world.watch.end_together()
        try:
            self._teardown()
        finally:
            if self._world is not None:
                self._world.watch.finish()
            elif self._start is not None:
                self._start.close()

    def _teardown(self) -> None:
        if self._world is not None and self._attached is not None and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            if self._global_batch is not None:
                self._global_batch.restore()
                self._global_batch = None
            self._attached.detach()
            try:
                self._world.close(trainer)
            finally:
                if self._run is not None:
                    self._run.remove()
            self._attached.master_weights.remove()
            self._attached.close()
        module = self._lightning_module
        # This happens after an error. Moving the module would raise another error that hides it.
        if module is not None and lacks_values(module):
            self._lightning_module = None
        with moving(module):
            super().teardown()
        self._lightning_module = module
        if self._attached is not None and module is self._attached.module:
            self._attached.end_run(self._run)  # on the CPU, which has more memory

    # -- data --------------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return the dataloader of this rank. Only one rank of each model group loads the samples of its replica."""
        if self._world is None and self.sizes.num_replicas == 1:
            return dataloader  # requested before a run, for example by `Trainer.estimated_stepping_batches`
        return self.world.loaders(dataloader, self._module.trainer)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device. Transfer hooks draw the same random numbers on all ranks of a model group."""
        moves = self.run.moves_batches
        if self.run.context is not None and self.root_device.type == "cuda":
            batch = pinned(batch)  # received batches are already pinned, and loaded batches may be
        if self._module.trainer.training and not moves:
            return batch
        # The context is entered also without a move, because all ranks count the transfers of evaluation.
        with self.world.batch_hooks.transfer(self._module):
            return super().batch_to_device(batch, device, dataloader_idx) if moves else batch

    # -- steps -------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a training batch.

        If the step is cut into stages or microbatches, or its loss is weighted, also run the backward pass.
        """
        run, trainer = self.run, self._module.trainer
        self.world.streams.end_hooks()
        run.grad_sync.broadcast_buffers()
        backward = not lightning_internals.skips_backward(trainer)
        scaler = getattr(self.precision_plugin, "scaler", None)
        epoch_loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
        if self.settings.faults.detect_desync and self.world_size > 1:
            DesyncDetector(self._module, self.mesh, self.world.streams)(args[0], epoch_loop.total_batch_idx)
        return run.training_step(
            *args,
            **kwargs,
            step=epoch_loop.total_batch_idx,
            precision=self.precision_plugin.train_step_context,
            accumulated=accumulated,
            is_first=epoch_loop.batch_idx % accumulated == 0,
            scale=None if scaler is None else scaler.scale,
            backward=backward,
            reduce=backward and not self._sync_blocked,
        )

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward and average the gradients.

        If `training_step` has already run the backward pass, only run hooks.
        """
        plugin, module = self.precision_plugin, self._module
        closure_loss = plugin.pre_backward(closure_loss, module)

        def run(loss: Tensor) -> None:
            plugin.backward(loss, module, optimizer, *args, **kwargs)

        self.run.training_step.backward(closure_loss, run, reduce=not self._sync_blocked)
        with absent_gradients():
            return plugin.post_backward(closure_loss, module)

    def _backward_without_loss(self) -> bool:
        """Take part in the reduction of gradients if this replica has no loss. Return True if any replica has one."""
        if not self.run.training_step.backward(None, reduce=not self._sync_blocked):
            return False
        plugin, nothing = self.precision_plugin, torch.zeros((), device=self.root_device)
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            scaler.scale(nothing)  # the scaler is initialized at the first loss
        with absent_gradients():
            plugin.post_backward(nothing, self._module)  # for hooks that read gradients
        return True

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Inside this context, each rank accumulates gradients without averaging them."""
        self._sync_blocked = True
        try:
            yield
        finally:
            self._sync_blocked = False

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation batch."""
        return self._evaluate("validation_step", args, self.precision_plugin.val_step_context)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test batch."""
        return self._evaluate("test_step", args, self.precision_plugin.test_step_context)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prediction batch."""
        return self._evaluate("predict_step", args, self.precision_plugin.predict_step_context)

    def _evaluate(self, name: str, args: tuple[Any, ...], context: Callable[[], Any]) -> Any:
        self.world.streams.end_hooks()
        return self.run.evaluation_step(name, *args, precision=context)

    @override
    def on_validation_start(self) -> None:
        """Copy the first replica's buffers to all replicas before evaluation."""
        self.run.grad_sync.broadcast_buffers()

    on_test_start = on_predict_start = on_validation_start

    # -- optimizers, precision and gradients -------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        """The precision plugin, adapted so that all ranks of a model group make the same decisions."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            if self.settings.master_weights:
                scale_half(plugin, "cpu" if isinstance(self.accelerator, CPUAccelerator) else "cuda")
            adapt(plugin, model_group=self._owners, clip_by_norm=self._clip_by_norm)
        self._precision_plugin = plugin

    def _owners(self) -> dist.ProcessGroup | None:
        """Return the ranks that together own the parameters: the model group, or all ranks if replicas share them.

        The model group consists of the ranks that hold one replica. ``None`` before the process groups exist.
        """
        if self._world is None:
            return None
        return dist.group.WORLD if self.settings.shards_over_replicas else self.mesh.model_group

    @property
    def _shares_model(self) -> bool:
        """Return True if other ranks own a part of the parameters."""
        owners = self._owners()
        return owners is not None and owners.size() > 1

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call `configure_optimizers` with the full module, and keep only this rank's parameters in the optimizers."""
        masters = self.attached.master_weights
        try:
            with masters.opened():  # some optimizers create their states at once
                super().setup_optimizers(trainer)
        except RuntimeError as error:
            if self._runs_backward and lightning_internals.is_about_several_optimizers(error):
                raise ValueError(checks.SEVERAL_OPTIMIZERS) from None
            raise
        checks.check_optimizers(self.optimizers, self._module, cut=self._runs_steps)
        for optimizer in self.optimizers:
            check_optimizer(self.precision_plugin, optimizer)
            self.attached.checkpointer.optimizers.drop_placeholders(optimizer)
        if not self._module.automatic_optimization:
            masters.follow(self.optimizers)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Run an optimizer step. Offloaded optimizer states are on the device during the step."""
        offload, masters = self.run.offload, self.attached.master_weights

        def fetching() -> Any:
            masters.close()  # some optimizers call the closure more than once
            output = closure()  # forward and backward
            masters.open()
            offload.load_states(optimizer)
            return output

        guard = self.run.nonfinite
        with masters.step(), guard.step(optimizer) if guard is not None else nullcontext():
            output = super().optimizer_step(optimizer, fetching, *args, **kwargs)
        offload.offload_states(optimizer)
        return output

    def _clip_by_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        if not self._shares_model:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        else:
            norm = clip_by_total_norm(parameters, max_norm, **self._norm_arguments())
        if self._run is not None and self._run.nonfinite is not None:
            self._run.nonfinite.note_norm(norm)
        return norm

    def _guard_steps(self) -> GradientWatch:
        """Return the watch that inspects gradients before an optimizer step.

        Raises:
            ValueError: If `faults.on_nonfinite` cannot be combined with the precision.
        """
        scaler = getattr(self.precision_plugin, "scaler", None)
        checks.check_nonfinite(self.settings.faults.on_nonfinite, scaler)
        if scaler is not None:
            return NoGradientWatch()
        if self.settings.faults.on_nonfinite == "ignore":
            is_first = partial(self.world.failures.is_first_to, "nonfinite gradients")
            return NonfiniteWarning(self._module, self.mesh.pipeline_rank, is_first)
        group = self.mesh.decision_group if self.settings.shards_over_replicas else self.mesh.control_group
        return NonfiniteGuard(
            self.settings.faults.on_nonfinite,
            self._module,
            lambda parameters, exponent: total_norm(parameters, exponent, **self._norm_arguments()),
            group,
        )

    @outside_of_steps
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of the full model. Every rank must call this method.

        Args:
            norm_type: The exponent p > 0 of the p-norm, or ``float("inf")`` for the maximum norm.

        Returns:
            A float64 scalar tensor on the device of this rank.
        """
        optimized = self.run.grad_sync.optimized_parameters()
        own = [optimized.get(id(parameter), parameter) for parameter in self.attached.parallelizer.own_parameters()]
        return total_norm(own, norm_type, **self._norm_arguments())

    def _norm_arguments(self) -> dict[str, Any]:
        return {"group": self._owners(), "counts": self.run.grad_sync.counts_in_norm, "device": self.root_device}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes and reads checkpoint files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = FileIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        checks.check_plugin(io, sharded=self.settings.save_distributed_checkpoint, beside=self.settings.async_save)
        if lightning_internals.is_wrapping_io(io):
            # This applies to the innermost plugin, unless it wraps a plugin of the user that writes files.
            io.checkpoint_io = FileIO()
        self._checkpoint_io = io

    @outside_of_steps
    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint: rank 0 writes a file, or all ranks write to a directory."""
        if storage_options is not None and self.settings.save_distributed_checkpoint:
            raise TypeError(checks.STORAGE_OPTIONS)
        if self._attached is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            with self.attached.master_weights.opened():
                self.attached.checkpointer.save(checkpoint, filepath, self.checkpoint_io, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint file or directory. Only rank 0 does this."""
        if self._attached is None:
            super().remove_checkpoint(filepath)
        else:
            self.attached.checkpointer.remove(filepath, self.checkpoint_io)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint file, or load this rank's weights from a directory directly into the module.

        Before a run, the module is first converted to the precision of the run.
        """
        if self._attached is None:  # called outside of a run
            return super().load_checkpoint(checkpoint_path, weights_only)
        if not self._has_precision and not self.settings.master_weights:
            # Lightning converts it only after loading, when weights of a higher precision are already rounded.
            self._convert_module()
        with self.attached.master_weights.opened():
            return self.attached.checkpointer.load(checkpoint_path, self.checkpoint_io, weights_only)

    @outside_of_steps
    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict on rank 0. Other ranks return an empty one, unless they have the full model.

        If checkpoints are directories (`save_distributed_checkpoint`), return the part of this rank instead.
        """
        if self._attached is None:  # no run has begun, and the module is not sharded
            return super().lightning_module_state_dict()
        if self.world.exceptions.why_not_saved is not None:  # the Trainer calls this method first when it saves
            raise RuntimeError(self.world.exceptions.why_not_saved)
        with self.attached.master_weights.opened():
            return self.attached.checkpointer.module_state()

    @outside_of_steps
    def load_weights(self, source: Source) -> None:
        """Load weights into the module. Each rank loads only the weights that it holds.

        Call this method on every rank, in a hook such as `on_fit_start`. If the module is not sharded yet, the weights
        are loaded when the strategy shards the module. Parameters on the meta device are created with the loaded
        values. If the source does not contain such a parameter, the parameter is initialized as usual.

        Args:
            source: The state dict of the full module, or a path. The path can point to a state dict or checkpoint that
                `torch.save` wrote, a ``.safetensors`` file, a sharded checkpoint directory, or a Hugging Face folder.
                The parameter names in a Hugging Face folder must match the parameter names of a model that is an
                attribute of the module. In other sources, all names must match the module's names, unless the module
                has ``strict_loading=False``. If parameters are tied, the source needs to contain only one of the tied
                parameters.

        Raises:
            FileNotFoundError, ValueError: If the source cannot be read, or if a Hugging Face folder matches no part or
                several parts of the module. Every rank raises the error.
            RuntimeError: If parameter names or shapes do not match. Every rank raises the error before any weights are
                loaded.
        """
        with self.attached.master_weights.opened():
            self.attached.parallelizer.load(source)

    @outside_of_steps
    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, gradients: bool = False, writes: bool = False
    ) -> Iterator[None]:
        """Return a context manager that gathers full parameters on every rank. Every rank must enter the context.

        Use this context in hooks that read or change parameters of the full model, for example to log weight norms or
        to initialize parameters. The context corresponds to FSDP's `summon_full_params` and DeepSpeed's
        `GatheredParameters`. Inside the context, new parameter objects replace sharded parameters and the parameters of
        stages on other ranks. Access the new objects through the module, for example with `self.parameters()`, and not
        through the optimizer. Each rank needs memory for all gathered parameters, so pass only the part of the module
        that you need. You cannot call layers inside the context.

        Example::

            with self.trainer.strategy.full_parameters(self.head, gradients=True):
                norm = self.head.weight.grad.norm()

        Args:
            module: The part of the LightningModule whose parameters are gathered. Default: the full LightningModule.
            gradients: If True, gradients are also gathered, and each parameter has its full gradient inside the
                context. If False, ``grad`` is ``None`` inside the context.
            writes: If True, the values of parameters and gradients on rank 0 are copied to all ranks at the end of the
                context. If False, changes made inside the context are lost.

        Returns:
            The context manager.

        Raises:
            ValueError: If the context is entered in a step or before the module is sharded, if ``module`` is not a part
                of the LightningModule, or if code inside the context calls a layer or replaces a parameter.
        """
        attached, root = self.attached, self._module
        if self._run is not None and self._run.grad_sync.zero.is_open:
            raise WrongUseError(full_parameters.IN_STEP)
        if not attached.parallelizer.is_done and not attached.parallelizer.is_whole:
            raise WrongUseError(full_parameters.NOT_DIVIDED)
        places = attached.parallelizer.parameters
        given = root, root if module is None else module, places, self.mesh, self.root_device
        parameters = full_parameters.FullParameters(*given, gradients=gradients)
        masters = attached.master_weights.opened
        with parameters.opened(masters, writes=writes, refuses_calls=self._shares_model):
            yield
        if writes and self._run is not None:
            self._run.grad_sync.parameters_changed()

    @outside_of_steps
    def gather_module(self) -> None:
        """Gather the full module in place on every rank, so that the module has ordinary layers and parameters again.

        Call this method on every rank, after a run or in the last hook of a run (`teardown`). Afterward, you can use
        the module in a single process, or train it with another Trainer and layout. New parameters without gradients
        replace sharded parameters and the parameters of stages on other ranks. The optimizers of the run still refer to
        the old parameters. After this call, `trainer.save_checkpoint` still saves the optimizer states. Metrics that
        you update in a step are not gathered: their states stay on the last stage.

        Raises:
            ValueError: If layers were sharded by torch parallel styles (such as `ColwiseParallel`) or by your own code.
                Every rank raises the error.
            RuntimeError: If the process groups of the run no longer exist.
        """
        if self._attached is None:
            return
        if self.is_alone:
            raise RuntimeError(
                "`gather_module` needs the process groups of the run, but they have been destroyed. [LH330]"
            )
        self.attached.gather(self._run)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the weights."""
        with self.attached.master_weights.opened():
            self.attached.checkpointer.load_module_state(checkpoint["state_dict"], strict=strict)

    @outside_of_steps
    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state on rank 0. Other ranks return an empty one, unless they have the full model.

        If checkpoints are directories (`save_distributed_checkpoint`), return the part of this rank instead.
        """
        return self.attached.checkpointer.optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states."""
        with self.attached.master_weights.opened():  # the states are converted to the dtype of the master weights
            self.attached.checkpointer.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        lightning_internals.move_optimizer_states(self.optimizers, self.root_device)
