"""Errors of splitting the module."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH301": Entry(
        "No list of layers contains a large part of the module's parameters, so the strategy cannot detect"
        " which layers to split into stages.",
        "Set `body` to a list of names that the message suggests. See [pipeline](../concepts/pipeline.md).",
    ),
    "LH302": Entry(
        "`body` contains a name that does not belong to any submodule.",
        "Use the dotted name of a submodule, such as one that the message suggests.",
    ),
    "LH303": Entry(
        "`body` names a module that is not a list of layers.",
        "Set `body` to the name of an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`.",
    ),
    "LH304": Entry(
        "`body` names both a module and a submodule of this module.",
        "Remove one of the two names from `body`.",
    ),
    "LH305": Entry(
        "A hook added, removed or replaced layers after the module had been split into stages.",
        "Change the layers in `__init__` or `configure_model`, which run before the module is split.",
    ),
    "LH306": Entry(
        "The module uses manual optimization, so its `training_step` runs the backward passes. With a"
        " pipeline, several microbatches or `microbatch_weight`, the strategy must run these passes itself.",
        "Use automatic optimization. Alternatively, set `pipeline_parallel_size=1` and `num_microbatches=1`,"
        " and remove `microbatch_weight`.",
    ),
    "LH307": Entry(
        "The module overrides `backward`. With pipeline, tensor or context parallelism, several microbatches or"
        " `microbatch_weight`, the strategy runs the backward passes itself and never calls this method.",
        "Remove the `backward` method, or change the settings that the message names.",
    ),
    "LH308": Entry(
        "A step has the argument `dataloader_iter`, so it fetches batches itself. The strategy cannot split"
        " these batches into microbatches.",
        "Define the step with the arguments `batch` and `batch_idx`, as in `training_step(batch, batch_idx)`.",
    ),
    "LH309": Entry(
        "The module defines only one of the methods `split_body_input` and `join_body_output`.",
        "Define both methods, or neither of them.",
    ),
    "LH310": Entry(
        "`ModelPruning` needs all parameters of the model, but each pipeline stage has only some of them.",
        "Prune the model in a separate run with `pipeline_parallel_size=1`, before or after this training.",
    ),
    "LH314": Entry(
        "A parameter that `configure_model` created as a plain tensor differs between ranks, for example"
        " because each rank created only its own shard.",
        "If each rank creates only its own shard, make it a DTensor with `DTensor.from_local(part,"
        ' self.device_mesh["tensor_parallel"], [Shard(dim)])`. Otherwise, create the full parameter from the same'
        " random numbers on every rank. See [tensor"
        " parallelism](../concepts/tensor-parallel.md#rules-for-your-code).",
    ),
    "LH315": Entry(
        "A parameter or a buffer was created on the meta device, but its layer has no method that initializes"
        " this tensor.",
        "Define `reset_parameters` in the layer, or load the values of the tensor with `initial_weights`. See"
        " [checkpoints](../guides/checkpoints.md).",
    ),
    "LH316": Entry(
        "A metric, or a tensor that is neither a parameter nor a buffer, was created under"
        ' `torch.device("meta")`. The strategy cannot initialize such objects.',
        'Create the tensor or the metric under `torch.device("cpu")`.',
    ),
    "LH317": Entry(
        "The `reset_parameters` method of a module that contains the pipelined layers changes parameters of its"
        " submodules. Not every rank has all of these submodules.",
        "In this method, change only the parameters that belong to the module itself. To initialize the"
        " parameters of a layer, define `reset_parameters` in this layer.",
    ),
    "LH318": Entry(
        "An earlier run sharded the module for a different layout, and the module is still sharded.",
        "Call `trainer.strategy.gather_module()` on every rank after the earlier run.",
    ),
    "LH319": Entry(
        "The body, which is the list of pipelined layers, was replaced or changed after it had been split into stages.",
        "Create the body in `__init__` or `configure_model`.",
    ),
    "LH320": Entry(
        "Some layers of the body have a `pipeline_stage`, but others have none.",
        "Set `pipeline_stage` for all layers of the body or for none of them.",
    ),
    "LH321": Entry(
        "`partition` and `pipeline_stage` both assign layers to stages, but only one of them may be set.",
        "Remove `partition`, or remove `pipeline_stage` from the layers.",
    ),
    "LH322": Entry(
        "A submodule of a layer has a `pipeline_stage` that differs from the stage of the layer.",
        "Set `pipeline_stage` only on whole layers. Alternatively, list the submodules in `body=[...]`, so that each of"
        " them counts as a layer.",
    ),
    "LH323": Entry(
        "A layer and its frozen copy must be on the same stage, but they have different values of `pipeline_stage`.",
        "Set the same `pipeline_stage` for the layer and its copy.",
    ),
    "LH325": Entry(
        "Your code calls the layers of the body one by one. In this case, no layer can be sharded in"
        " `configure_model` or by a torch style, such as `ColwiseParallel`.",
        "Shard layers only with style names in `tensor_parallel_plan`, or put all layers into one `nn.Sequential`.",
    ),
    "LH326": Entry(
        "`tensor_parallel_plan` assigns a style to a module that contains pipelined layers.",
        "Assign the style to each of these layers instead.",
    ),
    "LH327": Entry(
        "With `sequence_parallel`, neighboring layers in an `nn.Sequential` pass sequence shards to each"
        " other. This does not work if your code calls these layers one by one.",
        "Put the layers into an `nn.ModuleList`. Alternatively, call the whole `nn.Sequential`, and set `body` to"
        " its name, not to a list.",
    ),
    "LH328": Entry(
        "The module cannot be gathered, because a layer was sharded in `configure_model` or by a torch style, such as"
        " `ColwiseParallel`.",
        "Save a checkpoint, and load it into a new module. Alternatively, shard the layer with a style name in"
        " `tensor_parallel_plan`.",
    ),
    "LH329": Entry(
        "`gather_module` was called during the run. The run cannot continue with the full model.",
        "Call `gather_module` after the run.",
    ),
    "LH330": Entry(
        "`gather_module` was called after the process groups had been destroyed.",
        "Call `gather_module` before `destroy_process_group`.",
    ),
}
