"""Errors of splitting the module."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH301": Entry(
        "No list of layers contains a large part of the module's parameters, so the strategy cannot detect which"
        " layers to split into stages.",
        "Set `body=[...]` to names that the message suggests. See [pipeline](../concepts/pipeline.md).",
    ),
    "LH302": Entry(
        "`body` contains a name that no submodule of the module has.",
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
        "Change the layers in `__init__` or `configure_model`. These methods run before the module is split.",
    ),
    "LH306": Entry(
        "The module uses manual optimization, but with a pipeline, several microbatches or `microbatch_weight`, the"
        " strategy runs the backward passes itself.",
        "Use automatic optimization. Alternatively, set `pipeline_parallel_size=1` and `num_microbatches=1`, and"
        " remove `microbatch_weight`.",
    ),
    "LH307": Entry(
        "The module overrides `backward`, but the strategy runs the backward passes itself and never calls this"
        " method. This applies to pipeline, tensor and context parallelism, several microbatches and"
        " `microbatch_weight`.",
        "Remove the `backward` method, or change the settings as the message says.",
    ),
    "LH308": Entry(
        "A step has the argument `dataloader_iter` and fetches batches itself, so the strategy cannot split them into"
        " microbatches.",
        "Define the step with the arguments `batch` and `batch_idx`, as in `training_step(batch, batch_idx)`.",
    ),
    "LH309": Entry(
        "The module defines only one of the methods `split_body_input` and `join_body_output`.",
        "Define both methods, or neither of them.",
    ),
    "LH310": Entry(
        "`ModelPruning` needs the full model, but each pipeline stage has only a part of it.",
        "Prune the model in a separate run with `pipeline_parallel_size=1`, before or after this training.",
    ),
    "LH314": Entry(
        "A parameter that `configure_model` created as a plain tensor differs between ranks, for example because each"
        " rank created only its own shard.",
        'If each rank creates a shard, use `DTensor.from_local(part, self.device_mesh["tensor_parallel"],'
        " [Shard(dim)])`. Otherwise, create the full parameter from the same random numbers on every rank. See [tensor"
        " parallelism](../concepts/tensor-parallel.md#rules-for-your-code).",
    ),
    "LH315": Entry(
        "A parameter was created on the meta device, but its layer has no method that initializes it.",
        "Define `reset_parameters` in the layer, or load the parameter's values with `initial_weights`. See"
        " [checkpoints](../guides/checkpoints.md).",
    ),
    "LH316": Entry(
        'A metric, or a tensor that is neither a parameter nor a buffer, was created under `torch.device("meta")`, so'
        " it has no values.",
        'Create the tensor or the metric under `torch.device("cpu")`.',
    ),
    "LH317": Entry(
        "The `reset_parameters` method of a module that contains the pipelined layers also sets parameters of its"
        " submodules, but not every rank has all of these submodules.",
        "In this method, set only the parameters that belong to the module itself, and define `reset_parameters` in"
        " each layer.",
    ),
    "LH318": Entry(
        "The module was already trained with a different layout, and is still sharded for that layout.",
        "Call `trainer.strategy.gather_module()` on every rank after the earlier run.",
    ),
    "LH319": Entry(
        "After the split into stages, the body was replaced, or its layers were changed. The body is the list of"
        " pipelined layers.",
        "Create the body in `__init__` or `configure_model`.",
    ),
    "LH320": Entry(
        "Some layers of the body have a `pipeline_stage`, but others have none.",
        "Set `pipeline_stage` for all layers of the body or for none of them.",
    ),
    "LH321": Entry(
        "`partition` and `pipeline_stage` are both set, but only one of them can assign layers to stages.",
        "Remove `partition`, or remove `pipeline_stage` from the layers.",
    ),
    "LH322": Entry(
        "A submodule of a layer has a `pipeline_stage` that differs from the stage of the layer.",
        "Set `pipeline_stage` only on whole layers. Alternatively, list the submodules in `body=[...]`, so that each of"
        " them counts as a layer.",
    ),
    "LH323": Entry(
        "A layer and its copy have different values of `pipeline_stage`, but must be on the same stage.",
        "Set the same `pipeline_stage` for the layer and its copy.",
    ),
    "LH325": Entry(
        "Your code calls the layers of the body one by one. This does not work if a layer was sharded in"
        " `configure_model` or by a torch style, such as `ColwiseParallel`.",
        "Shard the layer with a style name in `tensor_parallel_plan`, or put all layers into one `nn.Sequential`.",
    ),
    "LH326": Entry(
        "`tensor_parallel_plan` assigns a style to a module that contains layers of the pipeline.",
        "Assign the style to the layers of the pipeline instead.",
    ),
    "LH327": Entry(
        "With `sequence_parallel`, neighboring layers in an `nn.Sequential` pass sequence shards to each other, but"
        " your code calls these layers one by one.",
        "Put the layers into an `nn.ModuleList`. Alternatively, call the whole `nn.Sequential`, and set `body` to the"
        " name of this `nn.Sequential` only.",
    ),
    "LH328": Entry(
        "The module cannot be gathered, because a layer was sharded in `configure_model` or by a torch style, such as"
        " `ColwiseParallel`.",
        "Save a checkpoint, and load it into a new module. Alternatively, shard the layer with a style name in"
        " `tensor_parallel_plan`.",
    ),
    "LH329": Entry(
        "`gather_module` was called during the run, but the run cannot continue with the full model.",
        "Call `gather_module` after the run.",
    ),
    "LH330": Entry(
        "`gather_module` was called after the process groups had been destroyed.",
        "Call `gather_module` before `destroy_process_group`.",
    ),
}
