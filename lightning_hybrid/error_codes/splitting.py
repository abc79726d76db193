"""Errors of splitting the module."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH301": Entry(
        "The layers are not in a list, or are spread over many small lists.",
        "Set `body=[...]` to candidates from the message. See [pipeline](../concepts/pipeline.md).",
    ),
    "LH302": Entry(
        "The module has no submodule with the name in `body`.",
        "Use the dotted name of a submodule, such as a candidate from the message.",
    ),
    "LH303": Entry(
        "`body` names a module that is not a list of layers.",
        "In `body`, name an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`.",
    ),
    "LH304": Entry(
        "`body` names both a module and a part of it.",
        "Name only one of the two.",
    ),
    "LH305": Entry(
        "A hook adds, removes or replaces layers after the module has been split.",
        "Change the layers in `__init__` or `configure_model`.",
    ),
    "LH306": Entry(
        "The module uses manual optimization, but the strategy runs the backward passes.",
        "Use automatic optimization, or a layout without a pipeline, with one microbatch and without"
        " `microbatch_weight`.",
    ),
    "LH307": Entry(
        "The module overrides `backward`, but the strategy runs the backward passes, so this method would never be"
        " called.",
        "Remove `backward`, or use a layout that the message names.",
    ),
    "LH308": Entry(
        "The step takes `dataloader_iter` and fetches batches itself, so they cannot be split into microbatches.",
        "Define `training_step(batch, batch_idx)`.",
    ),
    "LH309": Entry(
        "Only one of two hooks that belong together is defined.",
        "Define both hooks, or neither.",
    ),
    "LH310": Entry(
        "`ModelPruning` needs the full model, but each stage has only a part of it.",
        "Prune with `pipeline_parallel_size=1`, before or after this training.",
    ),
    "LH314": Entry(
        "Each rank created its shard of a parameter as a plain tensor.",
        "Create the parameter with `DTensor.from_local(part, mesh, [Shard(0)])`. See [tensor"
        " parallelism](../concepts/tensor-parallel.md#rules-for-your-code).",
    ),
    "LH315": Entry(
        "A parameter was created on the meta device, but its layer has no method that initializes it.",
        "Define `reset_parameters` in the layer, or set `initial_weights`. See"
        " [checkpoints](../guides/checkpoints.md).",
    ),
    "LH316": Entry(
        'A plain tensor or a metric was created under `torch.device("meta")`.',
        'Create the tensor or the metric under `torch.device("cpu")`.',
    ),
    "LH317": Entry(
        "The module's own `reset_parameters` also sets parameters of its layers.",
        "Set only the module's own parameters in this method, and give each layer its own `reset_parameters`.",
    ),
    "LH318": Entry(
        "The same module object was trained before, under a different layout.",
        "Call `trainer.strategy.gather_module()` after the earlier run.",
    ),
    "LH319": Entry(
        "The body was replaced after it had been split into stages.",
        "Create the body in `__init__` or `configure_model`.",
    ),
    "LH320": Entry(
        "Only some layers have a `pipeline_stage`.",
        "Set `pipeline_stage` for all layers or for none.",
    ),
    "LH321": Entry(
        "`partition` and `pipeline_stage` both assign layers to stages.",
        "Remove one of the two.",
    ),
    "LH322": Entry(
        "A part of a layer has a different `pipeline_stage` than the layer.",
        "Set `pipeline_stage` for whole layers, or list the modules to split in `body=[...]`.",
    ),
    "LH323": Entry(
        "A layer and its copy have different values of `pipeline_stage`.",
        "Give the layer and its copy the same value.",
    ),
    "LH325": Entry(
        "Your code calls the layers one by one, but torch sharded a layer, so a rank cannot run it alone.",
        "Use a style name in `tensor_parallel_plan` instead, or put the layers into one `nn.Sequential`.",
    ),
    "LH326": Entry(
        "`tensor_parallel_plan` gives a style to a module that contains pipelined layers.",
        "Give the style to these layers instead.",
    ),
    "LH327": Entry(
        "With `sequence_parallel`, neighbors in an `nn.Sequential` pass sequence shards to each other, but your"
        " code calls them one by one.",
        "Use an `nn.ModuleList`, or call the whole `nn.Sequential` and name only it in `body`.",
    ),
    "LH328": Entry(
        "Layers cannot be gathered, because they were sharded by torch styles or in `configure_model`.",
        "Save a checkpoint, and load it into a new module.",
    ),
    "LH329": Entry(
        "`gather_module` was called in a hook other than `teardown`.",
        "Call `gather_module` after the run.",
    ),
    "LH330": Entry(
        "The process groups were destroyed before the module was gathered.",
        "Call `gather_module` before `destroy_process_group`.",
    ),
}
