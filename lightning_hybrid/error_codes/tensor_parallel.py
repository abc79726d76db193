"""Errors of tensor parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH501": Entry(
        "No submodule of the module matches the pattern.",
        "Use a name from the message; `*` matches anything between two dots.",
    ),
    "LH502": Entry(
        "The plan contains an unknown style.",
        "Use one of [the styles](../concepts/tensor-parallel.md#write-a-plan).",
    ),
    "LH503": Entry(
        "The number of heads or features is not a multiple of `tensor_parallel_size`.",
        "Use a `tensor_parallel_size` that divides it, or the style `replicate`.",
    ),
    "LH504": Entry(
        "The plan combines two styles of a layer that exclude each other.",
        "Remove one of them.",
    ),
    "LH505": Entry(
        "The style is for another kind of layer.",
        "Use a style for this kind of layer, or `replicate`.",
    ),
    "LH506": Entry(
        "The plan gives a style to a layer and a layout to its parameter.",
        "Remove one of them.",
    ),
    "LH507": Entry(
        "The module has no parameter or buffer of this name.",
        "Use a name from the message.",
    ),
    "LH508": Entry(
        "The buffer is already a DTensor, for example from `configure_model`.",
        "Remove the entry from the plan.",
    ),
    "LH509": Entry(
        "The style works only in 1D mode.",
        "See [2D, 2.5D and 3D modes](../concepts/advanced-tensor-parallel.md#styles).",
    ),
    "LH510": Entry(
        "Tied parameters are sharded in different ways.",
        "Give both layers the style `vocab`, or `replicate`.",
    ),
    "LH511": Entry(
        "A module with a layout contains tensor-parallel layers, or is inside a `sequence_region`.",
        "Give these layers the style `replicate`, or remove the layout.",
    ),
    "LH512": Entry(
        "The style works only inside a module with the style `sequence_region`.",
        "Give a module around it the style `sequence_region`.",
    ),
    "LH513": Entry(
        "In 2D, 2.5D and 3D modes, the style works only inside another module with the style `sequence_region`.",
        "Move the attention into a separate module, and give the module around it the style `sequence_region`.",
    ),
    "LH514": Entry(
        "A block with the style `narrow_input` modifies its input first.",
        "Remove `narrow_input`, and read widths from the layers' outputs:"
        " [one `forward`](../concepts/tensor-parallel.md#norm-attention-and-mlp-in-one-forward).",
    ),
    "LH515": Entry(
        "A mask per head has a different shape than the style `mask_per_head` expects.",
        "Pass a mask of shape (batch, heads, L, S).",
    ),
    "LH516": Entry(
        "The sequence length is not a multiple of `tensor_parallel_size`.",
        "Pad the sequence, or set `sequence_parallel=False`.",
    ),
    "LH517": Entry(
        "In 2D, 2.5D or 3D mode, a stage ends between a column-wise and its row-wise layer, or only one of them is"
        " called.",
        "Set a `partition` that keeps the pair together, or give both layers the style `replicate`.",
    ),
    "LH518": Entry(
        "In 2D, 2.5D and 3D modes, an input needs a batch dimension.",
        "Use `x.unsqueeze(0)`, or the style `replicate`.",
    ),
    "LH519": Entry(
        "In 2D, 2.5D and 3D modes, attention cannot return its weights.",
        "Set `need_weights=False`.",
    ),
    "LH520": Entry(
        "The layout is invalid.",
        'Write `"S(0)"` or `"B"` for each axis:'
        " [custom placements](../concepts/advanced-tensor-parallel.md#custom-placements).",
    ),
    "LH521": Entry(
        "The layout shards a parameter or a buffer over replicas.",
        "Use `B` for the replicas; to shard parameters over replicas, set `zero_stage=3`.",
    ),
    "LH522": Entry(
        "The layout contains a partial sum (`P`), which an existing tensor cannot have.",
        "Use `S(dim)` or `B`.",
    ),
    "LH523": Entry(
        "The layout splits a dimension that the tensor does not have, or that cannot be split into equal parts.",
        "Use another dimension, or `B`.",
    ),
    "LH524": Entry(
        "The layout and the tensor have different axes.",
        "Use the same axes, or call `tensor.full_tensor()` first.",
    ),
    "LH525": Entry(
        "The operator does not support DTensors.",
        "Use `x.full_tensor()`, and `strategy.distribute` for the result:"
        " [custom placements](../concepts/advanced-tensor-parallel.md#custom-placements).",
    ),
    "LH526": Entry(
        "An operator got both DTensors and plain tensors.",
        'Use `strategy.distribute(x, "B")` for the plain tensor, or `full_tensor()` for the DTensor.',
    ),
    "LH530": Entry(
        "A token is outside the vocabulary.",
        "Check the data; training on one process fails too.",
    ),
    "LH531": Entry(
        "A label is outside the range of classes.",
        "Check the data; training on one process fails too.",
    ),
    "LH532": Entry(
        "The shapes of logits and labels do not match.",
        "Check the shapes; training on one process fails too.",
    ),
}
