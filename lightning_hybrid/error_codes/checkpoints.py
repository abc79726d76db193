"""Errors of checkpoints and weights."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH901": Entry(
        "A checkpoint or weight file is damaged or incomplete, for example because the file was not copied or saved"
        " completely.",
        "Copy the file again, or use another checkpoint.",
    ),
    "LH902": Entry(
        "The file is not a checkpoint that a Trainer saved. For example, it contains only a state dict.",
        "Use a checkpoint that a Trainer saved. To load only weights, set `initial_weights` to the path of the file.",
    ),
    "LH903": Entry(
        "`state_dict()` was called on a module that is still sharded.",
        "After a run of the Trainer, call `trainer.strategy.gather_module()` before `state_dict()`. To save the full"
        " model, call `trainer.save_checkpoint` on every rank.",
    ),
    "LH904": Entry(
        "A sharded module was saved with `torch.save`, `pickle`, safetensors or `save_pretrained`.",
        "In a hook, save the module inside `with self.trainer.strategy.full_parameters():`, or call"
        " `trainer.save_checkpoint` on every rank.",
    ),
    "LH905": Entry(
        "The module was called after a run of the Trainer, but the module is still sharded. The run failed, the module"
        " is too large to be gathered automatically, or `gather_module_on_teardown=False` is set.",
        "If the run failed, load a checkpoint into a new module. Otherwise, call `trainer.strategy.gather_module()`"
        " before you use the module.",
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
        "Use the same parameter groups as when the checkpoint was saved, or load only the weights.",
    ),
    "LH909": Entry(
        "The module or a callback saves different keys on different ranks, so the checkpoint would contain tensors"
        " without values.",
        "Save the same keys on every rank.",
    ),
    "LH910": Entry(
        "A callback saves parts of the model in a list or tuple, but sharded checkpoints store tensors by name.",
        "In the callback, save a dictionary instead, or set `save_distributed_checkpoint=False`.",
    ),
    "LH911": Entry(
        "The disk is full, or the path of the checkpoint is not writable.",
        "Free up disk space, or use another path.",
    ),
    "LH912": Entry(
        "The new checkpoint was saved, but a directory with an earlier checkpoint at the same path could not be"
        " removed. When you load from this path, the earlier checkpoint is loaded instead of the new one.",
        "Remove the file that the message names. The strategy then no longer treats the directory as a checkpoint.",
    ),
    "LH913": Entry(
        "No checkpoint or weight file exists at the path.",
        "Check the path. In a run on several nodes, at least one node must have the file.",
    ),
    "LH914": Entry(
        "The checkpoint is incomplete, probably because the run was killed during the save.",
        "Use another checkpoint, such as an earlier one.",
    ),
    "LH915": Entry(
        "Some files of a checkpoint or of a folder with weights are missing on a node.",
        "Copy all files into the directory on this node, including the file `.metadata` of a sharded checkpoint.",
    ),
    "LH916": Entry(
        "Every rank writes its part of a sharded checkpoint into the same directory, but this directory is not on a"
        " disk that all nodes share.",
        "Save to a disk that all nodes share, or set `save_distributed_checkpoint=False`.",
    ),
    "LH917": Entry(
        "Some nodes cannot read the directory of the sharded checkpoint.",
        "Copy the directory to a disk that all nodes share, or convert the checkpoint to one file with"
        " `lightning-hybrid consolidate`.",
    ),
    "LH920": Entry(
        "The names or shapes of tensors in the checkpoint differ from those in the module.",
        "Compare the names and shapes in the message. To load only the tensors whose names match, set"
        " `self.strict_loading = False` in the module.",
    ),
    "LH922": Entry(
        "No tensor name in the Hugging Face folder matches a name in the module, so the folder probably contains the"
        " weights of another model.",
        "Compare the names in the message, and use the folder with the weights of your model.",
    ),
    "LH923": Entry(
        "The tensor names in the Hugging Face folder match several parts of the module equally well.",
        "Read the files yourself, rename the tensors to match the module, and pass the resulting state dict to"
        " `load_weights`.",
    ),
    "LH937": Entry(
        "The tensors of the Hugging Face folder cannot be converted to the tensors of the model, for example because"
        " an expert is missing.",
        "Check that the folder is complete, and that its `config.json` matches the model.",
    ),
    "LH925": Entry(
        "The file, or the object passed to `load_weights`, does not contain a dictionary of named tensors.",
        "Use a file that contains a state dict, or pass a state dict to `load_weights`.",
    ),
    "LH927": Entry(
        "The file contains objects other than tensors, and loading such objects can run arbitrary code.",
        "If you trust the file, load it yourself, and pass the state dict to `load_weights`.",
    ),
    "LH928": Entry(
        "The folder contains weight files, but neither `model.safetensors` nor an index that lists the files.",
        "If one file contains all weights, pass the path of this file to `load_weights`. Otherwise, pass a state dict"
        " with the tensors of all files.",
    ),
    "LH929": Entry(
        "A checkpoint cannot be saved after an exception. All ranks must take part in saving, but only some of them"
        " may have raised the exception.",
        "Save checkpoints regularly with `ModelCheckpoint(every_n_train_steps=...)`, and resume from the last"
        " checkpoint.",
    ),
    "LH930": Entry(
        "Sharded checkpoints do not support `storage_options`.",
        "Set `save_distributed_checkpoint=False`, and pass the Trainer a checkpoint plugin that accepts storage"
        " options.",
    ),
    "LH931": Entry(
        "`async_save=True` is combined with the plugin `AsyncCheckpointIO`. Both save checkpoints in the background,"
        " and neither waits for the other.",
        "Remove `async_save=True` or the plugin.",
    ),
    "LH932": Entry(
        "The checkpoint plugin would not be used, because with `save_distributed_checkpoint=True`, every rank writes"
        " its own files to a directory.",
        "Remove the plugin, or set `save_distributed_checkpoint=False`.",
    ),
    "LH934": Entry(
        "The checkpoint was saved in the middle of an epoch, and the number of replicas has changed since then. With"
        " your data loader, the strategy cannot determine which samples of the epoch were already used.",
        "Resume from a checkpoint that was saved at the end of an epoch, or use the same number of replicas as when"
        " this checkpoint was saved.",
    ),
    "LH935": Entry(
        "The checkpoint was saved in the middle of an epoch. Since then, the sampler has changed, and so has the"
        " number of replicas or the batch size.",
        "Resume from a checkpoint that was saved at the end of an epoch, or use the same sampler as when this"
        " checkpoint was saved.",
    ),
    "LH936": Entry(
        "The checkpoint was saved in the middle of an epoch. The number of samples used until then is not a multiple"
        " of the current number of samples per optimizer step.",
        "Use the same `global_batch_size` as when the checkpoint was saved, or resume from a checkpoint that was saved"
        " at the end of an epoch.",
    ),
}
