"""Errors of optimizers, ZeRO and precision."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH801": Entry(
        "The module has several optimizers, and each needs its own backward pass, but the strategy runs backward"
        " for one optimizer only.",
        "Use one optimizer with several parameter groups.",
    ),
    "LH802": Entry(
        "Adafactor needs the rows and columns of full parameters, but each rank holds only shards.",
        "Use AdamW, or turn off tensor parallelism and ZeRO.",
    ),
    "LH803": Entry(
        "LBFGS needs the gradient of the full model, but each stage holds only a part of it.",
        "Use AdamW or SGD.",
    ),
    "LH804": Entry(
        "Sharding replaced the parameters, but the optimizer still has the old ones.",
        "Pass `self.parameters()` to the optimizer, not a list created in `__init__`.",
    ),
    "LH805": Entry(
        '`faults.on_nonfinite="raise"` cannot be combined with loss scaling, which expects some gradients that are'
        " not finite.",
        'Set `faults.on_nonfinite="ignore"`, or use `precision="bf16-mixed"`.',
    ),
    "LH806": Entry(
        "The precision plugin replaces layers, or scales the loss itself.",
        "Use a precision that the message lists.",
    ),
    "LH807": Entry(
        "A fused optimizer unscales gradients in its own step, so ranks cannot agree on an overflow with `16-mixed`.",
        "Use `fused=False` or `bf16-mixed`.",
    ),
    "LH808": Entry(
        "`master_weights` needs half-precision weights.",
        'Set `precision="bf16-true"`, or remove `master_weights`.',
    ),
    "LH809": Entry(
        "The gradient scaler is not one of torch's scalers.",
        "Use `torch.amp.GradScaler`.",
    ),
    "LH810": Entry(
        "A gradient and its parameter have different dtypes or devices.",
        "Cast the gradient in a hook on the parameter.",
    ),
    "LH811": Entry(
        "Re-entrant checkpointing computes a second gradient of a parameter in one step.",
        "Pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`.",
    ),
}
