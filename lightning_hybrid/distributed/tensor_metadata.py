"""Functions that read only the metadata of a tensor, such as its shape, and no values.

Modes and tensor subclasses of this package look up each call of a function here: for a lazy, fake or sharded tensor, a
function in :data:`METADATA` is called directly, without fetching or computing values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.torch_internals import version_counter, view_base


def getters(*names: str) -> frozenset[Callable[..., Any]]:
    """Return the getters of tensor attributes, such as `Tensor.shape.__get__`, which function modes receive.

    Attributes that this version of torch does not have are omitted.

    Args:
        names: The names of the attributes.
    """
    found: list[Any] = [getattr(Tensor, name, None) for name in names]
    return frozenset(each.__get__ for each in found if hasattr(each, "__get__") and not callable(each))


#: Functions that read only metadata. Modes do not trace them: they are frequent, and work for fake tensors too.
METADATA: frozenset[Callable[..., Any]] = getters(
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "names", "itemsize"),
    *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested"),
    *("nbytes", "is_xla", "is_mkldnn", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "is_sparse_csr"),
) | frozenset(
    {
        *(version_counter, view_base),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.element_size, Tensor.is_signed),
        *(Tensor.get_device, Tensor.storage_offset, Tensor.__hash__, Tensor.is_inference),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled),
    }
)
