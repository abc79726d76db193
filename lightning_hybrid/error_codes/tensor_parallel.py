"""Errors of tensor parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH501": Entry(
        "The module has no submodule that the pattern matches.",
        "Use a name of the message; `*` matches anything between two dots.",
    ),
    "LH502": Entry(
        "The plan names an unknown style.",
        "Use a name of [the styles](../concepts/tensor-parallel.md#write-a-plan).",
    ),
    "LH503": Entry(
        "The number of heads or features is not a multiple of the size.",
        "Use a `tensor_parallel_size` that divides it, or the style `replicate`.",
    ),
    "LH504": Entry(
        "Two patterns match the same layer.",
        "Remove one.",
    ),
    "LH505": Entry(
        "The style is for another kind of layer.",
        "Use the style that the message names, or `replicate`.",
    ),
    "LH506": Entry(
        "The plan gives a layer a style, and its parameter a layout.",
        "Remove one of them.",
    ),
    "LH507": Entry(
        "The module has no parameter or buffer of this name.",
        "Use a name of the message.",
    ),
    "LH508": Entry(
        "`configure_model` has sharded the parameter already.",
        "Remove the entry of the plan.",
    ),
    "LH509": Entry(
        "The style is for 1D mode only.",
        "See [2D, 2.5D and 3D modes](../concepts/advanced-tensor-parallel.md#styles).",
    ),
    "LH510": Entry(
        "Tied parameters are sharded in different ways.",
        "Give both layers the style `vocab`, or `replicate`.",
    ),
    "LH511": Entry(
        "A module with a layout is next to sharded layers that change its tensors.",
        "Give these layers `replicate`, or remove the layout.",
    ),
    "LH512": Entry(
        "The style is for a module inside a `sequence_region`.",
        "Add `sequence_region` to a module around it.",
    ),
    "LH513": Entry(
        "In these modes the style is for a module inside a `sequence_region`.",
        "Give attention its own module, and `sequence_region` to the module around it.",
    ),
    "LH514": Entry(
        "A block with `narrow_input` modifies its input first.",
        "Remove `narrow_input`, and read widths from the layers' outputs: [one `forward`](../concepts/tensor-"
        " parallel.md#norm-attention-and-mlp-in-one-forward).",
    ),
    "LH515": Entry(
        "A mask for each head has another shape than `mask_per_head` expects.",
        "Pass a mask of shape (batch, heads, L, S).",
    ),
    "LH516": Entry(
        "The length of the sequence is not a multiple of the size.",
        "Pad the sequence, or set `sequence_parallel=False`.",
    ),
    "LH517": Entry(
        "In 2D, 2.5D or 3D mode, a stage ends inside a pair, or one layer of the pair is called alone.",
        "Set a `partition` that keeps the pair together, or `replicate` for both layers.",
    ),
    "LH518": Entry(
        "In these modes an input needs a dimension of samples.",
        "Use `x.unsqueeze(0)`, or the style `replicate`.",
    ),
    "LH519": Entry(
        "In these modes attention cannot return its weights.",
        "Set `need_weights=False`.",
    ),
    "LH520": Entry(
        "The text is not a layout of a tensor.",
        'Write `"S(0)"` or `"B"` for each axis: [custom placements](../concepts/advanced-tensor-parallel.md#custom-'
        " placements).",
    ),
    "LH521": Entry(
        "A parameter is placed over replicas.",
        "Use `B` for these axes; `zero_stage=3` shards over replicas.",
    ),
    "LH522": Entry(
        "A partial sum (`P`) is asked for a tensor that exists.",
        "Use `S(dim)` or `B`.",
    ),
    "LH523": Entry(
        "The layout splits a dimension that the tensor does not have, or not into equal parts.",
        "Use another dimension, or `B`.",
    ),
    "LH524": Entry(
        "The layout is over other axes than the tensor.",
        "Name the same axes, or use `tensor.full_tensor()`.",
    ),
    "LH525": Entry(
        "The operator does not support DTensors.",
        "Use `x.full_tensor()`, and `strategy.distribute` for the result: [custom placements](../concepts/advanced-"
        " tensor-parallel.md#custom-placements).",
    ),
    "LH526": Entry(
        "An operator got DTensors and plain tensors.",
        'Use `strategy.distribute(x, "B")`, or `full_tensor()` of the other.',
    ),
    "LH530": Entry(
        "A token is outside the vocabulary.",
        "Check the data; one process fails too.",
    ),
    "LH531": Entry(
        "A label is outside the classes.",
        "Check the data; one process fails too.",
    ),
    "LH532": Entry(
        "Logits and labels have shapes that do not match.",
        "Check the shapes; one process fails too.",
    ),
}
