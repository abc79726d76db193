"""Errors of optimizers, ZeRO and precision."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH801": Entry(
        "The module has several optimizers. If you use a pipeline, several microbatches or `microbatch_weight`, the"
        " strategy itself runs the backward pass, and supports only one optimizer.",
        "Use one optimizer with several parameter groups.",
    ),
    "LH802": Entry(
        "Adafactor needs the rows and columns of full parameters, but with tensor parallelism or ZeRO, each rank has"
        " only shards of the parameters.",
        "Use AdamW, or turn off tensor parallelism and ZeRO.",
    ),
    "LH803": Entry(
        "LBFGS needs the gradient of the full model, and computes the loss several times per step. LBFGS therefore"
        " does not work with a pipeline, several microbatches, `microbatch_weight`, tensor parallelism or context"
        " parallelism.",
        "Use AdamW or SGD. Alternatively, use only data parallelism, with one microbatch and without"
        " `microbatch_weight`.",
    ),
    "LH804": Entry(
        "The strategy replaced the parameters of a layer when it sharded the layer, but the optimizer still has the"
        " old parameters.",
        "In `configure_optimizers`, pass `self.parameters()` to the optimizer, not a list that was created in"
        " `__init__`.",
    ),
    "LH805": Entry(
        "With loss scaling, the gradient scaler skips steps with infinite or NaN gradients."
        ' `faults.on_nonfinite="raise"` would raise an error in these steps.',
        'Set `faults.on_nonfinite="ignore"`, or use `precision="bf16-mixed"`.',
    ),
    "LH806": Entry(
        "The strategy does not support the precision plugin, for example because the plugin replaces layers or"
        " belongs to another strategy.",
        "Set `Trainer(precision=...)` to a value that the message lists.",
    ),
    "LH807": Entry(
        'With a precision that scales the loss, such as `"16-mixed"`, a fused optimizer unscales the gradients inside'
        " its own step. The ranks then cannot agree on whether a gradient overflowed.",
        'Create the optimizer with `fused=False`, or use `precision="bf16-mixed"`.',
    ),
    "LH808": Entry(
        "`master_weights` keeps float32 copies of half-precision parameters, but the parameters are not in half"
        " precision.",
        'Set `precision="bf16-true"`, or remove `master_weights`.',
    ),
    "LH809": Entry(
        "The precision plugin uses a custom gradient scaler instead of torch's own scaler.",
        "Pass a `torch.amp.GradScaler` to the precision plugin.",
    ),
    "LH810": Entry(
        "A gradient and its parameter have different dtypes or devices.",
        "In a hook on the parameter, convert the gradient to the dtype and device of the parameter.",
    ),
    "LH811": Entry(
        "A parameter that is used more than once received a second gradient after the replicas had begun to average the"
        " first gradient. This happens with re-entrant activation checkpointing.",
        "Pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`.",
    ),
}
