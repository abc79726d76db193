"""Errors of batches, losses and logs."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH701": Entry(
        "With `broadcast_batches=False`, the ranks of a model group loaded different samples.",
        'Seed the loader with `trainer.distributed_sampler_kwargs["rank"]`, or set `broadcast_batches=True`.',
    ),
    "LH702": Entry(
        "Some ranks iterate a loader or compute a metric that others do not.",
        "Iterate the loader or compute the metric on all ranks, or on none.",
    ),
    "LH703": Entry(
        "A rank reads a large tensor of a batch that it has not read before, and the loading rank no longer has"
        " the tensor.",
        'Keep a copy (`batch["x"].clone()`) in the first step with such a batch, or set `broadcast_batches=False`.',
    ),
    "LH704": Entry(
        "The loss was detached, or created from plain numbers.",
        "Return the loss tensor that the model computed.",
    ),
    "LH705": Entry(
        "`training_step` returned None, but contains no `return None`. Stages must know before the step that it"
        " can return None.",
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
        "The batch has no labels under the key that you passed to `count_tokens`.",
        "Pass the key, attribute or index of the labels.",
    ),
    "LH711": Entry(
        "The value at a key of the batch does not have the expected type or shape.",
        "Pass the keys of the right tensors: [how a step runs](../concepts/step.md).",
    ),
    "LH712": Entry(
        "In a batch of graphs, the nodes of a graph are not contiguous.",
        "Sort the nodes by graph in `collate_fn`.",
    ),
    "LH713": Entry(
        "A tensor in the batch has no batch dimension, so it cannot be split.",
        "Register the tensor as a buffer of the module, or define `split_batch`.",
    ),
    "LH714": Entry(
        "The offsets in the batch do not start with 0, are not in ascending order, or differ in number between keys.",
        "Correct the offsets in `collate_fn`.",
    ),
    "LH715": Entry(
        "The number of targets in the batch is not the sum of the lengths.",
        "Correct the lengths in `collate_fn`.",
    ),
    "LH716": Entry(
        "`split_samples()` got a batch that is not a list of samples of one type.",
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
        "Return the mean or the sum of the losses.",
    ),
    "LH720": Entry(
        "Your sampler shards the data over all ranks instead of over the replicas.",
        "Remove the sampler, or use `DistributedSampler(..., **trainer.distributed_sampler_kwargs)`.",
    ),
    "LH721": Entry(
        "The batch sampler has no attribute `sampler`.",
        "Add this attribute, or set `Trainer(use_distributed_sampler=False)` and shard the samples yourself.",
    ),
    "LH722": Entry(
        "Some replicas have no samples to predict, but with ZeRO the other replicas need their shards.",
        "Predict at least one sample per replica, or use `zero_stage=0`.",
    ),
    "LH723": Entry(
        "Ranks log different keys.",
        "Log the same keys on every rank, or set `rank_zero_only=True`.",
    ),
    "LH724": Entry(
        "A step reads a value from a call of `self.logger`, but the call is made only after the step.",
        "Read the value in a hook, or from the logger itself, as in `self.logger.log_dir`.",
    ),
    "LH725": Entry(
        "An argument of a logger call cannot be pickled.",
        "Pass tensors, arrays, numbers, text or figures.",
    ),
    "LH726": Entry(
        "A sparse tensor, or an object that cannot be pickled, would have to be sent to another rank.",
        "Convert sparse tensors with `.to_dense()`, and use tensors or plain values for the rest.",
    ),
}
