"""Errors of optimizers, ZeRO and precision."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH801": Entry(
        "The module has several optimizers, each of which needs its own backward pass, but with this layout, the"
        " strategy runs only one backward pass.",
        "Use one optimizer with several parameter groups.",
    ),
    "LH802": Entry(
        "Adafactor needs the rows and columns of full parameters, but with tensor parallelism or ZeRO, each rank"
        " holds only shards.",
        "Use AdamW, or turn off tensor parallelism and ZeRO.",
    ),
    "LH803": Entry(
        "LBFGS needs the gradient of the full model, but each pipeline stage holds only a part of it.",
        "Use AdamW or SGD.",
    ),
    "LH804": Entry(
        "Sharding a layer replaced its parameters, but the optimizer still has the old ones.",
        "In `configure_optimizers`, pass `self.parameters()` to the optimizer, not a list created in `__init__`.",
    ),
    "LH805": Entry(
        '`faults.on_nonfinite="raise"` cannot be combined with loss scaling, which expects some gradients that are'
        " not finite.",
        'Set `faults.on_nonfinite="ignore"`, or use `precision="bf16-mixed"`.',
    ),
    "LH806": Entry(
        "The strategy does not support the precision plugin, for example because the plugin replaces layers or"
        " scales the loss itself.",
        "Set `Trainer(precision=...)` to a value that the message lists.",
    ),
    "LH807": Entry(
        "A fused optimizer unscales gradients in its own step, so with loss scaling, such as `16-mixed`, ranks"
        " cannot agree on an overflow.",
        'Create the optimizer with `fused=False`, or use `precision="bf16-mixed"`.',
    ),
    "LH808": Entry(
        "`master_weights` keeps float32 copies of half-precision parameters, but the parameters are not in half"
        " precision.",
        'Set `precision="bf16-true"`, or remove `master_weights`.',
    ),
    "LH809": Entry(
        "The gradient scaler in the precision plugin is not one of torch's own scalers.",
        "Pass a `torch.amp.GradScaler` to the precision plugin.",
    ),
    "LH810": Entry(
        "A gradient and its parameter have different dtypes or devices.",
        "Cast the gradient in a hook on the parameter.",
    ),
    "LH811": Entry(
        "Re-entrant checkpointing computes a second gradient in one step for a parameter that is used more than once.",
        "Pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`.",
    ),
}
