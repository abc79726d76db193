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
        "This stage reads a large tensor of an earlier batch that was not sent to it.",
        'Keep a copy (`batch["x"].clone()`) in the step, or set `broadcast_batches=False`.',
    ),
    "LH704": Entry(
        "The loss was detached, or created from plain numbers.",
        "Return the loss tensor that the model computed.",
    ),
    "LH705": Entry(
        "`training_step` returns None without a `return None` in its code; stages must know this before the step.",
        "Write `return None` in `training_step` itself, or set `dynamic_shapes=True`.",
    ),
    "LH706": Entry(
        'Gradients are not finite, and `faults.on_nonfinite="raise"` is set. Otherwise, this is a warning.',
        "Set `Trainer(detect_anomaly=True)` to find the layer.",
    ),
    "LH707": Entry(
        "The loss is not finite because of the code after the layers, or because of the labels.",
        "Check this code and the labels.",
    ),
    "LH708": Entry(
        "`Trainer(detect_anomaly=True)` found a layer whose forward or backward produces NaNs.",
        "Check the layer or the code that the message names.",
    ),
    "LH710": Entry(
        "The batch has no labels under this key.",
        "Pass the key, attribute or index of the labels.",
    ),
    "LH711": Entry(
        "The value at this key does not have the expected type or shape.",
        "Pass the right keys of the batch: [how a step runs](../concepts/step.md).",
    ),
    "LH712": Entry(
        "The nodes of a graph are not contiguous.",
        "Sort the nodes by graph in `collate_fn`.",
    ),
    "LH713": Entry(
        "A tensor does not have a batch dimension.",
        "Make it a buffer of the module, or define `split_batch`.",
    ),
    "LH714": Entry(
        "Offsets do not start with 0, are not in ascending order, or differ in number.",
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
        "Your sampler shards the data over all ranks instead of over the replicas.",
        "Remove it, or use `DistributedSampler(..., **trainer.distributed_sampler_kwargs)`.",
    ),
    "LH721": Entry(
        "The batch sampler has no attribute `sampler`.",
        "Add it, or set `Trainer(use_distributed_sampler=False)` and shard the samples yourself.",
    ),
    "LH722": Entry(
        "Some replicas have no samples to predict.",
        "Predict at least one sample per replica, or use `zero_stage=0`.",
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
        "A sparse tensor or an object that cannot be pickled must be sent to another rank.",
        "Convert sparse tensors with `.to_dense()`, and use tensors or plain values for the rest.",
    ),
}
