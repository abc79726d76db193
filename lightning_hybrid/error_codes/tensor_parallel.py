"""Errors of tensor parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH501": Entry(
        "A pattern of `tensor_parallel_plan` matches no submodule.",
        "Use a name from the message. In a pattern, `*` matches anything between two dots.",
    ),
    "LH502": Entry(
        "`tensor_parallel_plan` contains an unknown style.",
        "Use one of [the styles](../concepts/tensor-parallel.md#write-a-plan).",
    ),
    "LH503": Entry(
        "The number of heads or features is not a multiple of `tensor_parallel_size`.",
        "Use a `tensor_parallel_size` that divides this number, or the style `replicate`.",
    ),
    "LH504": Entry(
        "`tensor_parallel_plan` gives a layer two styles that exclude each other.",
        "Remove one of the two styles.",
    ),
    "LH505": Entry(
        "`tensor_parallel_plan` gives a layer a style that does not suit this kind of layer.",
        "Use a style for this kind of layer, or the style `replicate`.",
    ),
    "LH506": Entry(
        "`tensor_parallel_plan` gives a style to a layer and a layout to a parameter of the same layer.",
        "Remove the style or the layout.",
    ),
    "LH507": Entry(
        "`tensor_parallel_plan` gives a layout to a parameter or buffer that the module does not have.",
        "Use a name from the message.",
    ),
    "LH508": Entry(
        "`tensor_parallel_plan` gives a layout to a buffer that is already a DTensor, for example because of"
        " `configure_model`.",
        "Remove the entry from the plan.",
    ),
    "LH509": Entry(
        "`tensor_parallel_plan` contains a style that works only in 1D mode.",
        "Use a style of the chosen mode; see [2D, 2.5D and 3D modes](../concepts/advanced-tensor-parallel.md#styles).",
    ),
    "LH510": Entry(
        "`tensor_parallel_plan` shards tied parameters in different ways.",
        "Give both layers the same style, `vocab` or `replicate`.",
    ),
    "LH511": Entry(
        "`tensor_parallel_plan` gives a layout to a parameter or buffer of a module that contains tensor-parallel"
        " layers or is inside a `sequence_region`.",
        "Give the tensor-parallel layers the style `replicate`, or remove the layout.",
    ),
    "LH512": Entry(
        "`tensor_parallel_plan` gives a module a style that works only inside a module with the style"
        " `sequence_region`.",
        "Give a module around it the style `sequence_region`.",
    ),
    "LH513": Entry(
        "In 2D, 2.5D and 3D modes, a style of attention works only inside another module with the style"
        " `sequence_region`.",
        "Move the attention into a separate module, and give the module around it the style `sequence_region`.",
    ),
    "LH514": Entry(
        "A block with the style `narrow_input` modifies its input before it passes the input to its layers.",
        "Remove `narrow_input`, and read widths from the outputs of the layers: [one"
        " `forward`](../concepts/tensor-parallel.md#norm-attention-and-mlp-in-one-forward).",
    ),
    "LH515": Entry(
        "A mask for each head has a different shape than the style `mask_per_head` expects.",
        "Pass a mask of shape (batch, heads, L, S).",
    ),
    "LH516": Entry(
        "The sequence length is not a multiple of `tensor_parallel_size`.",
        "Pad the sequence, or set `sequence_parallel=False`.",
    ),
    "LH517": Entry(
        "In 2D, 2.5D or 3D mode, a stage ends between a column-wise layer and its row-wise layer, or only one of"
        " the two is called.",
        "Set a `partition` that keeps the pair together, or give both layers the style `replicate`.",
    ),
    "LH518": Entry(
        "In 2D, 2.5D and 3D modes, an input must have a batch dimension, but an input has none.",
        "Add the dimension with `x.unsqueeze(0)`, or give the layer the style `replicate`.",
    ),
    "LH519": Entry(
        "In 2D, 2.5D and 3D modes, attention cannot return its weights.",
        "Set `need_weights=False`.",
    ),
    "LH520": Entry(
        "A layout in `tensor_parallel_plan` or `strategy.distribute` is invalid.",
        'Write `"S(0)"` or `"B"` for each axis: [custom'
        " placements](../concepts/advanced-tensor-parallel.md#custom-placements).",
    ),
    "LH521": Entry(
        "A layout shards a parameter or a buffer over replicas.",
        "Use `B` for the replicas; to shard parameters over replicas, set `zero_stage=3`.",
    ),
    "LH522": Entry(
        "A layout contains a partial sum (`P`), which an existing tensor cannot have.",
        "Use `S(dim)` or `B`.",
    ),
    "LH523": Entry(
        "A layout splits a dimension that the tensor does not have, or that cannot be split into equal parts.",
        "Use another dimension, or `B`.",
    ),
    "LH524": Entry(
        "A layout and its tensor have different axes.",
        "Use a layout for the axes of the tensor, or call `tensor.full_tensor()` first.",
    ),
    "LH525": Entry(
        "Torch cannot compute this operator on DTensors.",
        "Compute with `x.full_tensor()`, and pass the result to `strategy.distribute`: [custom"
        " placements](../concepts/advanced-tensor-parallel.md#custom-placements).",
    ),
    "LH526": Entry(
        "An operator got both DTensors and plain tensors.",
        'Convert the plain tensor with `strategy.distribute(x, "B")`, or the DTensor with `full_tensor()`.',
    ),
    "LH530": Entry(
        "A token is outside the vocabulary of an embedding.",
        "Check the data; training in one process fails too.",
    ),
    "LH531": Entry(
        "A label is outside the range of classes.",
        "Check the labels; training in one process fails too.",
    ),
    "LH532": Entry(
        "The shapes of logits and labels do not match.",
        "Check the shapes; training in one process fails too.",
    ),
}
