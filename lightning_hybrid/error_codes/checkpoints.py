"""Errors of checkpoints and weights."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH901": Entry(
        "A file of the checkpoint was changed or truncated on the disk or during a copy, or a save was interrupted.",
        "Copy the checkpoint again, or use another checkpoint.",
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
        "The module was used after a run without being gathered: the run failed, the module is too large, or"
        " `gather_module_on_teardown=False` is set.",
        "After an error, load a checkpoint into a new module. Otherwise, call `trainer.strategy.gather_module()`.",
    ),
    "LH906": Entry(
        "`configure_optimizers` returns a different number of optimizers than in the run that saved the checkpoint.",
        "Return the same number as before, or load only the weights.",
    ),
    "LH907": Entry(
        "`configure_optimizers` returns a different kind of optimizer than in the run that saved the checkpoint.",
        "Use the same optimizer as before, or load only the weights.",
    ),
    "LH908": Entry(
        "The parameter groups of the optimizer have changed since the checkpoint was saved.",
        "Use the same groups as before, or load only the weights.",
    ),
    "LH909": Entry(
        "The module or a callback saves different keys on different ranks.",
        "Save the same keys on every rank.",
    ),
    "LH910": Entry(
        "A callback saves parts of the model in a list.",
        "Save a dictionary, or set `save_distributed_checkpoint=False`.",
    ),
    "LH911": Entry(
        "The disk is full, or the path of the checkpoint is not writable.",
        "Free disk space, or use another path.",
    ),
    "LH912": Entry(
        "An earlier save left a directory at the path of the checkpoint, and this directory would be read instead.",
        "Remove the file that the message names.",
    ),
    "LH913": Entry(
        "There is no checkpoint, or no file of weights, at the path.",
        "Check the path. With several nodes, the file needs to be on only one of them.",
    ),
    "LH914": Entry(
        "The run was killed while it saved the checkpoint, so the checkpoint is incomplete.",
        "Use another checkpoint.",
    ),
    "LH915": Entry(
        "Some files of the directory are missing or on another node.",
        "Copy all files of the directory, including `.metadata`.",
    ),
    "LH916": Entry(
        "With `save_distributed_checkpoint=True`, the nodes write to different disks.",
        "Use a disk that all nodes share, or set `save_distributed_checkpoint=False`.",
    ),
    "LH917": Entry(
        "Some nodes do not see the directory of the checkpoint.",
        "Copy the directory to a shared disk, or convert it to a file with `lightning-hybrid consolidate`.",
    ),
    "LH920": Entry(
        "The checkpoint and the module have tensors with different names or shapes.",
        "Compare the names in the message. To load only the names that both have, set `strict_loading=False`.",
    ),
    "LH922": Entry(
        "The folder contains the weights of another model.",
        "Compare the names in the message, and use the folder of the right model.",
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
        "The file contains objects other than tensors.",
        "If you trust the file, load it yourself, and pass the state dict to `load_weights`.",
    ),
    "LH928": Entry(
        "The folder contains several weight files without an index.",
        "Pass the path of one file, or a state dict with all tensors.",
    ),
    "LH929": Entry(
        "After an exception, a checkpoint cannot be saved, because the ranks may have failed in different places.",
        "Save checkpoints regularly with `ModelCheckpoint(every_n_train_steps=...)`, and resume from the last one.",
    ),
    "LH930": Entry(
        "Sharded checkpoints do not support `storage_options`.",
        "Set `save_distributed_checkpoint=False`, and use your own checkpoint plugin.",
    ),
    "LH931": Entry(
        "`async_save=True` and `AsyncCheckpointIO` both save checkpoints in the background.",
        "Remove one of the two.",
    ),
    "LH932": Entry(
        "The plugin writes a single file, but sharded checkpoints are directories.",
        "Remove the plugin, or set `save_distributed_checkpoint=False`.",
    ),
    "LH934": Entry(
        "The number of replicas has changed in the middle of an epoch, and the loader does not record which"
        " samples were used.",
        "Resume from the end of an epoch, or with the same number of replicas.",
    ),
    "LH935": Entry(
        "The epoch was started with another sampler and a different number of replicas.",
        "Resume from the end of an epoch, or with the same sampler.",
    ),
    "LH936": Entry(
        "The number of samples used so far in the epoch is not a multiple of the samples per step in the new layout.",
        "Set `global_batch_size`, or resume from the end of an epoch.",
    ),
}
