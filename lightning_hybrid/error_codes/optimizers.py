"""Errors of optimizers, ZeRO and precision."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH801": Entry(
        "Each of several optimizers needs its own backward.",
        "Use parameter groups of one optimizer.",
    ),
    "LH802": Entry(
        "A rank has a shard of each parameter, and Adafactor needs rows and columns.",
        "Use AdamW, or no tensor parallelism and no ZeRO.",
    ),
    "LH803": Entry(
        "Each stage has a part of the model, and LBFGS needs all of it.",
        "Use AdamW or SGD.",
    ),
    "LH804": Entry(
        "Sharding makes new parameters, and the optimizer has the old ones.",
        "Use `self.parameters()`, not a list made in `__init__`.",
    ),
    "LH805": Entry(
        "A precision with loss scaling uses gradients that are not finite.",
        'Set `faults.on_nonfinite="ignore"`, or use `bf16-mixed`.',
    ),
    "LH806": Entry(
        "The precision plugin replaces layers, or scales the loss itself.",
        "Use a precision that the message lists.",
    ),
    "LH807": Entry(
        "A fused optimizer with `16-mixed`.",
        "Use `fused=False` or `bf16-mixed`.",
    ),
    "LH808": Entry(
        "Master weights exist for half precision only.",
        'Set `precision="bf16-true"`, or remove `master_weights`.',
    ),
    "LH809": Entry(
        "The scaler is not a scaler of torch.",
        "Use `torch.amp.GradScaler`.",
    ),
    "LH810": Entry(
        "A gradient has another dtype or device than its parameter.",
        "Cast the gradient in a hook of the parameter.",
    ),
    "LH811": Entry(
        "Re-entrant checkpointing makes a second gradient in a step.",
        "Pass `use_reentrant=False`.",
    ),
}
