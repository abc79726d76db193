"""Private names of torch that this package uses, under public names. Other modules import them from here.

A name is private if it, or a module that contains it, starts with an underscore, such as `torch._C` and
`Tensor._version`. The names `_parameters`, `_buffers` and `_modules` of `nn.Module` are the only exception: all
subclasses of `nn.Module` share them, in torch and in other libraries, and no public method replaces a module under all
of its names.

They are in one file, because private names change without notice: a new version of torch then concerns only this file.
The comment of an entry states its purpose, and which public API is missing. ``tests/test_torch_contract.py`` tests each
entry with the installed version of torch. ``tests/test_torch_privates.py`` finds private names in other modules. If a
version of torch does not have a name that :func:`_find` or `getattr` looks up, the entry is ``None`` or a harmless
default, and the modules that use it work without it. The other names are required: without them, the import of this
file fails, or the first use of the entry.

A *mode* is a context in which torch passes each function or operator to a Python method first. An *operator* is a
function of torch's C++ library, such as ``aten::mm``, below autograd. A *fake tensor* has a shape but no values.
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

__all__ = [
    "DisableTorchFunction",  # torch's guide to subclasses of `Tensor` uses it
    "DisableTorchFunctionSubclass",  # the same
    "FakeTensor",  # a tensor without values; the public `torch.export` traces only whole programs
    "FakeTensorMode",  # the mode that creates such tensors
]


def _find(module: str, name: str, default: Any = None) -> Any:
    """Return an attribute of a module of torch, or `default` if this version of torch does not have it."""
    try:
        return getattr(import_module(module), name, default)
    except ImportError:
        return default


def _getter(name: str) -> Any:
    """Return the function that reads an attribute of tensors. `__torch_function__` receives the same function."""
    return getattr(Tensor, name).__get__


# -- calls of functions and operators ----------------------------------------------------------------------------------

#: Base class of modes that receive operators. The public `TorchFunctionMode` receives functions, above autograd.
TorchDispatchMode: Any = _find("torch.utils._python_dispatch", "TorchDispatchMode")
#: A context without any such mode. The public `__exit__` of a mode removes only the innermost mode.
without_dispatch_modes: Any = _find("torch.utils._python_dispatch", "_disable_current_modes", nullcontext)
#: Returns the innermost such mode, or ``None``. No public function does this.
current_dispatch_mode: Callable[[], Any] = _find(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode", type(None)
)
#: A context in which modes and subclasses receive no operators. It is faster than `without_dispatch_modes`.
DisableTorchDispatch: Any = _find("torch._C", "_DisableTorchDispatch", nullcontext)
#: The signature of an operator: its arguments, its results and its writes. Only its name and its tags are public.
operator_schema: Callable[[Any], Any] = attrgetter("_schema")
#: The name of an operator without its overload, such as ``"aten::mm"``. The public `name()` contains the overload.
operator_name: Callable[[Any], str] = attrgetter("_schema.name")
#: Prefix of functions that change lists of tensors, such as `torch._foreach_mul_`, which users call.
FOREACH = "_foreach_"
#: Prefixes of functions that begin or end a context, which users do not call directly.
CONTEXT_PREFIXES = ("_set_", "_enter_", "_exit_")
#: The functions that draw for `torch.distributions.Gamma` and `Dirichlet`, as `__torch_function__` receives them.
DRAWS_BY_VALUE = ("_standard_gamma", "_sample_dirichlet")
#: Functions behind `pack_padded_sequence` and `pad_packed_sequence`, as `__torch_function__` receives them.
PACK_SEQUENCE, PAD_SEQUENCE = "_pack_padded_sequence", "_pad_packed_sequence"
#: An argument of `log_softmax` that `nn.functional` passes on. It has no effect on the result.
STACK_LEVEL = "_stacklevel"
#: The module with the loss functions that `nn.functional` calls. No public module is on the path of every loss.
loss_functions: Any = _find("torch._C", "_nn")

# -- operators ---------------------------------------------------------------------------------------------------------
# Modes receive these operators. Public functions select one of them by device, shapes and dtypes.

#: Matrix products in groups, such as the experts of a layer. torch runs them without values only in bfloat16.
GROUPED_PRODUCT = "_grouped_mm"
#: Matrix products: in groups, and with scaled 8-bit numbers.
SCALED_PRODUCTS = (GROUPED_PRODUCT, "_scaled_mm", "_scaled_grouped_mm")
#: Prefix of the names of all kernels of `scaled_dot_product_attention`.
SCALED_DOT_PRODUCT = "_scaled_dot_product"
#: The kernel for which `torch.utils.flop_counter` has a formula.
FLASH_ATTENTION = "_scaled_dot_product_flash_attention"
#: All attention kernels that do not store their scores.
FUSED_ATTENTIONS = (
    FLASH_ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
#: A view. Writes to its base do not change its version.
UNSAFE_VIEW = "_unsafe_view"
#: The operator that `Tensor.to` and autocast call.
TO_COPY = "_to_copy"
#: The operators of `all_gather_into_tensor` and `reduce_scatter_tensor`, in the namespace ``c10d``.
ALL_GATHER, REDUCE_SCATTER = "_allgather_base_", "_reduce_scatter_base_"
#: The operator that reads the value of a tensor with one element, for `float(tensor)`.
read_number: Any = torch.ops.aten._local_scalar_dense.default
#: Attention that also returns the logsumexp of the scores, to merge blocks. The public function does not return it.
flash_attention: Any = getattr(torch.ops.aten, FLASH_ATTENTION, None)
flash_attention_backward: Any = getattr(torch.ops.aten, f"{FLASH_ATTENTION}_backward", None)
flash_attention_for_cpu: Any = getattr(torch.ops.aten, f"{FLASH_ATTENTION}_for_cpu", None)
flash_attention_for_cpu_backward: Any = getattr(torch.ops.aten, f"{FLASH_ATTENTION}_for_cpu_backward", None)

# -- tensors -----------------------------------------------------------------------------------------------------------

#: The number of writes into a tensor. A comparison of values would wait for the device.
version_counter: Callable[[Tensor], int] = _getter("_version")
#: The tensor of which a tensor is a view, or ``None``. `untyped_storage` finds shared memory, but not the tensor.
view_base: Callable[[Tensor], Tensor | None] = _getter("_base")
#: True if a tensor is a view for autograd. No public function returns this.
is_view: Callable[[Tensor], bool] = Tensor._is_view
#: The hooks that `Tensor.register_hook` has added, or ``None``. No public function lists them.
gradient_hooks: Callable[[Any], Mapping[int, Any] | None] = _getter("_backward_hooks")
#: The identity of a storage. `data_ptr` is 0 for all tensors without values, and tensors have new storage objects.
storage_identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
#: The indices and values of a sparse tensor. The public `indices` and `values` fail if it is not coalesced.
sparse_indices: Callable[[Tensor], Tensor] = Tensor._indices
sparse_values: Callable[[Tensor], Tensor] = Tensor._values
#: The attribute that makes a tensor of another class an `nn.Parameter`. The constructor of `nn.Parameter` sets it.
PARAMETER_MARK = "_is_param"
#: Creates a tensor of a subclass, with a shape but without storage. torch's guide to subclasses uses it.
make_wrapper: Any = Tensor._make_wrapper_subclass
#: Norms of many tensors in one kernel, in a chosen dtype; `nn.utils.get_total_norm` has no choice of the dtype.
foreach_norm: Any = getattr(torch, "_foreach_norm", None)
#: The logger to which torch writes if an operator does not support such tensors. The operator also raises an error.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"

# -- autograd and compiled code ----------------------------------------------------------------------------------------

#: The part of `torch.autograd.backward` after its checks, which take as long as the backward of a small layer.
run_backward: Callable[..., Any] | None = _find("torch.autograd.graph", "_engine_run_backward")
#: Returns True while torch's profiler runs, and always if this is not known. No public function returns this.
is_profiling: Callable[[], bool] = _find("torch.autograd", "_profiler_enabled", lambda: True)
#: The attribute of a module that `nn.Module.compile` sets. No public method removes it.
COMPILED_CALL = "_compiled_call_impl"
#: Folders of torch's compiler. The watch uses them to distinguish a compilation from a rank that hangs.
COMPILER_FOLDERS = ("_dynamo/", "_inductor/")


def may_have_compiled() -> bool:
    """Return True if code of this process may have been compiled. This does not import the compiler, which is slow."""
    return "torch._dynamo.eval_frame" in sys.modules


# -- modules -----------------------------------------------------------------------------------------------------------

#: The hooks of a module, by key, in the order of their calls. Public methods add hooks, but do not list them.
forward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_hooks")
forward_pre_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")
backward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_backward_hooks")
load_state_dict_pre_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_load_state_dict_pre_hooks")
#: The names of a module's buffers that its state dict leaves out. `register_buffer` adds names, but nothing lists them.
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
#: The attributes of a module that hold hooks of state dicts. A comparison of modules leaves them out.
STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: The method that `Module.__call__` refers to. A class that overrides it may do anything in a call.
CALL_METHOD = "_call_impl"
#: The name of `reset_parameters` in some layers of torch.
RESET_METHOD = "_reset_parameters"
#: The list of parameters of a recurrent layer, which its `__setattr__` updates. Copies of torch's layers have it too.
FLAT_WEIGHTS = "_flat_weights"
#: The methods that `forward` of a transformer layer calls. A class that overrides one may compute other values.
TRANSFORMER_METHODS = ("_sa_block", "_mha_block", "_ff_block")


def has_own_loading(module: nn.Module) -> bool:
    """Return True if the class of a module overrides the private method that loads its entries of a state dict."""
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def layer_metadata(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the metadata of layers in a state dict, such as versions. No public function returns it."""
    return getattr(state, "_metadata", None)


def set_layer_metadata(state: Any, metadata: Mapping[str, Any]) -> None:
    """Set the metadata that :func:`layer_metadata` returns.

    Args:
        state: An `OrderedDict`; a plain dictionary has no attributes.
        metadata: The metadata of each layer, by its name.
    """
    state._metadata = OrderedDict(metadata)


# -- optimizers and gradient scaling -----------------------------------------------------------------------------------

#: The attributes of an optimizer that hold the hooks of its step. Public methods add hooks, but do not remove all.
OPTIMIZER_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def unscales_in_step(optimizer: Optimizer) -> bool:
    """Return True if an optimizer unscales gradients in its kernel. `GradScaler` reads the same attribute."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class OpenGradScaler(GradScaler):
    """A `GradScaler` whose subclasses can change how gradients are unscaled. No public method does this."""

    @staticmethod
    def is_supported() -> bool:
        """Return True if this version of torch has the method that unscales gradients."""
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
        """Unscale gradients in place, and return for each device if gradients have infinities or NaNs.

        Args:
            optimizer: The optimizer. Only its `param_groups` are read.
            inv_scale: The factor.
            found_inf: 0, on the scale's device.
            args: Other arguments of torch's method.
            kwargs: Other keyword arguments of torch's method.
        """
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, *args, **kwargs)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(*args, **kwargs)


# -- data loaders ------------------------------------------------------------------------------------------------------


def persistent_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator with a loader's persistent workers, or ``None``. No public method ends the workers."""
    return loader._iterator


def set_persistent_iterator(loader: DataLoader[Any], iterator: Any) -> None:
    """Set the iterator that :func:`persistent_iterator` returns."""
    loader._iterator = iterator


# -- tensors that are sharded over ranks -------------------------------------------------------------------------------
# The functions import `torch.distributed.tensor`, because commands without DTensors do not need it.

#: The shard of a DTensor. The public `to_local` determines the sharding again, which takes as long as a small layer.
dtensor_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")
#: An object with the mesh, placements, full shape and strides of a DTensor.
dtensor_spec: Callable[[Any], Any] = attrgetter("_spec")
#: A field of this object in some versions. If it is True, torch reads blocks of a dimension as an order of sharding.
BLOCKS_ARE_ORDER = "use_strided_shard_as_shard_order"


def set_dtensor_shard(tensor: Any, shard: Tensor, spec: Any = None) -> None:
    """Replace the shard of a DTensor. Torch has no public setter.

    Args:
        tensor: The DTensor.
        shard: Its new shard.
        spec: The new result of :func:`dtensor_spec`; ``None`` if it does not change.
    """
    tensor._local_tensor = shard
    if spec is not None:
        tensor._spec = spec


def dtensor_handlers() -> dict[Any, Callable[..., Any]] | None:
    """Return the functions that DTensors call instead of operators. No public function unregisters one."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    return handlers if isinstance(handlers, dict) else None


def strided_shard() -> Any:
    """Return the class of placements that shard each block of a dimension. No public placement does this."""
    return _find("torch.distributed.tensor.placement_types", "_StridedShard")


def dtensor_costs() -> ModuleType | None:
    """Return the module whose `redistribute_cost` compares placements of operands. Torch has no public replacement."""
    try:
        module = import_module("torch.distributed.tensor._ops.utils")
    except ImportError:
        return None
    return module if hasattr(module, "redistribute_cost") else None


def clear_dtensor_cache() -> None:
    """Clear torch's cache of the placements of results, which refer to meshes, if this version of torch can do this."""
    clear = _find("torch.distributed.tensor.debug", "_clear_sharding_prop_cache")
    if clear is not None:
        clear()


# -- process groups ----------------------------------------------------------------------------------------------------

#: Aborts all NCCL groups together. The public `ProcessGroup.abort` aborts one group, and may wait for other groups.
abort_all_groups: Callable[[], None] | None = _find("torch.distributed.distributed_c10d", "_abort_process_group")
#: Returns torch's name for the next group of these ranks, a hash that contains a number. Members of a group that only
#: they create must agree on this number, which no public function returns.
name_of_ranks: Callable[[list[int]], str] | None = _find("torch.distributed.distributed_c10d", "_hash_ranks_to_str")
#: Returns the flight recorder's list of collectives, as JSON. Public functions only write it to files.
dump_flight_recorder: Callable[..., str] | None = _find("torch._C._distributed_c10d", "_dump_fr_trace_json")
#: Returns a group by the name that the flight recorder uses. No public function returns it.
group_of_name: Callable[[str], Any] | None = _find("torch._C._distributed_c10d", "_resolve_process_group")


def group_tables() -> Any:
    """Return the object with all process groups of this process, or ``None``. No public function lists them."""
    return _find("torch.distributed.distributed_c10d", "_world")


def forget_mesh_groups(mesh: Any) -> None:
    """Delete the references of a `DeviceMesh` to its groups, which keep the groups alive. No public method does."""
    getattr(mesh, "_pg_registry", {}).clear()


def set_options_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in options of NCCL's groups; `new_group` requires it to equal its argument `timeout`."""
    options._timeout = timeout


# -- pickled names -----------------------------------------------------------------------------------------------------

#: Functions and classes whose names `torch.save` and `torch.distributed.checkpoint` write into files, by module.
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
#: Prefix of the names of functions that create a tensor from a storage.
REBUILD = "_rebuild_"
#: Creates a tensor of a subclass, or with attributes, by another function and its arguments.
REBUILD_WITH_CLASS = ("torch._tensor", "_rebuild_from_type_v2")
#: Creates a parameter with attributes.
REBUILD_WITH_STATE = ("torch._utils", "_rebuild_parameter_with_state")
