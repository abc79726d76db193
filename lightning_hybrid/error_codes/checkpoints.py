"""Errors of checkpoints and weights."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH901": Entry(
        "The disk or a copy changed or cut a file, or a save was interrupted.",
        "Copy it again, or use another checkpoint.",
    ),
    "LH902": Entry(
        "The path leads to a state dict or another file.",
        "Use a checkpoint of a Trainer; use `initial_weights` for weights.",
    ),
    "LH903": Entry(
        "`state_dict()` of a sharded module.",
        "After a run, call `gather_module` first, or use `trainer.save_checkpoint`.",
    ),
    "LH904": Entry(
        "`torch.save` of a sharded module; also `pickle`, safetensors and `save_pretrained`.",
        "In a hook, save inside `full_parameters`, or call `trainer.save_checkpoint` on every rank.",
    ),
    "LH905": Entry(
        "The run failed, the module is too large, or `gather_module_on_teardown=False`.",
        "After an error, load a checkpoint into a new module. Otherwise call `trainer.strategy.gather_module()`.",
    ),
    "LH906": Entry(
        "`configure_optimizers` returns another number of optimizers.",
        "Return as many as before, or load only the weights.",
    ),
    "LH907": Entry(
        "`configure_optimizers` returns another kind of optimizer.",
        "Use the old optimizer, or load only the weights.",
    ),
    "LH908": Entry(
        "The optimizer has other parameter groups.",
        "Use the old groups, or load only the weights.",
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
        "Check it. If you train on several nodes, one node with the file is enough.",
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
        "Use a disk that all nodes share, or `save_distributed_checkpoint=False`.",
    ),
    "LH917": Entry(
        "Some nodes do not see the directory of the checkpoint.",
        "Copy it to a shared disk, or run `lightning-hybrid consolidate`.",
    ),
    "LH920": Entry(
        "The checkpoint has other names or shapes than the module.",
        "Compare the names in the message, or set `strict_loading=False`.",
    ),
    "LH922": Entry(
        "The folder is of another model.",
        "Compare the names in the message.",
    ),
    "LH923": Entry(
        "A Hugging Face folder fits two models in the module.",
        "Pass a state dict with the module's names to `load_weights`.",
    ),
    "LH925": Entry(
        "The file contains no dictionary of tensors.",
        "Pass a state dict to `load_weights`.",
    ),
    "LH927": Entry(
        "The file contains more than tensors.",
        "Read it yourself, and pass the state dict to `load_weights`.",
    ),
    "LH928": Entry(
        "The folder contains several files without an index.",
        "Name a file, or pass a state dict.",
    ),
    "LH929": Entry(
        "Ranks may have failed at different places.",
        "Use `ModelCheckpoint(every_n_train_steps=...)`.",
    ),
    "LH930": Entry(
        "Sharded checkpoints do not take `storage_options`.",
        "Set `save_distributed_checkpoint=False`, and use your own plugin.",
    ),
    "LH931": Entry(
        "Two settings save in the background.",
        "Remove one of them.",
    ),
    "LH932": Entry(
        "The plugin writes one file, and sharded checkpoints are directories.",
        "Remove the plugin, or set `save_distributed_checkpoint=False`.",
    ),
    "LH934": Entry(
        "The loader does not say which samples of the epoch were used.",
        "Resume from the end of an epoch, or with as many replicas.",
    ),
    "LH935": Entry(
        "The epoch was started with another sampler and another number of replicas.",
        "Resume from the end of an epoch, or with the same sampler.",
    ),
    "LH936": Entry(
        "The used samples do not end with a step of the new layout.",
        "Set `global_batch_size`, or resume from the end of an epoch.",
    ),
}
