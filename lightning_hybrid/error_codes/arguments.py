"""Errors of arguments."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH101": Entry(
        "An argument has the wrong type.",
        "Pass one of the types that the message lists; see [all arguments](strategy.md).",
    ),
    "LH102": Entry(
        "The value of an argument is not one of its allowed values.",
        "Use a value that the message lists.",
    ),
    "LH103": Entry(
        "A number is outside the range that the argument allows.",
        "Use a number in the range that the message states.",
    ),
    "LH104": Entry(
        "A timeout is zero or negative, or shorter than the interval between heartbeats.",
        "Set the timeout to a number of seconds, such as `600`, or to `timedelta(minutes=10)`; in YAML, write"
        ' `600` or `"0:10:00"`.',
    ),
    "LH105": Entry(
        "The number of processes is not a multiple of the model group size (tensor x pipeline x context).",
        "Set `Trainer(devices=..., num_nodes=...)` to a multiple of the model group size, or use smaller parallel"
        " sizes; see [choose a layout](../start/choose-a-layout.md).",
    ),
    "LH106": Entry(
        "The product of the parallel sizes differs from the number of processes.",
        'Set `data_parallel_size="auto"`, or start the number of processes that the message states.',
    ),
    "LH107": Entry(
        "No combination of the sizes listed in `pipeline_parallel_size` and `tensor_parallel_size` divides the"
        " number of processes.",
        "Add a size, such as 1, to one of the lists, or start a different number of processes.",
    ),
    "LH108": Entry(
        "The tensor-parallel ranks do not form a square (2D), several squares (2.5D) or a cube (3D).",
        "Set `tensor_parallel_size` to a number that the message allows; see [other"
        " modes](../concepts/advanced-tensor-parallel.md).",
    ),
    "LH109": Entry(
        "`tensor_parallel_depth` applies only to 2.5D mode.",
        'Remove `tensor_parallel_depth`, or set `tensor_parallel_mode="2.5d"`.',
    ),
    "LH110": Entry(
        "`sequence_parallel` shards activations, but the 2D, 2.5D and 3D modes already shard them.",
        'Remove `sequence_parallel`, or set `tensor_parallel_mode="1d"`.',
    ),
    "LH111": Entry(
        "`global_batch_size` is not a multiple of the loader's batch size times the number of replicas.",
        "Set `global_batch_size` to a multiple of the number in the message; see [elastic"
        " training](../guides/elastic.md).",
    ),
    "LH112": Entry(
        "The strategy has no argument with the name that you passed.",
        "Use the name that the message suggests; see [all arguments](strategy.md).",
    ),
    "LH113": Entry(
        "`launch.rank_order` does not name each axis exactly once.",
        'Set `launch.rank_order` to `"pp-dp-tp"` or to another order of these axes.',
    ),
    "LH114": Entry(
        "The 1F1B schedule supports only one chunk on each rank.",
        'Set `schedule="interleaved_1f1b"` or `num_chunks=1`.',
    ),
    "LH115": Entry(
        "`tuning.extra_in_flight` does not have one number for each link between pipeline ranks.",
        "Set one number for all links, or a list of `pipeline_parallel_size - 1` numbers.",
    ),
    "LH116": Entry(
        "`tuning.extra_in_flight` adds microbatches in flight, but the GPipe schedule already has all of them in"
        " flight.",
        'Remove `tuning.extra_in_flight`, or set `schedule="1f1b"`.',
    ),
    "LH117": Entry(
        "`partition` or `pipeline_stage` does not assign every layer to a stage, or leaves a stage without layers.",
        "List the number of layers of each stage, at least 1, so that the numbers add up to all layers. Or list"
        " the stage of each layer, in ascending order from 0.",
    ),
    "LH118": Entry(
        "The pipeline has more stages than layers.",
        "Use a smaller `pipeline_parallel_size` or `num_chunks`.",
    ),
    "LH119": Entry(
        "The length of the `recompute` list differs from the number of stages.",
        "List one number for each stage, or set one number for all stages.",
    ),
    "LH120": Entry(
        "The `recompute` pattern matches no submodule.",
        "Use a name from the message. In a pattern, `*` matches anything between two dots.",
    ),
    "LH121": Entry(
        "The `recompute` pattern matches the module that contains all layers, not the layers.",
        "Append `.*` to the pattern to match the layers.",
    ),
    "LH122": Entry(
        '`tuning.memory_limit` applies only to the layout search, but no argument is set to `"auto"`.',
        'Set `layout="auto"` or `recompute="auto"`, or remove `tuning.memory_limit`.',
    ),
    "LH123": Entry(
        "An argument lists a value for each stage, but the layout search chooses the number of stages.",
        "Set `pipeline_parallel_size` and `num_chunks` yourself, or remove the list.",
    ),
    "LH124": Entry(
        "The layout search does not support this value of `recompute` or `num_chunks`.",
        "Use a value that the message names, or set the layout yourself.",
    ),
    "LH125": Entry(
        "A quantity, such as `tuning.memory_limit`, is not written as a number with a unit.",
        'Write a number and a unit, such as `"80GiB"`.',
    ),
    "LH126": Entry(
        'The strategy name has an invalid part, as in `"hybrid_pp_2"`.',
        'Write each axis with its size, as in `"hybrid_pp2"`.',
    ),
    "LH127": Entry(
        '`layout="auto"` could not choose a layout: the training step does not run without tensor values, or the'
        " search took too long.",
        "Set the parallel sizes yourself; see [choose a layout](../start/choose-a-layout.md).",
    ),
    "LH128": Entry(
        "No layout fits `tuning.memory_limit`, or the module cannot be split.",
        "Start more processes, allow more memory, or use a smaller batch.",
    ),
    "LH129": Entry(
        "No combination of the allowed sizes fits the number of processes.",
        "Allow other sizes, or start a different number of processes.",
    ),
    "LH130": Entry(
        "The training step reads the values of tensors, but planning commands run the step without values.",
        "Create the values that the step reads in the module's `__init__`.",
    ),
    "LH131": Entry(
        "The training loader is empty or limited to 0 batches, but the command needs one batch.",
        "Run the command on a machine that has the data, or remove the limit.",
    ),
    "LH132": Entry(
        "The module reads the values of its parameters, but is too large to be initialized for planning.",
        "Do not read parameter values in `__init__`, `configure_model` and `training_step`, or plan a smaller module.",
    ),
    "LH133": Entry(
        "With manual optimization, the order of forward and backward passes in a step is unknown, so no layout can"
        " be suggested.",
        "Use automatic optimization, or set the parallel sizes yourself.",
    ),
    "LH134": Entry(
        "The number of samples cannot be determined from the type of the batch.",
        "Return tensors or lists from the loader.",
    ),
    "LH135": Entry(
        "The installed version of torch lacks a function that the strategy or the command needs.",
        "Install a tested version; see [compatibility](compatibility.md).",
    ),
    "LH137": Entry(
        "`global_batch_size` sets the number of accumulated batches, but another argument sets this number too.",
        "Remove one of the two arguments.",
    ),
    "LH138": Entry(
        "`global_batch_size` needs the batch size, but the training loader has no `batch_size`.",
        "Use a single `DataLoader(..., batch_size=...)`, or replace `global_batch_size` with"
        " `Trainer(accumulate_grad_batches=...)`.",
    ),
    "LH139": Entry(
        "`HybridTimeline` records a schedule, but this layout has none.",
        "Remove the callback, or set `num_microbatches`.",
    ),
    "LH140": Entry(
        "`device_mesh` is read before the processes are connected.",
        "Read `device_mesh` in `setup` or in a later hook.",
    ),
}
