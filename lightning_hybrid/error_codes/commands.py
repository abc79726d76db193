"""Errors of commands."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH1001": Entry(
        "An option of the command has a wrong name or value.",
        "Use `--help` of the command.",
    ),
    "LH1002": Entry(
        "A configuration, or an option that changes it, has a wrong name or value.",
        "Correct the key that the message names.",
    ),
    "LH1003": Entry(
        "The configuration names another strategy.",
        "Pass a second `--config` with `strategy: {class_path: lightning_hybrid.HybridStrategy}`.",
    ),
    "LH1004": Entry(
        "`plan`, `memory` and `check` need one layout, and this one is found when training starts.",
        "Set `--trainer.strategy.init_args.layout=null` and the sizes that `suggest` prints.",
    ),
    "LH1006": Entry(
        "`check` takes some arguments of the Trainer only.",
        "Use an argument that the message lists.",
    ),
    "LH1007": Entry(
        "The training of one process gives values that are not finite.",
        "Use another learning rate, or fewer steps.",
    ),
    "LH1008": Entry(
        "The number of nodes does not divide the number of ranks.",
        "Choose `--nodes` that divides `--ranks`.",
    ),
    "LH1009": Entry(
        "The directory is a checkpoint without a module.",
        "Use a checkpoint of a Trainer.",
    ),
    "LH1010": Entry(
        "The checkpoint is one file already.",
        "Use the file.",
    ),
    "LH1011": Entry(
        "The output path is a directory.",
        "Name a file.",
    ),
    "LH1012": Entry(
        "The output exists already.",
        "Use another path, or `--overwrite` where the command has it.",
    ),
    "LH1013": Entry(
        "`consolidate` unpickles hyperparameters of your project.",
        "Run it where the project can be imported.",
    ),
    "LH1014": Entry(
        "The optimizer in the checkpoint has a state without a parameter.",
        "Use another checkpoint.",
    ),
    "LH1015": Entry(
        "The output cannot be written.",
        "Free space, or use another path.",
    ),
    "LH1016": Entry(
        "No name of the checkpoint begins with `--prefix`.",
        "Use a prefix that the message lists.",
    ),
    "LH1017": Entry(
        "`--config` of `export` is not a configuration of a model.",
        "Use the `config.json` or the folder that the model was made from.",
    ),
    "LH1018": Entry(
        "The example needs scikit-learn.",
        "Run `pip install scikit-learn`.",
    ),
    "LH1019": Entry(
        "Sizes of the example's model do not match.",
        "Use multiples that the message names.",
    ),
}
