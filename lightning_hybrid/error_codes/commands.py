"""Errors of commands."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH1001": Entry(
        "The command was called with an unknown option or with an invalid value for an option.",
        "Run the command with `--help` to list its options.",
    ),
    "LH1002": Entry(
        "A key in the configuration, or the command-line option for this key, has an invalid name or value.",
        "Correct the key or option that the message names.",
    ),
    "LH1003": Entry(
        "The configuration uses a strategy other than `HybridStrategy`.",
        "Pass a second `--config` file that contains `trainer: {strategy: {class_path:"
        " lightning_hybrid.HybridStrategy}}`.",
    ),
    "LH1004": Entry(
        "`plan`, `memory` and `check` work only with a fixed layout, but in this configuration, the layout is chosen"
        " when training starts.",
        "Pass `--trainer.strategy.init_args.layout=null`, and set the parallel sizes to values that `lightning-hybrid"
        " suggest` prints.",
    ),
    "LH1006": Entry(
        "`check` was called with a Trainer argument that it does not support.",
        "Use only the arguments that the message lists.",
    ),
    "LH1007": Entry(
        "When `check` trained the module in one process, some losses or gradient norms were infinite or NaN, so"
        " `check` cannot compare the parallel run with them.",
        "Run `check` with another learning rate or with fewer steps.",
    ),
    "LH1008": Entry(
        "The number of ranks is not a multiple of the number of nodes.",
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
        "The checkpoint contains an optimizer state for a parameter that is not in any parameter group of this"
        " optimizer.",
        "Use another checkpoint.",
    ),
    "LH1015": Entry(
        "The output cannot be written, for example because the disk is full.",
        "Free up disk space, or use another path.",
    ),
    "LH1016": Entry(
        "No tensor name in the checkpoint starts with the value of `--prefix`.",
        "Use one of the prefixes that the message lists.",
    ),
    "LH1017": Entry(
        "The path passed to `export --config` does not contain a model configuration.",
        "Pass the original model's `config.json`, or the folder that contains it.",
    ),
    "LH1018": Entry(
        "The demo uses a data set from scikit-learn, but scikit-learn is not installed.",
        "Run `pip install scikit-learn`.",
    ),
    "LH1019": Entry(
        "In the vision transformer of the demo, `image_size` is not a multiple of `patch_size`, or `dim` is not a"
        " multiple of `heads`.",
        "Change the sizes that the message names.",
    ),
    "LH1020": Entry(
        "The checkpoint contains weights of peft adapters, such as LoRA, under names that transformers cannot load.",
        "Load the checkpoint into your module, and save the model as the message says. See"
        " [LoRA](../guides/fine-tune-hugging-face.md#lora).",
    ),
}
