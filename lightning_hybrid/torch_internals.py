"""Private names of torch that this package uses, under public names. Other modules import them from here.

A name is private if it, or a module that contains it, begins with an underscore, such as `torch._C` and
`Tensor._version`. The names `_parameters`, `_buffers` and `_modules` of `nn.Module` are the only exception: all
subclasses of `nn.Module` share them, in torch and in other libraries, and no public method changes a module under all
of its names.

The comment of an entry states what it is for and which public API is missing. ``tests/test_torch_contract.py`` tests
each entry with the installed version of torch. ``tests/test_torch_privates.py`` finds private names in other modules.
If a version of torch lacks a name, most entries are ``None``, and the modules that use them do without.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

__all__ = ["DisableTorchFunction", "DisableTorchFunctionSubclass"]  # torch's guide to subclasses of `Tensor` uses them


def _find(module: str, name: str, default: Any = None) -> Any:
    """Return what a module of torch calls by a name, or `default` if this version of torch lacks it."""
    try:
        return getattr(import_module(module), name, default)
    except ImportError:
        return default


def _getter(name: str) -> Any:
    """Return the function that reads an attribute of tensors: `__torch_function__` receives it too."""
    return getattr(Tensor, name).__get__


# -- calls of functions and operators ----------------------------------------------------------------------------------

#: Base class of modes that see operators. `TorchFunctionMode`, which is public, sees functions, above autograd.
TorchDispatchMode: Any = _find("torch.utils._python_dispatch", "TorchDispatchMode")
#: Context without any such mode. The public `__exit__` of a mode leaves the innermost one alone.
without_dispatch_modes: Any = _find("torch.utils._python_dispatch", "_disable_current_modes", nullcontext)
#: Returns the innermost such mode, or ``None``. No public function does.
current_dispatch_mode: Callable[[], Any] = _find(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode", type(None)
)
#: Context in which modes and subclasses see no operator. It takes less time than leaving all modes.
DisableTorchDispatch: Any = _find("torch._C", "_DisableTorchDispatch", nullcontext)
#: The signature of an operator: arguments, results, and what it writes. Only its name and its tags are public.
operator_schema: Callable[[Any], Any] = attrgetter("_schema")
#: The name of an operator without its overload, such as ``"aten::mm"``. The public `name()` contains the overload.
operator_name: Callable[[Any], str] = attrgetter("_schema.name")
#: Prefix of functions that change lists of tensors, such as `torch._foreach_mul_`, which users call.
FOREACH = "_foreach_"
#: Prefixes of functions that begin or end a context, which users do not call directly.
CONTEXT_PREFIXES = ("_set_", "_enter_", "_exit_")
#: Functions behind `Gamma` and `Dirichlet` of `torch.distributions`, where they draw. They check their inputs.
DRAWS_BY_VALUE = ("_standard_gamma", "_sample_dirichlet")
#: Functions behind `pack_padded_sequence` and `pad_packed_sequence`, as `__torch_function__` receives them.
PACK_SEQUENCE, PAD_SEQUENCE = "_pack_padded_sequence", "_pad_packed_sequence"
#: An argument of `log_softmax` that `nn.functional` passes on. It has no effect on the result.
STACK_LEVEL = "_stacklevel"
#: Functions of losses in C++, where `nn.functional` calls them. Code that has imported those has no other common place.
loss_functions: Any = _find("torch._C", "_nn")

# -- operators ---------------------------------------------------------------------------------------------------------
# Modes receive them. The public functions that call them choose one of them by device, shapes and dtypes.

#: Products of matrices: in groups, and of scaled 8-bit numbers.
SCALED_PRODUCTS = ("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
#: Beginning of the names of all kernels behind `scaled_dot_product_attention`.
SCALED_DOT_PRODUCT = "_scaled_dot_product"
#: The kernel that `torch.utils.flop_counter` has a formula for.
FLASH_ATTENTION = "_scaled_dot_product_flash_attention"
#: All kernels of attention that do not keep their scores.
FUSED_ATTENTIONS = (
    FLASH_ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
#: A view of which torch does not track changes through its base.
UNSAFE_VIEW = "_unsafe_view"
#: The operator behind `Tensor.to`, which autocast calls too.
TO_COPY = "_to_copy"
#: The operators behind `all_gather_into_tensor` and `reduce_scatter_tensor`, in the namespace ``c10d``.
ALL_GATHER, REDUCE_SCATTER = "_allgather_base_", "_reduce_scatter_base_"
#: The operator that reads a number of a tensor, as `float(tensor)` does.
read_number: Any = torch.ops.aten._local_scalar_dense.default
#: Attention that returns the logsumexp of the scores too, to merge blocks. The public function returns no logsumexp.
flash_attention: Any = getattr(torch.ops.aten, FLASH_ATTENTION, None)
flash_attention_backward: Any = getattr(torch.ops.aten, f"{FLASH_ATTENTION}_backward", None)
flash_attention_for_cpu: Any = getattr(torch.ops.aten, f"{FLASH_ATTENTION}_for_cpu", None)
flash_attention_for_cpu_backward: Any = getattr(torch.ops.aten, f"{FLASH_ATTENTION}_for_cpu_backward", None)

# -- tensors -----------------------------------------------------------------------------------------------------------

#: The number of in-place changes of a tensor. Comparing values instead would wait for the device.
version_counter: Callable[[Tensor], int] = _getter("_version")
#: The tensor of which a tensor is a view, or ``None``. `untyped_storage` finds shared memory, but not the tensor.
view_base: Callable[[Tensor], Tensor | None] = _getter("_base")
#: True if a tensor is a view for autograd. No public function tells.
is_view: Callable[[Tensor], bool] = Tensor._is_view
#: The hooks that `Tensor.register_hook` has added, or ``None``. No public function lists them.
gradient_hooks: Callable[[Any], Mapping[int, Any] | None] = _getter("_backward_hooks")
#: The identity of a storage. `data_ptr` is 0 for all tensors without values, and tensors have new storage objects.
storage_identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
#: The indices and values of a sparse tensor that is not coalesced: the public `indices` and `values` refuse those.
sparse_indices: Callable[[Tensor], Tensor] = Tensor._indices
sparse_values: Callable[[Tensor], Tensor] = Tensor._values
#: The attribute that makes a tensor of another class an `nn.Parameter`, as the constructor of that class sets it.
PARAMETER_MARK = "_is_param"
#: Makes a tensor of a subclass that has a shape and no storage, as torch's guide to subclasses does.
make_wrapper: Any = Tensor._make_wrapper_subclass
#: Norms of many tensors in one kernel, in a chosen dtype; `nn.utils.get_total_norm` has no choice of the dtype.
foreach_norm: Any = getattr(torch, "_foreach_norm", None)
#: Tensors without values, and the mode that makes them. `torch.export`, which is public, traces whole programs only.
FakeTensor: Any = _find("torch._subclasses.fake_tensor", "FakeTensor")
FakeTensorMode: Any = _find("torch._subclasses.fake_tensor", "FakeTensorMode")
#: The logger to which torch writes that an operator refuses such tensors; the operator raises an error too.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"

# -- autograd and compiled code ----------------------------------------------------------------------------------------

#: The part of `torch.autograd.backward` after its checks, which take as long as the backward of a small layer.
run_backward: Callable[..., Any] | None = _find("torch.autograd.graph", "_engine_run_backward")
#: True while torch's profiler runs, and always if that is unknown. No public function tells.
is_profiling: Callable[[], bool] = _find("torch.autograd", "_profiler_enabled", lambda: True)
#: The attribute of a module that `nn.Module.compile` sets. No public method removes it.
COMPILED_CALL = "_compiled_call_impl"
#: Folders of torch in which code is compiled, for a watch that must not take a compilation for a rank that hangs.
COMPILER_FOLDERS = ("_dynamo/", "_inductor/")


def may_have_compiled() -> bool:
    """Return whether code of this process may have been compiled; to import the compiler takes a second."""
    return "torch._dynamo.eval_frame" in sys.modules


# -- modules -----------------------------------------------------------------------------------------------------------

#: The hooks of a module, by key, in the order of their calls. Public methods add hooks, but do not list them.
forward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_hooks")
forward_pre_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")
backward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_backward_hooks")
load_state_dict_pre_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_load_state_dict_pre_hooks")
#: The attributes of a module that hold hooks of state dicts. A comparison of modules leaves them out.
STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: The method of modules that `__call__` is. A class that defines another one may do anything in a call.
CALL_METHOD = "_call_impl"
#: The name by which some layers of torch call their `reset_parameters`.
RESET_METHOD = "_reset_parameters"
#: The methods that `forward` of a transformer layer calls. A class that overrides one computes something else.
TRANSFORMER_METHODS = ("_sa_block", "_mha_block", "_ff_block")


def has_own_loading(module: nn.Module) -> bool:
    """Return whether a class overrides how a module loads its own part of a state dict; no public method does that."""
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def layer_metadata(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """Return what a state dict stores of layers apart from tensors, such as versions. It is in no public entry."""
    return getattr(state, "_metadata", None)


def set_layer_metadata(state: Any, metadata: Mapping[str, Any]) -> None:
    """Set what :func:`layer_metadata` returns.

    Args:
        state: An `OrderedDict`; a plain dictionary has no attributes.
        metadata: Of each layer, by its name.
    """
    state._metadata = OrderedDict(metadata)


# -- optimizers and gradient scaling -----------------------------------------------------------------------------------

#: The attributes of an optimizer that hold the hooks of its step. Public methods add hooks, but do not remove all.
OPTIMIZER_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def unscales_in_step(optimizer: Optimizer) -> bool:
    """Return whether an optimizer unscales gradients in its kernel; `GradScaler` tells by the same attribute."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class OpenGradScaler(GradScaler):
    """A `GradScaler` in which subclasses can change how gradients are unscaled. No public method can be overridden."""

    @staticmethod
    def is_supported() -> bool:
        """Return whether this version of torch unscales gradients in a method of its own."""
        return callable(getattr(GradScaler, "_unscale_grads_", None))

    @property
    def device_type(self) -> str:
        """The type of the scaler's device, such as ``"cuda"``."""
        return getattr(self, "_device", "cuda")

    @property
    def has_scale(self) -> bool:
        """True if the scale has been created, at the first loss; the public `get_scale` waits for the device."""
        return getattr(self, "_scale", None) is not None

    def unscale_gradients(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients in place, and return for each device whether there were infinities or NaNs.

        Args:
            optimizer: The optimizer; only its `param_groups` are read.
            inv_scale: The factor.
            found_inf: A zero on the scale's device.
            args: Further arguments of torch's method.
            kwargs: Further arguments of torch's method.
        """
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, *args, **kwargs)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(*args, **kwargs)


# -- data loaders ------------------------------------------------------------------------------------------------------


def persistent_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that holds a loader's persistent workers, or ``None``. No public method ends the workers."""
    return loader._iterator


def set_persistent_iterator(loader: DataLoader[Any], iterator: Any) -> None:
    """Set what :func:`persistent_iterator` returns."""
    loader._iterator = iterator


# -- tensors that are sharded over ranks -------------------------------------------------------------------------------
# `torch.distributed.tensor` is imported by the functions, because commands that use no DTensor do not need it.

#: The shard of a DTensor. The public `to_local` determines the sharding again, which takes as long as a small layer.
dtensor_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")
#: Mesh, placements, whole shape and strides of a DTensor in one object.
dtensor_spec: Callable[[Any], Any] = attrgetter("_spec")
#: A field of such an object, in some versions: blocks of a dimension are taken for an order of sharding.
BLOCKS_ARE_ORDER = "use_strided_shard_as_shard_order"


def set_dtensor_shard(tensor: Any, shard: Tensor, spec: Any = None) -> None:
    """Let a DTensor have another shard. There is no public setter.

    Args:
        tensor: The DTensor.
        shard: Its new shard.
        spec: What :func:`dtensor_spec` returns from now on; ``None`` if that stays the same.
    """
    tensor._local_tensor = shard
    if spec is not None:
        tensor._spec = spec


def dtensor_handlers() -> dict[Any, Callable[..., Any]] | None:
    """Return the functions that DTensors call in place of operators. No public function registers one for a time."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    return handlers if isinstance(handlers, dict) else None


def strided_shard() -> Any:
    """Return the class of placements of which ranks hold a part of each block. No public placement divides blocks."""
    return _find("torch.distributed.tensor.placement_types", "_StridedShard")


def dtensor_costs() -> ModuleType | None:
    """Return the module whose `redistribute_cost` compares layouts of operands; it has no public replacement."""
    try:
        module = import_module("torch.distributed.tensor._ops.utils")
    except ImportError:
        return None
    return module if hasattr(module, "redistribute_cost") else None


def clear_dtensor_cache() -> None:
    """Let torch forget the placements of results, which refer to meshes. If it cannot, nothing happens."""
    clear = _find("torch.distributed.tensor.debug", "_clear_sharding_prop_cache")
    if clear is not None:
        clear()


# -- process groups ----------------------------------------------------------------------------------------------------

#: Aborts all groups of NCCL together. The public `ProcessGroup.abort` aborts one, and may wait for others.
abort_all_groups: Callable[[], None] | None = _find("torch.distributed.distributed_c10d", "_abort_process_group")
#: The name of a group that only its members make, from its ranks and a number. Members have to agree on the number.
name_of_ranks: Callable[[list[int]], str] | None = _find("torch.distributed.distributed_c10d", "_hash_ranks_to_str")
#: The flight recorder's record of collectives, as JSON. Public functions write it to files only.
dump_flight_recorder: Callable[..., str] | None = _find("torch._C._distributed_c10d", "_dump_fr_trace_json")
#: The group of a name that the flight recorder uses. No public function finds it.
group_of_name: Callable[[str], Any] | None = _find("torch._C._distributed_c10d", "_resolve_process_group")


def group_tables() -> Any:
    """Return the object that holds all process groups of this process, or ``None``. No public function lists them."""
    return _find("torch.distributed.distributed_c10d", "_world")


def forget_mesh_groups(mesh: Any) -> None:
    """Drop the references of a `DeviceMesh` to its groups, which stay alive otherwise. No public method does."""
    getattr(mesh, "_pg_registry", {}).clear()


def set_options_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in options of NCCL's groups; `new_group` requires it to equal its argument `timeout`."""
    options._timeout = timeout


# -- pickled names -----------------------------------------------------------------------------------------------------

#: Functions and classes that `torch.save` and `torch.distributed.checkpoint` write into files, by module.
PICKLED: Mapping[str, Iterable[str]] = {
    "torch._utils": (
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_nested_tensor",
        "_rebuild_parameter",
        "_rebuild_qtensor",
        "_rebuild_sparse_tensor",
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.serialization": ("_get_layout",),
}
#: Beginning of the names of functions that make a tensor of a storage.
REBUILD = "_rebuild_"
#: Makes a tensor of a class of its own, or with attributes, of another function and its arguments.
REBUILD_WITH_CLASS = ("torch._tensor", "_rebuild_from_type_v2")
#: Makes a parameter with attributes.
REBUILD_WITH_STATE = ("torch._utils", "_rebuild_parameter_with_state")
