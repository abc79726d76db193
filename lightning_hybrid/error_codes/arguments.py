"""Errors of arguments."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH101": Entry(
        "An argument has the wrong type.",
        "Pass one of the types that the message lists; see [all arguments](strategy.md).",
    ),
    "LH102": Entry(
        "An argument has a value that is not one of its choices.",
        "Use a value that the message lists.",
    ),
    "LH103": Entry(
        "A number is outside the range of the argument.",
        "Use a number in the range that the message states.",
    ),
    "LH104": Entry(
        "A timeout is zero or negative, or shorter than the interval between heartbeats.",
        'Set a number of seconds, such as `600`, or `timedelta(minutes=10)`; in YAML, `600` or `"0:10:00"`.',
    ),
    "LH105": Entry(
        "The number of processes is not a multiple of the model group size: tensor x pipeline x context.",
        "Set `Trainer(devices=..., num_nodes=...)` to a multiple of that size, or use smaller sizes; see [choose a"
        " layout](../start/choose-a-layout.md).",
    ),
    "LH106": Entry(
        "The product of the parallel sizes differs from the number of processes.",
        'Set `data_parallel_size="auto"`, or start the number of processes that the message states.',
    ),
    "LH107": Entry(
        "None of the listed sizes divides the number of processes.",
        "Add a size, such as 1, to the list, or start a different number of processes.",
    ),
    "LH108": Entry(
        "The tensor-parallel ranks do not form a square (2D), several squares (2.5D) or a cube (3D).",
        "Use a size that the message names; see [other modes](../concepts/advanced-tensor-parallel.md).",
    ),
    "LH109": Entry(
        "`tensor_parallel_depth` applies only to 2.5D mode.",
        'Remove it, or set `tensor_parallel_mode="2.5d"`.',
    ),
    "LH110": Entry(
        "`sequence_parallel` shards activations, but the modes 2D, 2.5D and 3D already shard them.",
        'Remove `sequence_parallel`, or set `tensor_parallel_mode="1d"`.',
    ),
    "LH111": Entry(
        "The loader's batch size times the number of replicas does not divide `global_batch_size`.",
        "Set a multiple that the message names; see [elastic training](../guides/elastic.md).",
    ),
    "LH112": Entry(
        "The strategy has no argument of this name.",
        "Use the name that the message suggests; see [all arguments](strategy.md).",
    ),
    "LH113": Entry(
        "`launch.rank_order` does not name each axis once.",
        'Use `"pp-dp-tp"` or another order of these axes.',
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
        "The GPipe schedule already has all microbatches in flight.",
        'Remove `tuning.extra_in_flight`, or set `schedule="1f1b"`.',
    ),
    "LH117": Entry(
        "`partition` or `pipeline_stage` does not assign every layer to a stage, or leaves a stage without layers.",
        "List the number of layers of each stage, at least 1 each, so that they add up to all layers. Or list the"
        " stage of each layer, ascending from 0.",
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
        "Use a name from the message; `*` matches anything between two dots.",
    ),
    "LH121": Entry(
        "The `recompute` pattern matches the container of all layers.",
        "Append `.*` to match its layers.",
    ),
    "LH122": Entry(
        "`tuning.memory_limit` limits the search for a layout, but no argument is searched.",
        'Set `layout="auto"` or `recompute="auto"`, or remove the limit.',
    ),
    "LH123": Entry(
        "An argument lists a value for each stage, but the number of stages is searched.",
        "Set `pipeline_parallel_size` and `num_chunks`, or remove the list.",
    ),
    "LH124": Entry(
        "The search does not support this value of the argument.",
        "Use a value that the message names, or set all sizes.",
    ),
    "LH125": Entry(
        "The value is not a valid quantity.",
        'Write a number and a unit, such as `"80GiB"`.',
    ),
    "LH126": Entry(
        'The strategy name has an invalid part, as in `"hybrid_pp_2"`.',
        'Write each axis with its size, as in `"hybrid_pp2"`.',
    ),
    "LH127": Entry(
        '`layout="auto"` cannot run the step without data, or the search took too long.',
        "Set the sizes yourself; see [choose a layout](../start/choose-a-layout.md).",
    ),
    "LH128": Entry(
        "No layout fits `tuning.memory_limit`, or the module cannot be split.",
        "Use more processes, more memory or a smaller batch.",
    ),
    "LH129": Entry(
        "No combination of the allowed sizes fits the number of processes.",
        "Allow other sizes, or start a different number of processes.",
    ),
    "LH130": Entry(
        "The training step reads tensor values, but planning commands run it without values.",
        "Create the values that the step reads in the module's `__init__`.",
    ),
    "LH131": Entry(
        "The training loader is empty or limited to 0 batches, but one batch is needed.",
        "Run the command on a machine that has the data, or remove the limit.",
    ),
    "LH132": Entry(
        "The code reads parameter values, but the module is too large to be initialized for planning.",
        "Do not read parameters before training, or plan a smaller module.",
    ),
    "LH133": Entry(
        "With manual optimization, the order of forwards and backwards in a step is unknown.",
        "Use automatic optimization, or set the sizes yourself.",
    ),
    "LH134": Entry(
        "The number of samples cannot be determined from the type of the batch.",
        "Return tensors or lists from the loader.",
    ),
    "LH135": Entry(
        "This version of torch lacks a function that the feature needs.",
        "Install a tested version; see [compatibility](compatibility.md).",
    ),
    "LH137": Entry(
        "Two arguments set the number of accumulated batches.",
        "Remove one of them.",
    ),
    "LH138": Entry(
        "The training loader has no `batch_size`.",
        "Use one `DataLoader(..., batch_size=...)`, or set `Trainer(accumulate_grad_batches=...)`.",
    ),
    "LH139": Entry(
        "`HybridTimeline` records a schedule, but this layout has none.",
        "Remove the callback, or set `num_microbatches`.",
    ),
    "LH140": Entry(
        "The device mesh is read before the processes are connected.",
        "Read it in `setup`, or in a later hook.",
    ),
}
