"""Errors of batches, losses and logs."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH701": Entry(
        "With `broadcast_batches=False`, ranks loaded different samples.",
        'Seed the loader by `trainer.distributed_sampler_kwargs["rank"]`, or set `broadcast_batches=True`.',
    ),
    "LH702": Entry(
        "Some ranks iterate a loader or compute a metric that others do not.",
        "Do it on all ranks or on none.",
    ),
    "LH703": Entry(
        "A large tensor of an earlier batch, which was not sent to this stage, is read.",
        'Keep a copy (`batch["x"].clone()`) in the step, or set `broadcast_batches=False`.',
    ),
    "LH704": Entry(
        "The loss was detached, or made from numbers.",
        "Return the tensor that the layers computed.",
    ),
    "LH705": Entry(
        "A function that the step calls returns None; stages must know this before the step.",
        "Write `return None` in `training_step` itself, or set `dynamic_shapes=True`.",
    ),
    "LH706": Entry(
        'Gradients overflow, with `faults.on_nonfinite="raise"`. Otherwise it is a warning.',
        "`Trainer(detect_anomaly=True)` names the layer.",
    ),
    "LH707": Entry(
        "The code after the layers, or the labels, make a loss that is not finite.",
        "Check that code, and the labels.",
    ),
    "LH708": Entry(
        "A layer, or its backward, makes NaNs. Found by `Trainer(detect_anomaly=True)`.",
        "Check the layer or the code that the message names.",
    ),
    "LH710": Entry(
        "The labels have another key.",
        "Pass their key, attribute or index.",
    ),
    "LH711": Entry(
        "The key leads to something other than integers of this shape.",
        "Pass the keys of the batch: [how a step runs](../concepts/step.md).",
    ),
    "LH712": Entry(
        "Nodes of a graph are not contiguous.",
        "Sort the nodes by graph in `collate_fn`.",
    ),
    "LH713": Entry(
        "A tensor does not have a dimension of samples.",
        "Make it a buffer of the module, or define `split_batch`.",
    ),
    "LH714": Entry(
        "Offsets do not begin with 0, descend, or have different lengths.",
        "Correct the offsets in `collate_fn`.",
    ),
    "LH715": Entry(
        "The number of targets is not the sum of the lengths.",
        "Correct the lengths in `collate_fn`.",
    ),
    "LH716": Entry(
        "The batch is not a list of samples of one type.",
        "Return such a list from `collate_fn`, or define `split_batch`.",
    ),
    "LH717": Entry(
        "`split_batch` returned an empty list.",
        "Return at least one microbatch.",
    ),
    "LH718": Entry(
        '`training_step` returned something other than a tensor or a dictionary with `"loss"`.',
        "Return the loss.",
    ),
    "LH719": Entry(
        "The loss is not a real number.",
        "Return its mean or sum.",
    ),
    "LH720": Entry(
        "Your sampler counts all ranks.",
        "Remove it, or use `DistributedSampler(..., **trainer.distributed_sampler_kwargs)`.",
    ),
    "LH721": Entry(
        "A batch sampler has no attribute `sampler`.",
        "Add it, or set `Trainer(use_distributed_sampler=False)` and shard the samples yourself.",
    ),
    "LH722": Entry(
        "Some replicas have no samples to predict.",
        "Predict more samples, or use `zero_stage=0`.",
    ),
    "LH723": Entry(
        "Ranks log different keys.",
        "Log the same keys on every rank, or set `rank_zero_only=True`.",
    ),
    "LH724": Entry(
        "A step reads a value from `self.logger`.",
        "Read it in a hook, or from the logger.",
    ),
    "LH725": Entry(
        "An argument of a logger call cannot be pickled.",
        "Pass tensors, arrays, numbers, text or figures.",
    ),
    "LH726": Entry(
        "A sparse tensor, or an object that cannot be pickled, has to be sent to another rank.",
        "Use `.to_dense()`, and tensors or plain values.",
    ),
}
