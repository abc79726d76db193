"""Errors of arguments."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH101": Entry(
        "The argument that the message names has a value of the wrong type.",
        "Pass a value of one of the types that the message lists. See [all arguments](strategy.md).",
    ),
    "LH102": Entry(
        "An argument has a value that is not allowed.",
        "Use one of the values that the message lists.",
    ),
    "LH103": Entry(
        "An argument is set to a number outside its allowed range.",
        "Use a number in the range that the message states.",
    ),
    "LH104": Entry(
        "A timeout is zero or negative, or `faults.heartbeat_timeout` is shorter than its minimum.",
        "Set the timeout to a positive number of seconds, such as `600`, or to a duration, such as"
        ' `timedelta(minutes=10)`. In YAML, write `600` or `"0:10:00"`.',
    ),
    "LH105": Entry(
        "The number of processes is not divisible by the product of the tensor-, pipeline- and context-parallel sizes.",
        "Set `Trainer(devices=..., num_nodes=...)` so that the number of processes is a multiple of this product, or"
        " use smaller parallel sizes. See [choose a layout](../start/choose-a-layout.md).",
    ),
    "LH106": Entry(
        "The product of all parallel sizes differs from the number of processes.",
        'Set `data_parallel_size="auto"`, or start the number of processes that the message states.',
    ),
    "LH107": Entry(
        "No combination of the sizes listed in `pipeline_parallel_size` and `tensor_parallel_size` fits the number of"
        " processes, which must be divisible by the product of the parallel sizes.",
        "Add another size, such as 1, to one of the two lists, or start a different number of processes.",
    ),
    "LH108": Entry(
        "The tensor-parallel ranks cannot be arranged as one square (2D mode), as equal squares (2.5D mode) or as a"
        " cube (3D mode).",
        "Set `tensor_parallel_size` to a number that the message suggests. See [2D, 2.5D and 3D"
        " modes](../concepts/advanced-tensor-parallel.md).",
    ),
    "LH109": Entry(
        '`tensor_parallel_depth` is set, but `tensor_parallel_mode` is not `"2.5d"`.',
        'Remove `tensor_parallel_depth`, or set `tensor_parallel_mode="2.5d"`.',
    ),
    "LH110": Entry(
        "`sequence_parallel` is combined with a 2D, 2.5D or 3D tensor-parallel mode, which already shards activations.",
        'Remove `sequence_parallel`, or set `tensor_parallel_mode="1d"`.',
    ),
    "LH111": Entry(
        "`global_batch_size` is not divisible by the product of the loader's batch size and the number of replicas.",
        "Set `global_batch_size` to a multiple of this product, which the message states. See [elastic"
        " training](../guides/elastic.md).",
    ),
    "LH112": Entry(
        "`HybridStrategy`, `Faults`, `Launch` or `Tuning` was called with an argument that it does not have.",
        "Use the name that the message suggests. See [all arguments](strategy.md).",
    ),
    "LH113": Entry(
        "`launch.rank_order` does not contain the name of each axis exactly once.",
        'Set `launch.rank_order` to `"pp-dp-tp"`, or to the same names in another order.',
    ),
    "LH114": Entry(
        "The 1F1B schedule supports only one chunk per rank, but `num_chunks` is larger than 1.",
        'Set `schedule="interleaved_1f1b"` or `num_chunks=1`.',
    ),
    "LH115": Entry(
        "The list in `tuning.extra_in_flight` does not contain exactly one number for each link between neighboring"
        " pipeline ranks.",
        "Set `tuning.extra_in_flight` to one number for all links, or to a list of `pipeline_parallel_size - 1`"
        " numbers.",
    ),
    "LH116": Entry(
        "`tuning.extra_in_flight` adds microbatches in flight, but with the GPipe schedule, all microbatches are"
        " already in flight.",
        'Remove `tuning.extra_in_flight`, or set `schedule="1f1b"`.',
    ),
    "LH117": Entry(
        "`partition` or `pipeline_stage` does not assign every layer to a stage, or leaves a stage without layers.",
        "List the number of layers of each stage. Each number must be at least 1, and the numbers must add up to the"
        " total number of layers. Alternatively, list the stage of each layer, in ascending order starting at 0.",
    ),
    "LH118": Entry(
        "The pipeline has more stages than layers.",
        "Use a smaller `pipeline_parallel_size` or `num_chunks`.",
    ),
    "LH119": Entry(
        "The list passed as `recompute` does not contain exactly one number (0 or more) for each stage.",
        "List one number for each stage, or set a single number that applies to all stages.",
    ),
    "LH120": Entry(
        "A pattern in `recompute` matches no submodule.",
        "Use the name of a submodule that the message suggests. In a pattern, `*` matches any text between two dots.",
    ),
    "LH121": Entry(
        "A pattern in `recompute` matches the module that contains all layers instead of the layers themselves.",
        "Append `.*` to the pattern to match the layers.",
    ),
    "LH122": Entry(
        "`tuning.memory_limit` affects only the layout search. The search does not run, because no argument is set to"
        ' `"auto"`.',
        'Set `layout="auto"` or `recompute="auto"`, or remove `tuning.memory_limit`.',
    ),
    "LH123": Entry(
        "An argument lists one value for each stage, but the number of stages is known only after the layout search.",
        "Set `pipeline_parallel_size` and `num_chunks` yourself, or remove the argument that contains the list.",
    ),
    "LH124": Entry(
        "The layout search does not support the value that you set for `recompute` or `num_chunks`.",
        "Use a value that the message lists, or set all parallel sizes yourself instead of using the layout search.",
    ),
    "LH125": Entry(
        "A quantity, such as `tuning.memory_limit`, is not written as a number followed by a unit.",
        'Write a number and a unit, such as `"80GiB"`.',
    ),
    "LH126": Entry(
        "Each part of the strategy name must be an abbreviation directly followed by a number, such as `pp2`, and no"
        ' part may appear twice. In `"hybrid_pp_2"`, for example, `pp` and `2` are separate parts.',
        'Use each part only once, with the number directly after the abbreviation, as in `"hybrid_pp2"`.',
    ),
    "LH127": Entry(
        'The layout search could not choose a value for an argument that is set to `"auto"`. This happens, for'
        " example, if the search takes too long, or if the training step uses values of tensors, which the search does"
        " not compute.",
        "Set the parallel sizes yourself. See [choose a layout](../start/choose-a-layout.md).",
    ),
    "LH128": Entry(
        "The layout search rejected every layout, for example because every layout needs more memory than"
        " `tuning.memory_limit`, or because the module cannot be split.",
        "Start more processes, increase `tuning.memory_limit`, or use a smaller batch.",
    ),
    "LH129": Entry(
        "The arguments allow no combination of parallel sizes that fits the number of processes.",
        "Allow other parallel sizes, or start a different number of processes.",
    ),
    "LH130": Entry(
        "The training step reads the values of parameters. The layout search and commands such as `plan` run the step"
        " with parameters that have no values.",
        "In the module's `__init__`, create the parameters that the step reads.",
    ),
    "LH131": Entry(
        "The training loader is empty or limited to 0 batches, but the layout search and commands such as `plan` need"
        " one batch.",
        "Run the command on a machine that has the training data, or remove the limit, such as"
        " `limit_train_batches=0`.",
    ),
    "LH132": Entry(
        "The module reads the values of its parameters. The layout search and commands such as `plan` cannot store"
        " these values, because they need too much memory.",
        "Avoid reading parameter values in `__init__`, `configure_model` or `training_step`. Alternatively, use a"
        " smaller module, such as one with fewer layers.",
    ),
    "LH133": Entry(
        "With manual optimization, the order of the forward and backward passes is unknown before the step runs, so no"
        " layout can be suggested.",
        "Use automatic optimization, or set the parallel sizes yourself.",
    ),
    "LH134": Entry(
        "The strategy cannot determine from the type of the batch how many samples the batch contains.",
        "Make the training loader return tensors or lists.",
    ),
    "LH135": Entry(
        "The installed version of torch lacks a function that the strategy or a `lightning-hybrid` command needs.",
        "Install a tested version of torch. See [versions](../start/install.md#versions).",
    ),
    "LH137": Entry(
        "`global_batch_size` determines how many batches are accumulated, but another argument or manual optimization"
        " determines this number too.",
        "Remove `global_batch_size` or the other setting that the message names.",
    ),
    "LH138": Entry(
        "`global_batch_size` can be used only with a training loader that has a `batch_size`, but this loader has"
        " none.",
        "Use a single `DataLoader(..., batch_size=...)`, or replace `global_batch_size` with"
        " `Trainer(accumulate_grad_batches=...)`.",
    ),
    "LH139": Entry(
        "`HybridTimeline` records when each rank runs the forward and backward passes of a schedule. This run has no"
        " schedule, because it uses neither a pipeline nor several microbatches.",
        "Remove `HybridTimeline`, or set `pipeline_parallel_size` or `num_microbatches`.",
    ),
    "LH140": Entry(
        "`device_mesh` was read before the strategy had connected the training processes.",
        "Read `device_mesh` in `setup` or in a later hook.",
    ),
}
