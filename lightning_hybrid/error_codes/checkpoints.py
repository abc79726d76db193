"""Errors of checkpoints and weights."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH901": Entry(
        "A file of the checkpoint or of the weights was changed or truncated, for example during a copy, or the"
        " save was interrupted.",
        "Copy the file again, or use another checkpoint.",
    ),
    "LH902": Entry(
        "The file is not a checkpoint of a Trainer. It may be a plain state dict.",
        "Use a checkpoint that a Trainer saved. To load only weights, use `initial_weights`.",
    ),
    "LH903": Entry(
        "`state_dict()` was called on a module that is still sharded.",
        "After a run, call `trainer.strategy.gather_module()` first, or use `trainer.save_checkpoint`.",
    ),
    "LH904": Entry(
        "A sharded module was saved with `torch.save`, `pickle`, safetensors or `save_pretrained`.",
        "In a hook, save inside `with self.trainer.strategy.full_parameters():`, or call `trainer.save_checkpoint`"
        " on every rank.",
    ),
    "LH905": Entry(
        "After a run, the module was used without being gathered: the run failed, the module is too large, or"
        " `gather_module_on_teardown=False` is set.",
        "After an error, load a checkpoint into a new module. Otherwise, call `trainer.strategy.gather_module()`.",
    ),
    "LH906": Entry(
        "`configure_optimizers` returns a different number of optimizers than in the run that saved the checkpoint.",
        "Return the same number of optimizers as in that run, or load only the weights.",
    ),
    "LH907": Entry(
        "`configure_optimizers` returns a different kind of optimizer than in the run that saved the checkpoint.",
        "Use the same kind of optimizer as in that run, or load only the weights.",
    ),
    "LH908": Entry(
        "The parameter groups of the optimizer have changed since the checkpoint was saved.",
        "Use the same parameter groups as before, or load only the weights.",
    ),
    "LH909": Entry(
        "The module or a callback saves different keys on different ranks, so the values of some tensors are missing.",
        "Save the same keys on every rank.",
    ),
    "LH910": Entry(
        "A callback saves parts of the model in a list or tuple, but sharded checkpoints store tensors by name.",
        "Save a dictionary in the callback, or set `save_distributed_checkpoint=False`.",
    ),
    "LH911": Entry(
        "The disk is full, or the path of the checkpoint is not writable.",
        "Free disk space, or use another path.",
    ),
    "LH912": Entry(
        "A directory of an earlier save is still at the path of the new checkpoint, and would be read instead of it.",
        "Remove the file that the message names.",
    ),
    "LH913": Entry(
        "No checkpoint or weight file exists at the path.",
        "Check the path. In a run on several nodes, at least one of them must have the file.",
    ),
    "LH914": Entry(
        "The checkpoint is incomplete, probably because the run was killed while it saved the checkpoint.",
        "Use another checkpoint, such as the previous one.",
    ),
    "LH915": Entry(
        "Some files of the checkpoint or of the weights are missing or are on another node.",
        "Copy all files into the directory, including `.metadata` if it is a sharded checkpoint.",
    ),
    "LH916": Entry(
        "Every rank writes its part of a sharded checkpoint, but the nodes do not share a disk at this path.",
        "Save to a disk that all nodes share, or set `save_distributed_checkpoint=False`.",
    ),
    "LH917": Entry(
        "Some nodes do not see the directory of the sharded checkpoint.",
        "Copy the directory to a disk that all nodes share, or convert it to one file with `lightning-hybrid"
        " consolidate`.",
    ),
    "LH920": Entry(
        "The checkpoint and the module have tensors with different names or shapes.",
        "Compare the names and shapes in the message. To load only the names that both have, set"
        " `strict_loading=False`.",
    ),
    "LH922": Entry(
        "No tensor name in the folder matches a name in the module, so the folder contains the weights of another"
        " model.",
        "Compare the names in the message, and use the folder that belongs to your model.",
    ),
    "LH923": Entry(
        "The tensor names in the Hugging Face folder match several parts of the module equally well.",
        "Load the weights yourself, and pass a state dict with the module's names to `load_weights`.",
    ),
    "LH925": Entry(
        "The file or object does not contain a dictionary of tensors.",
        "Pass a state dict to `load_weights`.",
    ),
    "LH927": Entry(
        "The weight file contains objects other than tensors.",
        "If you trust the file, load it yourself, and pass the state dict to `load_weights`.",
    ),
    "LH928": Entry(
        "The folder contains several weight files without an index.",
        "Pass the path of one of the files to `load_weights`. If you need several files, pass a state dict with"
        " all tensors.",
    ),
    "LH929": Entry(
        "After an exception, a checkpoint cannot be saved, because the ranks may have failed in different places.",
        "Save checkpoints regularly with `ModelCheckpoint(every_n_train_steps=...)`, and resume from the last"
        " checkpoint.",
    ),
    "LH930": Entry(
        "Sharded checkpoints do not support `storage_options`.",
        "Set `save_distributed_checkpoint=False`, and pass your own checkpoint plugin to the Trainer.",
    ),
    "LH931": Entry(
        "`async_save=True` is combined with the plugin `AsyncCheckpointIO`, but both save checkpoints in the"
        " background.",
        "Remove `async_save=True` or the plugin.",
    ),
    "LH932": Entry(
        "The checkpoint plugin writes files, but with `save_distributed_checkpoint=True`, every rank writes to a"
        " directory.",
        "Remove the plugin, or set `save_distributed_checkpoint=False`.",
    ),
    "LH934": Entry(
        "The checkpoint was saved in the middle of an epoch with a different number of replicas, and the samples"
        " used so far are not known for this kind of loader.",
        "Resume from a checkpoint saved at the end of an epoch, or use the same number of replicas as before.",
    ),
    "LH935": Entry(
        "The checkpoint was saved in the middle of an epoch with another sampler and a different number of replicas.",
        "Resume from a checkpoint saved at the end of an epoch, or use the same sampler as before.",
    ),
    "LH936": Entry(
        "The number of samples used before the checkpoint was saved is not a multiple of the samples per optimizer"
        " step in the new layout.",
        "Set the same `global_batch_size` before and after, or resume from a checkpoint saved at the end of an epoch.",
    ),
}
