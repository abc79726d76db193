"""Errors of commands."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH1001": Entry(
        "An option of the command has a wrong name or value.",
        "Run the command with `--help` to list its options.",
    ),
    "LH1002": Entry(
        "A key of the configuration, or a command-line option that sets it, has a wrong name or value.",
        "Correct the key or option that the message names.",
    ),
    "LH1003": Entry(
        "The configuration contains another strategy than `HybridStrategy`.",
        "Pass a second `--config` file with `trainer: {strategy: {class_path: lightning_hybrid.HybridStrategy}}`.",
    ),
    "LH1004": Entry(
        "`plan`, `memory` and `check` need a fixed layout, but in this configuration, the layout is chosen only"
        " when training starts.",
        "Set `--trainer.strategy.init_args.layout=null`, and set the parallel sizes that `suggest` prints.",
    ),
    "LH1006": Entry(
        "`check` accepts only some arguments of the Trainer, but was given another one.",
        "Use only the arguments that the message lists.",
    ),
    "LH1007": Entry(
        "In the check, the losses or gradient norms of training in one process are not finite, so they cannot be"
        " compared.",
        "Use another learning rate or fewer steps for the check.",
    ),
    "LH1008": Entry(
        "The number of ranks cannot be divided evenly over the nodes.",
        "Set `--nodes` to a divisor of `--ranks`.",
    ),
    "LH1009": Entry(
        "The checkpoint does not contain the weights of a module.",
        "Use a checkpoint that a Trainer saved.",
    ),
    "LH1010": Entry(
        "The checkpoint is already a single file, so `consolidate` has nothing to do.",
        "Use the file as it is.",
    ),
    "LH1011": Entry(
        "The path for the output file is a directory.",
        "Pass the path of a file.",
    ),
    "LH1012": Entry(
        "A file or folder already exists at the output path.",
        "Use another path, or pass `--overwrite` if the command has this option.",
    ),
    "LH1013": Entry(
        "The checkpoint contains an object of your project, such as a hyperparameter, whose class cannot be imported.",
        "Run the command in an environment in which your project can be imported.",
    ),
    "LH1014": Entry(
        "An optimizer in the checkpoint has a state for a parameter that is in none of its parameter groups.",
        "Use another checkpoint.",
    ),
    "LH1015": Entry(
        "The output cannot be written, for example because the disk is full.",
        "Free disk space, or use another path.",
    ),
    "LH1016": Entry(
        "No name in the checkpoint starts with the value of `--prefix`.",
        "Use a prefix that the message lists.",
    ),
    "LH1017": Entry(
        "The path that was passed as `export --config` does not contain a model configuration.",
        "Pass the original model's `config.json`, or the folder that contains it.",
    ),
    "LH1018": Entry(
        "The data of the example comes with scikit-learn, which is not installed.",
        "Run `pip install scikit-learn`.",
    ),
    "LH1019": Entry(
        "A size of the example's model is not a multiple of another size.",
        "Set the sizes so that the first one in the message is a multiple of the second one.",
    ),
    "LH1020": Entry(
        "The model in the checkpoint has peft adapters, such as LoRA. A Hugging Face folder cannot contain them under"
        " the names that they have in the checkpoint.",
        "Load the checkpoint into your module, and save it as the message says. See"
        " [LoRA](../guides/fine-tune-hugging-face.md#lora).",
    ),
}
