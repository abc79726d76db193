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
        "A timeout is zero or negative, or `faults.heartbeat_timeout` is shorter than 3 seconds.",
        "Set the timeout to a positive number of seconds, such as `600`, or to a duration, such as"
        ' `timedelta(minutes=10)`. In YAML, write `600` or `"0:10:00"`.',
    ),
    "LH105": Entry(
        "The number of processes is not divisible by the product of all parallel sizes except `data_parallel_size`.",
        "Set `Trainer(devices=..., num_nodes=...)` so that the number of processes is a multiple of this"
        " product, or choose sizes whose product divides the number of processes. See [choose a"
        " layout](../start/choose-a-layout.md).",
    ),
    "LH106": Entry(
        "The product of all parallel sizes differs from the number of processes.",
        'Set `data_parallel_size="auto"`, or start as many processes as the message states.',
    ),
    "LH107": Entry(
        "The number of processes must be divisible by the product of the parallel sizes. No combination of"
        " the sizes listed in `pipeline_parallel_size` and `tensor_parallel_size` meets this condition.",
        "Add another size, such as 1, to one of these lists, or start a different number of processes.",
    ),
    "LH108": Entry(
        "`tensor_parallel_size` does not fit `tensor_parallel_mode`. It must be a square number in 2D mode,"
        " `tensor_parallel_depth` times a square number in 2.5D mode, and a cube number in 3D mode.",
        "Set `tensor_parallel_size` to a number that the message suggests. See [2D, 2.5D and 3D"
        " modes](../concepts/advanced-tensor-parallel.md).",
    ),
    "LH109": Entry(
        '`tensor_parallel_depth` is set, but `tensor_parallel_mode` is not `"2.5d"`.',
        'Remove `tensor_parallel_depth`, or set `tensor_parallel_mode="2.5d"`.',
    ),
    "LH110": Entry(
        "`sequence_parallel=True` is combined with a 2D, 2.5D or 3D tensor-parallel mode. These modes already"
        " shard activations.",
        'Remove `sequence_parallel`, or set `tensor_parallel_mode="1d"`.',
    ),
    "LH111": Entry(
        "`global_batch_size` is not divisible by the product of the training loader's batch size and the number"
        " of replicas.",
        "Set `global_batch_size` to a multiple of this product. The message states the product. See [elastic"
        " training](../guides/elastic.md).",
    ),
    "LH112": Entry(
        "`HybridStrategy`, `Faults`, `Launch` or `Tuning` was called with an argument that it does not have.",
        "Use one of the arguments that the message names. See [all arguments](strategy.md).",
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
        "`tuning.extra_in_flight` is a list that does not contain exactly one number for each link between"
        " neighboring pipeline ranks.",
        "Set `tuning.extra_in_flight` to one number for all links, or to a list of `pipeline_parallel_size -"
        " 1` numbers.",
    ),
    "LH116": Entry(
        "`tuning.extra_in_flight` increases the number of microbatches in flight, but the GPipe schedule"
        " already has all microbatches in flight.",
        'Remove `tuning.extra_in_flight`, or set `schedule="1f1b"`.',
    ),
    "LH117": Entry(
        "`partition` or `pipeline_stage` leaves a layer without a stage, leaves a stage without layers, or"
        " assigns stages out of order.",
        "Set `partition` to a list with the number of layers of each stage. Each number must be at least 1, and"
        " their sum must be the total number of layers. Alternatively, state the stage of each layer in"
        " `partition` or `pipeline_stage`. The stages must start at 0 and must not decrease from one layer to the"
        " next.",
    ),
    "LH118": Entry(
        "The pipeline has more stages than layers.",
        "Use a smaller `pipeline_parallel_size` or `num_chunks`.",
    ),
    "LH119": Entry(
        "The list in `recompute` does not contain exactly one number for each stage, or a number is negative.",
        "List one number (0 or more) for each stage, or set a single number that applies to all stages.",
    ),
    "LH120": Entry(
        "A pattern in `recompute` matches no submodule.",
        "Use one of the submodule names that the message suggests. In a pattern, `*` matches any text that"
        " contains no dot.",
    ),
    "LH121": Entry(
        "A pattern in `recompute` matches the module that contains all layers, but the pattern must match the"
        " layers themselves.",
        "Append `.*` to the pattern to match the layers.",
    ),
    "LH122": Entry(
        "`tuning.memory_limit` affects only the layout search, but no argument requests this search.",
        'Set `layout="auto"` or `recompute="auto"`, or remove `tuning.memory_limit`.',
    ),
    "LH123": Entry(
        "An argument lists one value for each stage, but the number of stages is known only after the layout search.",
        "Set `pipeline_parallel_size` and `num_chunks` to numbers, or remove the argument that contains the list.",
    ),
    "LH124": Entry(
        "The layout search does not support the value that you set for `recompute` or `num_chunks`.",
        "Use a value that the message allows, or set all parallel sizes yourself instead of using the layout search.",
    ),
    "LH125": Entry(
        "An argument such as `tuning.memory_limit` is not a positive number followed by a unit.",
        'Write a number and a unit, such as `"80GiB"`.',
    ),
    "LH126": Entry(
        "Each part of the strategy name after `hybrid` must be an abbreviation followed by a number, as in `pp2`."
        ' No abbreviation may appear twice. For example, the name `"hybrid_pp_2"` is invalid, because an'
        " underscore separates `pp` from its number.",
        'Write the number directly after the abbreviation, as in `"hybrid_pp2"`, and use each abbreviation only once.',
    ),
    "LH127": Entry(
        "The layout search could not choose a value for an argument. For example, the search took too long, or"
        " the training step reads tensor values that the search does not compute.",
        "Set the parallel sizes yourself. See [choose a layout](../start/choose-a-layout.md).",
    ),
    "LH128": Entry(
        "The layout search rejected every layout. For example, every layout needs more memory than"
        " `tuning.memory_limit`, or the module cannot be split.",
        "Start more processes, increase `tuning.memory_limit`, or use a smaller batch.",
    ),
    "LH129": Entry(
        "The arguments allow no combination of parallel sizes that fits the number of processes.",
        "Allow other parallel sizes, or start a different number of processes.",
    ),
    "LH130": Entry(
        "The training step reads the values of parameters that are on the meta device. In the layout"
        " search and in commands such as `plan`, these parameters have no values.",
        "In the module's `__init__`, create the parameters that the step reads. Do not create them on the meta device.",
    ),
    "LH131": Entry(
        "The training loader is empty or limited to 0 batches, but the layout search and commands such as `plan` need"
        " one batch.",
        "Use a machine that has the training data, or remove the limit, such as `limit_train_batches=0`.",
    ),
    "LH132": Entry(
        "The module reads the values of its parameters. In the layout search and in commands such as `plan`,"
        " these values would need too much memory.",
        "Avoid reading parameter values in `__init__`, `configure_model` or `training_step`. Alternatively,"
        " use a smaller module, such as one with fewer layers.",
    ),
    "LH133": Entry(
        "With manual optimization, it is unknown which forward and backward passes the step will run, so no"
        " layout can be suggested.",
        "Use automatic optimization, or set the parallel sizes yourself.",
    ),
    "LH134": Entry(
        "The strategy cannot count the samples in a batch of the type that the message names.",
        "Make the training loader return tensors or lists.",
    ),
    "LH135": Entry(
        "The installed version of torch lacks a function that the strategy or a `lightning-hybrid` command needs.",
        "Install a tested version of torch. See [versions](../start/install.md#versions).",
    ),
    "LH137": Entry(
        "`global_batch_size` determines the number of accumulated batches, but another argument or manual"
        " optimization determines this number too.",
        "Remove `global_batch_size` or the other setting that the message names.",
    ),
    "LH138": Entry(
        "`global_batch_size` can be used only with a training loader that has a `batch_size`, but this loader has"
        " none.",
        "Use a single `DataLoader(..., batch_size=...)`, or replace `global_batch_size` with"
        " `Trainer(accumulate_grad_batches=...)`.",
    ),
    "LH139": Entry(
        "`HybridTimeline` records when each rank runs the forward and backward passes of a schedule. This run"
        " has no schedule, because it uses neither a pipeline nor several microbatches.",
        "Remove `HybridTimeline`, or set `pipeline_parallel_size` or `num_microbatches` to more than 1.",
    ),
    "LH140": Entry(
        "`device_mesh` was read before the strategy had connected the training processes.",
        "Read `device_mesh` in `setup` or in a later hook.",
    ),
    "LH141": Entry(
        "`zero_size` is set, but `zero_stage` is 0, or the number of replicas is not a multiple of `zero_size`.",
        "Set `zero_stage` to 1, 2 or 3, and `zero_size` to a divisor of the number of replicas, or remove `zero_size`."
        " See [hybrid sharding](../concepts/data-parallel.md#hybrid-sharding).",
    ),
    "LH142": Entry(
        "The number of replicas is not a multiple of `expert_parallel_size`.",
        "Set `expert_parallel_size` to a divisor of the number of replicas. See [expert"
        " parallelism](../concepts/expert-parallel.md).",
    ),
    "LH143": Entry(
        "`expert_parallel_size` or `expert_parallel` shards experts, but the model has no module with experts that can"
        " be sharded.",
        "Write the experts in the [form that can be"
        " sharded](../concepts/expert-parallel.md#which-modules-are-sharded), or remove the argument.",
    ),
    "LH144": Entry(
        "Each rank holds equally many experts of a layer, but their number is not divisible by the number of ranks.",
        'Set `expert_parallel_size`, or `tensor_parallel_size` with `expert_parallel="tensor"`, to a divisor of the'
        " number of experts.",
    ),
    "LH145": Entry(
        "Experts are sharded, but one of their parameters is used under several names.",
        "Give each module experts of its own, or remove `expert_parallel_size` and `expert_parallel`.",
    ),
    "LH146": Entry(
        '`expert_parallel="tensor"` shards experts over tensor-parallel ranks, and `expert_parallel_size` shards them'
        " over replicas.",
        "Remove one of the two.",
    ),
}
