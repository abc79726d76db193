"""Errors of batches, losses and logs."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH701": Entry(
        "With `broadcast_batches=False`, the ranks of one replica loaded different samples.",
        'Make the random seed of the loader depend only on `trainer.distributed_sampler_kwargs["rank"]`, not on the'
        " global rank. Alternatively, set `broadcast_batches=True`.",
    ),
    "LH702": Entry(
        "Some ranks of a replica iterate over a loader or compute a metric, but other ranks of the same replica do"
        " not.",
        "Iterate over the loader or compute the metric either on all ranks of the replica or on none of them.",
    ),
    "LH703": Entry(
        "A rank reads a large tensor of the batch, but did not read this tensor in earlier steps. The rank that loaded"
        " the batch therefore did not send the tensor, and has already dropped or changed it.",
        "In the first step whose batch has the same keys, shapes and dtypes as this batch, read the tensor on this"
        ' rank too. For example, copy the tensor with `batch["x"].clone()`. Alternatively, set'
        " `broadcast_batches=False`.",
    ),
    "LH704": Entry(
        "The loss was detached, was created from plain numbers, or depends on no parameter that requires a gradient.",
        "Return the loss tensor exactly as the model computed it.",
    ),
    "LH705": Entry(
        "`training_step` returned None, although its code does not contain `return None`. The stages before the last"
        " one therefore did not know that a step can end without a loss.",
        "Write `return None` in `training_step` itself, not in a function that it calls. Alternatively, set"
        " `dynamic_shapes=True`.",
    ),
    "LH706": Entry(
        'Some gradients are infinite or NaN, and `faults.on_nonfinite="raise"` is set.',
        "Set `Trainer(detect_anomaly=True)` to find the layer that first produces such values.",
    ),
    "LH707": Entry(
        "The loss is infinite or NaN, but the layers produced no NaNs.",
        "Check the labels and the code between the last layer and the loss.",
    ),
    "LH708": Entry(
        "`Trainer(detect_anomaly=True)` found NaN values in the forward pass, or NaN or infinite values in the"
        " backward pass.",
        "Check the layer or the code that the message names.",
    ),
    "LH710": Entry(
        "The batch has no labels under the key, attribute or index that you passed to `count_tokens`.",
        "Pass the key, attribute or index under which the batch contains the labels.",
    ),
    "LH711": Entry(
        "A value that `count_tokens` or a function such as `split_rows` reads from the batch does not have the"
        " expected type or shape.",
        "Pass a key under which the batch contains a tensor of the type and shape that the message states. See [how a"
        " step runs](../concepts/step.md).",
    ),
    "LH712": Entry(
        "In a batch of graphs, the nodes are not sorted by graph.",
        "Sort the nodes by graph in `collate_fn`.",
    ),
    "LH713": Entry(
        "The length of a tensor in the batch does not match the number of samples, so the tensor cannot be split into"
        " microbatches.",
        "If the tensor is the same for all samples, register it as a buffer of the module. Otherwise, define"
        " `split_batch` in the module.",
    ),
    "LH714": Entry(
        "The offsets that `split_rows` reads from the batch do not start at 0, are not in ascending order, or differ"
        " in number between two keys.",
        "Correct the offsets in `collate_fn`.",
    ),
    "LH715": Entry(
        "The number of targets in the batch differs from the sum of the target lengths in the batch.",
        "Correct the targets or their lengths in `collate_fn`.",
    ),
    "LH716": Entry(
        "`split_samples()` received a batch that is not a list or tuple of samples of one type.",
        "Return a list of samples of one type from `collate_fn`, or define `split_batch` in the module.",
    ),
    "LH717": Entry(
        "`split_batch` returned an empty list.",
        "Return at least one microbatch from `split_batch`.",
    ),
    "LH718": Entry(
        '`training_step` returned something other than a tensor or a dictionary with the key `"loss"`.',
        'Return the loss, or a dictionary that contains the loss under the key `"loss"`.',
    ),
    "LH719": Entry(
        "The loss is not a single real number.",
        "Return a scalar loss, such as the mean or the sum over the samples.",
    ),
    "LH720": Entry(
        "The sampler of the loader shards the data over all ranks instead of over the replicas.",
        "Remove the sampler, or create it with `DistributedSampler(..., **trainer.distributed_sampler_kwargs)`.",
    ),
    "LH721": Entry(
        "The batch sampler has no attribute `sampler`, which the strategy needs to shard the samples over the"
        " replicas.",
        "Add a `sampler` attribute to the batch sampler, or set `Trainer(use_distributed_sampler=False)` and shard the"
        " samples yourself.",
    ),
    "LH722": Entry(
        "Some replicas have no samples to predict. With ZeRO, the other replicas need parameter shards from these"
        " replicas in each step.",
        "Predict at least one sample per replica, or use `zero_stage=0`.",
    ),
    "LH723": Entry(
        "Different ranks log values under different keys.",
        "Log values under the same keys on every rank, or set `rank_zero_only=True` when you log.",
    ),
    "LH724": Entry(
        "A step uses the return value of a method of `self.logger`, but rank 0 calls this method only after the step.",
        "Read the value in a hook, or read it from an attribute of the logger, such as `self.logger.log_dir`.",
    ),
    "LH725": Entry(
        "An argument that a step passes to `self.print` or to a method of `self.logger` cannot be pickled, so it"
        " cannot be sent to rank 0, which makes these calls.",
        "Pass only tensors, arrays, numbers, text or figures.",
    ),
    "LH726": Entry(
        "The strategy must send a value to another rank, but the value is a sparse tensor or cannot be pickled.",
        "Convert sparse tensors with `.to_dense()`, and replace objects that cannot be pickled with tensors or"
        " plain values.",
    ),
    "LH727": Entry(
        "With `expert_parallel_size`, `training_step` returned `None` for a microbatch. The other replicas wait for its"
        " backward pass, because replicas exchange the gradients of tokens.",
        "Return a loss for each microbatch, such as a loss multiplied by 0, or remove `expert_parallel_size`.",
    ),
}
