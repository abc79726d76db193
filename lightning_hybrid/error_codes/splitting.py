"""Errors of splitting the module."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH301": Entry(
        "Layers are not in a list, or in many small lists.",
        "Set `body=[...]` to candidates of the message: [pipeline](../concepts/pipeline.md).",
    ),
    "LH302": Entry(
        "The module has no submodule of the name in `body`.",
        "Use a name that the message lists.",
    ),
    "LH303": Entry(
        "The module that `body` names has no list of layers.",
        "Name an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`.",
    ),
    "LH304": Entry(
        "`body` names a module and a part of it.",
        "Name one of them.",
    ),
    "LH305": Entry(
        "A hook adds, removes or replaces layers.",
        "Do it in `__init__` or `configure_model`.",
    ),
    "LH306": Entry(
        "The schedule runs the backward passes of a pipeline.",
        "Use automatic optimization, or a layout without a pipeline, with one microbatch and without"
        " `microbatch_weight`.",
    ),
    "LH307": Entry(
        "The strategy runs the backward passes, and would not call the method.",
        "Remove `backward`, or use a layout that the message names.",
    ),
    "LH308": Entry(
        "A step that fetches batches cannot get microbatches.",
        "Write `training_step(batch, batch_idx)`.",
    ),
    "LH309": Entry(
        "One of two hooks that belong together is missing.",
        "Define both, or neither.",
    ),
    "LH310": Entry(
        "`ModelPruning` needs the whole model, and a stage has a part.",
        "Prune before or after the training.",
    ),
    "LH314": Entry(
        "Each rank made its shard of a parameter as a plain tensor.",
        "Use `DTensor.from_local(part, mesh, [Shard(0)])`: [tensor parallelism](../concepts/tensor-"
        " parallel.md#rules-for-your-code).",
    ),
    "LH315": Entry(
        "A layer on the meta device has no method that initializes the parameter.",
        "Write `reset_parameters`, or set `initial_weights`: [checkpoints](../guides/checkpoints.md).",
    ),
    "LH316": Entry(
        'A plain tensor or a metric was made under `torch.device("meta")`.',
        'Make it under `torch.device("cpu")`.',
    ),
    "LH317": Entry(
        "`reset_parameters` of the whole module sets its layers.",
        "Give each layer its own `reset_parameters`.",
    ),
    "LH318": Entry(
        "The same object was trained under another layout.",
        "Call `trainer.strategy.gather_module()` after the earlier run.",
    ),
    "LH319": Entry(
        "The body was replaced after it had been split.",
        "Create it in `__init__` or `configure_model`.",
    ),
    "LH320": Entry(
        "Only some layers have a `pipeline_stage`.",
        "Mark all layers or none.",
    ),
    "LH321": Entry(
        "`partition` and `pipeline_stage` both place layers.",
        "Remove one of them.",
    ),
    "LH322": Entry(
        "A marked module is part of a larger layer.",
        "Mark the layers, or set `body=[...]`.",
    ),
    "LH323": Entry(
        "A layer and its copy have different `pipeline_stage`.",
        "Give both the same.",
    ),
    "LH325": Entry(
        "Torch sharded a layer that a step must run without other ranks.",
        "Use a style of `tensor_parallel_plan`, or one `nn.Sequential`.",
    ),
    "LH326": Entry(
        "A style is on a module that contains pipelined layers.",
        "Give the style to these layers.",
    ),
    "LH327": Entry(
        "Layers of an `nn.Sequential` pass shards of sequences to each other.",
        "Use an `nn.ModuleList`, or call the `nn.Sequential` as a whole.",
    ),
    "LH328": Entry(
        "Layers were sharded by torch styles or in `configure_model`.",
        "Save a checkpoint, and load it into a new module.",
    ),
    "LH329": Entry(
        "`gather_module` was called in a hook other than `teardown`.",
        "Call it after the run.",
    ),
    "LH330": Entry(
        "The process groups were destroyed before the module was gathered.",
        "Call `gather_module` before `destroy_process_group`.",
    ),
}
