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
        "Name an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`.",
    ),
    "LH304": Entry(
        "`body` names both a module and a part of it.",
        "Name only one of them.",
    ),
    "LH305": Entry(
        "A hook adds, removes or replaces layers.",
        "Change the layers in `__init__` or `configure_model`.",
    ),
    "LH306": Entry(
        "The module uses manual optimization, but the strategy runs the backward passes.",
        "Use automatic optimization, or a layout without a pipeline, with one microbatch and without"
        " `microbatch_weight`.",
    ),
    "LH307": Entry(
        "The module overrides `backward`, but the strategy runs the backward passes and would never call it.",
        "Remove `backward`, or use a layout that the message names.",
    ),
    "LH308": Entry(
        "The step fetches batches itself, so they cannot be split into microbatches.",
        "Define `training_step(batch, batch_idx)`.",
    ),
    "LH309": Entry(
        "Only one of two hooks that belong together is defined.",
        "Define both, or neither.",
    ),
    "LH310": Entry(
        "`ModelPruning` needs the full model, but each stage has only a part of it.",
        "Prune before or after training.",
    ),
    "LH314": Entry(
        "Each rank created its shard of a parameter as a plain tensor.",
        "Use `DTensor.from_local(part, mesh, [Shard(0)])`. See [tensor"
        " parallelism](../concepts/tensor-parallel.md#rules-for-your-code).",
    ),
    "LH315": Entry(
        "A layer on the meta device has no method that initializes the parameter.",
        "Define `reset_parameters`, or set `initial_weights`. See [checkpoints](../guides/checkpoints.md).",
    ),
    "LH316": Entry(
        'A plain tensor or a metric was created under `torch.device("meta")`.',
        'Create it under `torch.device("cpu")`.',
    ),
    "LH317": Entry(
        "The module's own `reset_parameters` also sets parameters of its layers.",
        "Give each layer its own `reset_parameters`.",
    ),
    "LH318": Entry(
        "The same module object was trained under another layout.",
        "Call `trainer.strategy.gather_module()` after the earlier run.",
    ),
    "LH319": Entry(
        "The body was replaced after it had been split.",
        "Create it in `__init__` or `configure_model`.",
    ),
    "LH320": Entry(
        "Only some layers have a `pipeline_stage`.",
        "Set `pipeline_stage` for all layers or for none.",
    ),
    "LH321": Entry(
        "`partition` and `pipeline_stage` both assign layers to stages.",
        "Remove one of them.",
    ),
    "LH322": Entry(
        "A module with a `pipeline_stage` is part of a larger layer.",
        "Set `pipeline_stage` for the layers, or set `body=[...]`.",
    ),
    "LH323": Entry(
        "A layer and its copy have different values of `pipeline_stage`.",
        "Give both the same value.",
    ),
    "LH325": Entry(
        "Torch sharded a layer that a step must run without other ranks.",
        "Use a style of `tensor_parallel_plan`, or one `nn.Sequential`.",
    ),
    "LH326": Entry(
        "A tensor-parallel style is on a module that contains pipelined layers.",
        "Apply the style to these layers.",
    ),
    "LH327": Entry(
        "Layers of an `nn.Sequential` pass sequence shards to each other.",
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
