"""Errors of tensor parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH501": Entry(
        "A pattern in `tensor_parallel_plan` matches no submodule.",
        "Use one of the submodule names that the message suggests. In a pattern, `*` matches any text without a dot.",
    ),
    "LH502": Entry(
        "`tensor_parallel_plan` contains an unknown style.",
        "Use one of the [supported styles](../concepts/tensor-parallel.md#write-a-plan).",
    ),
    "LH503": Entry(
        "The style `divide:ATTRIBUTE` names an attribute whose value, such as a number of heads, is not a multiple of"
        " `tensor_parallel_size`.",
        "Set `tensor_parallel_size` to a divisor of this value, or give the layer the style `replicate`.",
    ),
    "LH504": Entry(
        "`tensor_parallel_plan` gives a layer two styles that cannot be combined.",
        "Remove one of the two styles.",
    ),
    "LH505": Entry(
        "`tensor_parallel_plan` gives a layer a style that this layer does not support, for example because of the"
        " layer's class or number of heads.",
        "Give the layer another style, such as `replicate`.",
    ),
    "LH506": Entry(
        "The style of a layer already shards the layer's parameters, but `tensor_parallel_plan` also gives one of"
        " these parameters a layout, such as `S(0)`.",
        "Remove the style or the layout from the plan.",
    ),
    "LH507": Entry(
        "`tensor_parallel_plan` gives a layout, such as `S(0)`, to a parameter or buffer that the module does not"
        " have.",
        "Use one of the parameter or buffer names that the message lists.",
    ),
    "LH508": Entry(
        "`tensor_parallel_plan` gives a layout to a buffer that is already a DTensor, for example because"
        " `configure_model` created the buffer as a DTensor.",
        "Remove the layout of this buffer from the plan, or create the buffer as a plain tensor.",
    ),
    "LH509": Entry(
        "`tensor_parallel_plan` contains a style that the chosen `tensor_parallel_mode` does not support.",
        "Use a style that this mode supports. See [2D, 2.5D and 3D"
        " modes](../concepts/advanced-tensor-parallel.md#styles).",
    ),
    "LH510": Entry(
        "Two layers share a tied parameter, but `tensor_parallel_plan` shards this parameter differently in each"
        " layer.",
        "Give both layers the same style, either `vocab` or `replicate`.",
    ),
    "LH511": Entry(
        "`tensor_parallel_plan` gives a layout to a parameter or buffer, but the module of this tensor contains"
        " tensor-parallel layers, or is inside a module with the style `sequence_region`.",
        "Remove the layout. Alternatively, if the module contains tensor-parallel layers, give these layers the style"
        " `replicate`.",
    ),
    "LH512": Entry(
        "`tensor_parallel_plan` gives a module a style that works only inside another module with the style"
        " `sequence_region`. No enclosing module has the style `sequence_region`.",
        "Give the style `sequence_region` to an enclosing module.",
    ),
    "LH513": Entry(
        "In 2D, 2.5D and 3D modes, the style that the message names works only inside another module with the style"
        " `sequence_region`. No enclosing module has the style `sequence_region`.",
        "Give the style `sequence_region` to an enclosing module. If a module computes more than attention, first move"
        " the attention into a separate module.",
    ),
    "LH514": Entry(
        "A module with the style `narrow_input` changes its input before it passes the input to its sharded layers.",
        "Pass the input unchanged. Alternatively, remove `narrow_input` from the plan, and read tensor widths from the"
        " outputs of the sharded layers. See [one"
        " `forward`](../concepts/tensor-parallel.md#norm-attention-and-mlp-in-one-forward).",
    ),
    "LH515": Entry(
        "A mask or bias with separate values for each head does not have the shape that the style `mask_per_head`"
        " requires.",
        "Pass a tensor of shape (batch, heads, queries, keys) with values for all heads of the layer, not only for the"
        " heads on one rank.",
    ),
    "LH516": Entry(
        "The sequence length is not a multiple of `tensor_parallel_size`.",
        "Pad the sequence to a multiple of `tensor_parallel_size`, or set `sequence_parallel=False`.",
    ),
    "LH517": Entry(
        "In 2D, 2.5D and 3D modes, each row-wise layer needs a column-wise layer before it. Here, the two layers are"
        " on different stages, or the column-wise layer is not called.",
        "Set a `partition` that keeps both layers on one stage, or give both layers the style `replicate`.",
    ),
    "LH518": Entry(
        "In 2D, 2.5D and 3D modes, tensor-parallel layers shard the batch dimension, but a layer received an input"
        " without a batch dimension.",
        "Add a batch dimension to the input `x` with `x.unsqueeze(0)`, or give the layer the style `replicate`.",
    ),
    "LH519": Entry(
        "In 2D, 2.5D and 3D modes, attention inside a module with the style `sequence_region` cannot return attention"
        " weights.",
        "Call the attention with `need_weights=False`.",
    ),
    "LH520": Entry(
        "A layout in `tensor_parallel_plan` or `strategy.distribute` is invalid.",
        'For each mesh axis, use a placement such as `"S(0)"` or `"B"`. See [custom'
        " placements](../concepts/advanced-tensor-parallel.md#custom-placements).",
    ),
    "LH521": Entry(
        "A layout shards a parameter or buffer over an axis other than the tensor-parallel axis.",
        "Use `B` (replicated) for this axis, for example `data_parallel=B`. To shard parameters over replicas, set"
        " `zero_stage=3`.",
    ),
    "LH522": Entry(
        "A layout uses `P` (partial sum) for a parameter, a buffer or an existing DTensor. Such tensors cannot become"
        " partial sums.",
        "Use `S(dim)` or `B` instead of `P`.",
    ),
    "LH523": Entry(
        "A layout splits a dimension that the tensor does not have, or that cannot be split into equal parts.",
        "Split another dimension, or replicate the tensor with `B`.",
    ),
    "LH524": Entry(
        "The layout does not name the mesh axes over which the DTensor is distributed.",
        "In the layout, use the axes of the DTensor. Alternatively, first convert the DTensor to a plain tensor with"
        " `tensor.full_tensor()`.",
    ),
    "LH525": Entry(
        "The message names an operator that torch cannot apply to DTensors.",
        "Convert each DTensor `x` to a plain tensor with `x.full_tensor()`, apply the operator, and pass the result to"
        " `strategy.distribute`. See [custom placements](../concepts/advanced-tensor-parallel.md#custom-placements).",
    ),
    "LH526": Entry(
        "An operator received both DTensors and plain tensors, which torch cannot combine.",
        'Convert each plain tensor `x` to a replicated DTensor with `strategy.distribute(x, "B")`, or convert each'
        " DTensor `x` to a plain tensor with `x.full_tensor()`. See [custom"
        " placements](../concepts/advanced-tensor-parallel.md#custom-placements).",
    ),
    "LH530": Entry(
        "A token index in the data is negative or too large for the vocabulary of an embedding.",
        "Check the token indices. Training in one process also fails with these indices.",
    ),
    "LH531": Entry(
        "A label is not a valid class index, because it is negative or too large for the number of classes.",
        "Check the labels. Training in one process also fails with these labels.",
    ),
    "LH532": Entry(
        "The shapes of logits and labels do not match.",
        "Check both shapes. Training in one process also fails with these shapes.",
    ),
}
