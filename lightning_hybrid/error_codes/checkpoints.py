"""Errors of checkpoints and weights."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH901": Entry(
        "A file was changed or truncated on the disk or in a copy, or a save was interrupted.",
        "Copy the checkpoint again, or use another one.",
    ),
    "LH902": Entry(
        "The file is a plain state dict, or not a checkpoint at all.",
        "Use a checkpoint of a Trainer. To load only weights, use `initial_weights`.",
    ),
    "LH903": Entry(
        "`state_dict()` was called on a sharded module.",
        "After a run, call `gather_module` first, or use `trainer.save_checkpoint`.",
    ),
    "LH904": Entry(
        "A sharded module was saved with `torch.save`, `pickle`, safetensors or `save_pretrained`.",
        "In a hook, save inside `full_parameters`, or call `trainer.save_checkpoint` on every rank.",
    ),
    "LH905": Entry(
        "The run failed, the module is too large to gather, or `gather_module_on_teardown=False`.",
        "After an error, load a checkpoint into a new module. Otherwise call `trainer.strategy.gather_module()`.",
    ),
    "LH906": Entry(
        "`configure_optimizers` returns a different number of optimizers than before.",
        "Return the same number as before, or load only the weights.",
    ),
    "LH907": Entry(
        "`configure_optimizers` returns a different kind of optimizer than before.",
        "Use the same optimizer as before, or load only the weights.",
    ),
    "LH908": Entry(
        "The parameter groups of the optimizer have changed.",
        "Use the same groups as before, or load only the weights.",
    ),
    "LH909": Entry(
        "A callback saves different keys on each rank.",
        "Save the same keys on every rank.",
    ),
    "LH910": Entry(
        "A callback saves parts of the model in a list.",
        "Save a dictionary, or set `save_distributed_checkpoint=False`.",
    ),
    "LH911": Entry(
        "The disk is full, or the path is not writable.",
        "Free space, or use another path.",
    ),
    "LH912": Entry(
        "An earlier save left a directory at the path, which would be read instead.",
        "Remove the file that the message names.",
    ),
    "LH913": Entry(
        "The path is wrong.",
        "Check the path. With several nodes, only one of them needs the file.",
    ),
    "LH914": Entry(
        "The run was killed while it saved.",
        "Use another checkpoint.",
    ),
    "LH915": Entry(
        "Part of the directory is missing or on another node.",
        "Copy all files, including `.metadata`.",
    ),
    "LH916": Entry(
        "With `save_distributed_checkpoint=True`, nodes write to different disks.",
        "Use a disk that all nodes share, or set `save_distributed_checkpoint=False`.",
    ),
    "LH917": Entry(
        "Some nodes do not see the directory of the checkpoint.",
        "Copy it to a shared disk, or run `lightning-hybrid consolidate`.",
    ),
    "LH920": Entry(
        "The names or shapes in the checkpoint differ from the module.",
        "Compare the names in the message, or set `strict_loading=False`.",
    ),
    "LH922": Entry(
        "The folder belongs to another model.",
        "Compare the names in the message.",
    ),
    "LH923": Entry(
        "The Hugging Face folder matches several parts of the module.",
        "Pass a state dict with the module's names to `load_weights`.",
    ),
    "LH925": Entry(
        "The file does not contain a dictionary of tensors.",
        "Pass a state dict to `load_weights`.",
    ),
    "LH927": Entry(
        "The file contains more than tensors.",
        "Load it yourself, and pass the state dict to `load_weights`.",
    ),
    "LH928": Entry(
        "The folder contains several files without an index.",
        "Pass the path of a file, or a state dict.",
    ),
    "LH929": Entry(
        "Ranks may have failed in different places.",
        "Use `ModelCheckpoint(every_n_train_steps=...)`.",
    ),
    "LH930": Entry(
        "Sharded checkpoints do not support `storage_options`.",
        "Set `save_distributed_checkpoint=False`, and use your own plugin.",
    ),
    "LH931": Entry(
        "Two settings save checkpoints in the background.",
        "Remove one of them.",
    ),
    "LH932": Entry(
        "The plugin writes a single file, but sharded checkpoints are directories.",
        "Remove the plugin, or set `save_distributed_checkpoint=False`.",
    ),
    "LH934": Entry(
        "The loader does not say which samples of the epoch were used.",
        "Resume from the end of an epoch, or with the same number of replicas.",
    ),
    "LH935": Entry(
        "The epoch was started with another sampler and a different number of replicas.",
        "Resume from the end of an epoch, or with the same sampler.",
    ),
    "LH936": Entry(
        "The samples used so far do not end at a step of the new layout.",
        "Set `global_batch_size`, or resume from the end of an epoch.",
    ),
}
