"""Errors of arguments."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH101": Entry(
        "An argument has a value of another type.",
        "Pass a type that the message names: [all arguments](strategy.md).",
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
        "A timeout is zero or less, or shorter than the time between two heartbeats.",
        'Use seconds, such as `600`, or `timedelta(minutes=10)`; in YAML `600` or `"0:10:00"`.',
    ),
    "LH105": Entry(
        "The number of processes is not a multiple of the size of a model group: tensor x pipeline x context.",
        "Set `Trainer(devices=..., num_nodes=...)` to a multiple of that size, or use smaller sizes: [choose a"
        " layout](../start/choose-a-layout.md).",
    ),
    "LH106": Entry(
        "The product of the sizes is not the number of processes.",
        'Leave `data_parallel_size="auto"`, or start as many processes as the message states.',
    ),
    "LH107": Entry(
        "A list of sizes contains none that divides the number of processes.",
        "Add a size such as 1 to the list, or start another number of processes.",
    ),
    "LH108": Entry(
        "The modes 2D, 2.5D and 3D need a square, squares or a cube of ranks.",
        "Use a size that the message names: [other modes](../concepts/advanced-tensor-parallel.md).",
    ),
    "LH109": Entry(
        "`tensor_parallel_depth` exists in 2.5D mode only.",
        'Remove it, or set `tensor_parallel_mode="2.5d"`.',
    ),
    "LH110": Entry(
        "`sequence_parallel` shards activations, which 2D, 2.5D and 3D modes have sharded already.",
        'Remove `sequence_parallel`, or set `tensor_parallel_mode="1d"`.',
    ),
    "LH111": Entry(
        "The batch size of the loader times the replicas does not divide `global_batch_size`.",
        "Set a multiple that the message names: [elastic training](../guides/elastic.md).",
    ),
    "LH112": Entry(
        "The strategy has no argument of this name.",
        "Use the name that the message proposes: [all arguments](strategy.md).",
    ),
    "LH113": Entry(
        "An axis is missing in `launch.rank_order`, or occurs twice.",
        'Write `"pp-dp-tp"` or another order.',
    ),
    "LH114": Entry(
        "The schedule 1F1B runs one chunk on each rank.",
        'Set `schedule="interleaved_1f1b"`, or `num_chunks=1`.',
    ),
    "LH115": Entry(
        "`tuning.extra_in_flight` does not have one number for each link between ranks.",
        "Give one number for all links, or `pipeline_parallel_size - 1` numbers.",
    ),
    "LH116": Entry(
        "GPipe has all microbatches in flight already.",
        'Remove `tuning.extra_in_flight`, or set `schedule="1f1b"`.',
    ),
    "LH117": Entry(
        "The numbers of `partition`, or of `pipeline_stage`, do not give each stage its layers.",
        "Give each stage at least one layer, and as many layers in total as there are; or the stage of each layer,"
        " ascending from 0.",
    ),
    "LH118": Entry(
        "There are more stages than layers.",
        "Use a smaller `pipeline_parallel_size` or `num_chunks`.",
    ),
    "LH119": Entry(
        "The list of `recompute` has another length than the number of stages.",
        "Give one number for each stage, or one for all.",
    ),
    "LH120": Entry(
        "The module has no submodule that the pattern of `recompute` matches.",
        "Use a name of the message; `*` matches anything between two dots.",
    ),
    "LH121": Entry(
        "The pattern of `recompute` matches the container of all layers.",
        "Add `.*` to name its layers.",
    ),
    "LH122": Entry(
        "`tuning.memory_limit` limits a search, but every argument is set.",
        'Set `layout="auto"` or `recompute="auto"`, or remove the limit.',
    ),
    "LH123": Entry(
        "A list has a value for each stage, but the number of stages is searched.",
        "Set `pipeline_parallel_size` and `num_chunks`, or remove the list.",
    ),
    "LH124": Entry(
        "The search does not know this value of the argument.",
        "Use a value that the message names, or set all sizes.",
    ),
    "LH125": Entry(
        "The text is not a quantity.",
        'Write a number and a unit, such as `"80GiB"`.',
    ),
    "LH126": Entry(
        'The name of the strategy has a part that does not exist, such as `"hybrid_pp_2"`.',
        'Write `"hybrid_pp2"`.',
    ),
    "LH127": Entry(
        '`layout="auto"` cannot run the step on shapes, or the search took too long.',
        "Set the sizes: [choose a layout](../start/choose-a-layout.md).",
    ),
    "LH128": Entry(
        "No layout fits `tuning.memory_limit`, or the module cannot be split.",
        "Add processes or memory, or use a smaller batch.",
    ),
    "LH129": Entry(
        "The allowed sizes do not go with the number of processes.",
        "Allow other sizes, or start another number of processes.",
    ),
    "LH130": Entry(
        "The training step needs values, and commands that plan run it on shapes.",
        "Create the values of the module in `__init__`.",
    ),
    "LH131": Entry(
        "The training loader is empty or limited to 0 batches, and one batch is needed.",
        "Run the command where the data is, or remove the limit.",
    ),
    "LH132": Entry(
        "Code reads values of parameters, and the module is too large to get values for planning.",
        "Do not read parameters before training, or plan a smaller module.",
    ),
    "LH133": Entry(
        "With manual optimization the forwards and backwards of a step are not known.",
        "Use automatic optimization, or set the sizes.",
    ),
    "LH134": Entry(
        "The batch has a type whose number of samples is not known.",
        "Return tensors or lists from the loader.",
    ),
    "LH135": Entry(
        "This version of torch lacks a function that the feature needs.",
        "Install a tested version: [compatibility](compatibility.md).",
    ),
    "LH137": Entry(
        "Two arguments set the number of accumulated batches.",
        "Remove one of them.",
    ),
    "LH138": Entry(
        "The training loader has no `batch_size`.",
        "Use one `DataLoader(..., batch_size=...)`, or `accumulate_grad_batches`.",
    ),
    "LH139": Entry(
        "`HybridTimeline` records a schedule, and this layout has none.",
        "Remove the callback, or set `num_microbatches`.",
    ),
    "LH140": Entry(
        "The device mesh is read before the processes are connected.",
        "Read it in `setup`, or in a later hook.",
    ),
}
