"""Errors of commands."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH1001": Entry(
        "An option of the command has a wrong name or value.",
        "List the options with `--help`.",
    ),
    "LH1002": Entry(
        "A configuration, or an option that changes it, has a wrong name or value.",
        "Correct the key that the message names.",
    ),
    "LH1003": Entry(
        "The configuration names a strategy other than HybridStrategy.",
        "Pass a second `--config` with `strategy: {class_path: lightning_hybrid.HybridStrategy}`.",
    ),
    "LH1004": Entry(
        "`plan`, `memory` and `check` need a fixed layout, but the layout in the configuration is chosen only when"
        " training starts.",
        "Set `--trainer.strategy.init_args.layout=null` and the sizes that `suggest` prints.",
    ),
    "LH1006": Entry(
        "`check` accepts only some arguments of the Trainer.",
        "Use only the arguments that the message lists.",
    ),
    "LH1007": Entry(
        "The losses or gradient norms of training in one process are not finite, so they cannot be compared.",
        "Use another learning rate, or fewer steps.",
    ),
    "LH1008": Entry(
        "The number of nodes does not divide the number of ranks.",
        "Set `--nodes` to a divisor of `--ranks`.",
    ),
    "LH1009": Entry(
        "The checkpoint does not contain a module.",
        "Use a checkpoint of a Trainer.",
    ),
    "LH1010": Entry(
        "The checkpoint is already a single file.",
        "Use the file as it is.",
    ),
    "LH1011": Entry(
        "The output path is a directory.",
        "Give the path of a file.",
    ),
    "LH1012": Entry(
        "The output already exists.",
        "Use another path, or pass `--overwrite` if the command has this option.",
    ),
    "LH1013": Entry(
        "The checkpoint contains an object of your project, such as a hyperparameter, whose class cannot be imported.",
        "Run the command where your project can be imported.",
    ),
    "LH1014": Entry(
        "The optimizer in the checkpoint has a state for a parameter that is in none of its groups.",
        "Use another checkpoint.",
    ),
    "LH1015": Entry(
        "The output cannot be written.",
        "Free disk space, or use another path.",
    ),
    "LH1016": Entry(
        "No name in the checkpoint starts with the value of `--prefix`.",
        "Use a prefix that the message lists.",
    ),
    "LH1017": Entry(
        "The path in `export --config` does not contain a model configuration.",
        "Pass the `config.json` or the folder of the original model.",
    ),
    "LH1018": Entry(
        "The example needs scikit-learn, which is not installed.",
        "Run `pip install scikit-learn`.",
    ),
    "LH1019": Entry(
        "The sizes of the example's model do not match.",
        "Make each size a multiple of the size that the message names.",
    ),
}
