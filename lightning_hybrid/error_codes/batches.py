"""Errors of batches, losses and logs."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH701": Entry(
        "With `broadcast_batches=False`, the ranks of a model group loaded different samples.",
        'Seed the loader only with `trainer.distributed_sampler_kwargs["rank"]`, or set `broadcast_batches=True`.',
    ),
    "LH702": Entry(
        "Some ranks iterate a loader or compute a metric, but other ranks of the same model group do not.",
        "Iterate the loader or compute the metric on all ranks, or on none.",
    ),
    "LH703": Entry(
        "A rank reads a large tensor of a batch that it did not read in earlier steps, and the loading rank has"
        " already dropped or changed the tensor.",
        'On this rank, keep a copy of the tensor (`batch["x"].clone()`) in the first step with such a batch, or'
        " set `broadcast_batches=False`.",
    ),
    "LH704": Entry(
        "The loss was detached, was created from plain numbers, or depends on no parameter that requires a gradient.",
        "Return the loss tensor that the model computed.",
    ),
    "LH705": Entry(
        "`training_step` returned None but contains no `return None`, so the earlier stages could not know that"
        " this can happen.",
        "Write `return None` in `training_step` itself, not in a function that it calls, or set `dynamic_shapes=True`.",
    ),
    "LH706": Entry(
        'Gradients are not finite. This is an error only with `faults.on_nonfinite="raise"`, and otherwise a warning.',
        "Set `Trainer(detect_anomaly=True)` to find the layer in which this begins.",
    ),
    "LH707": Entry(
        "The loss is not finite although the layers produced no NaNs, so the cause is the code after the layers or"
        " the labels.",
        "Check the code between the last layer and the loss, and check the labels.",
    ),
    "LH708": Entry(
        "`Trainer(detect_anomaly=True)` found a layer whose forward or backward pass produces NaNs.",
        "Check the layer or the code that the message names.",
    ),
    "LH710": Entry(
        "The batch has no labels under the key, attribute or index that you passed to `count_tokens`.",
        "Pass the key, attribute or index under which the batch contains the labels.",
    ),
    "LH711": Entry(
        "The value under a key of the batch does not have the expected type or shape.",
        "Pass the keys of tensors with the type and shape that the message asks for. See [how a step"
        " runs](../concepts/step.md).",
    ),
    "LH712": Entry(
        "In a batch of graphs, the nodes are not sorted by graph.",
        "Sort the nodes by graph in `collate_fn`.",
    ),
    "LH713": Entry(
        "A tensor in the batch has no batch dimension, so it cannot be split.",
        "Register the tensor as a buffer of the module, or define `split_batch` in the module.",
    ),
    "LH714": Entry(
        "The offsets in the batch do not start with 0, are not in ascending order, or their number differs between"
        " keys.",
        "Correct the offsets in `collate_fn`.",
    ),
    "LH715": Entry(
        "The number of targets in the batch differs from the sum of the lengths in the batch.",
        "Correct the targets or the lengths in `collate_fn`.",
    ),
    "LH716": Entry(
        "`split_samples()` got a batch that is not a list of samples of one type.",
        "Return a list of samples of one type from `collate_fn`, or define `split_batch` in the module.",
    ),
    "LH717": Entry(
        "`split_batch` returned an empty list.",
        "Return a list of at least one microbatch from `split_batch`.",
    ),
    "LH718": Entry(
        '`training_step` returned something other than a tensor or a dictionary with `"loss"`.',
        'Return the loss, or a dictionary that contains the loss under the key `"loss"`.',
    ),
    "LH719": Entry(
        "The loss is not a single real number.",
        "Return a scalar loss, such as the mean or the sum of the losses.",
    ),
    "LH720": Entry(
        "Your sampler shards the data over all ranks instead of over the replicas.",
        "Remove the sampler, or create it with `DistributedSampler(..., **trainer.distributed_sampler_kwargs)`.",
    ),
    "LH721": Entry(
        "The batch sampler has no attribute `sampler`, which the strategy needs to shard the samples over the"
        " replicas.",
        "Add this attribute to the batch sampler, or set `Trainer(use_distributed_sampler=False)` and shard the"
        " samples yourself.",
    ),
    "LH722": Entry(
        "Some replicas have no samples to predict, but with ZeRO, the other replicas need the parameter shards of"
        " these replicas in each step.",
        "Predict at least one sample per replica, or use `zero_stage=0`.",
    ),
    "LH723": Entry(
        "Ranks log values under different keys.",
        "Log the same keys on every rank, or log with `rank_zero_only=True`.",
    ),
    "LH724": Entry(
        "A step uses the result of a call of `self.logger`, but rank 0 makes this call only after the step.",
        "Read the value in a hook, or read it from an attribute of the logger, such as `self.logger.log_dir`.",
    ),
    "LH725": Entry(
        "An argument of `self.print` or of a call of `self.logger` in a step cannot be pickled, so it cannot be"
        " sent to rank 0.",
        "Pass tensors, arrays, numbers, text or figures.",
    ),
    "LH726": Entry(
        "A sparse tensor or an object that cannot be pickled would have to be sent to another rank.",
        "Convert sparse tensors with `.to_dense()`, and replace objects that cannot be pickled with tensors or"
        " plain values.",
    ),
}
