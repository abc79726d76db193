"""Errors of steps of a pipeline."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH401": Entry(
        "A loss, a log or a hook reads weights of all stages.",
        "In a hook, use `with self.trainer.strategy.full_parameters():`. For a penalty, use `weight_decay`.",
    ),
    "LH402": Entry(
        "`.numpy()` or `.tolist()` of a sharded parameter or gradient.",
        "Call it inside `full_parameters()`.",
    ),
    "LH403": Entry(
        "`get_total_norm` got copies or other tensors.",
        "Pass only `p.grad` of the module's parameters.",
    ),
    "LH404": Entry(
        "A replica has gradients of its shards only.",
        "Use `strategy.grad_norm()` or `clip_grad_norm_`.",
    ),
    "LH405": Entry(
        "The model is called in a hook, or after the run.",
        "Use `trainer.predict`, or `trainer.strategy.gather_module()` after the run.",
    ),
    "LH406": Entry(
        "`.item()`, `if`, or a boolean mask on activations between layers.",
        "Decide from the batch, or inside one layer. To find NaNs, use `Trainer(detect_anomaly=True)`.",
    ),
    "LH407": Entry(
        "A step computes derivatives through layers on several stages.",
        "Compute them inside one layer, or use a layout without a pipeline.",
    ),
    "LH408": Entry(
        "A step uses a parameter on a stage that does not have it, and sharding prevents sending it.",
        "Use it in the first training batch (`x + 0 * parameter.sum()`), or make it part of a layer.",
    ),
    "LH409": Entry(
        "A step uses a parameter of another stage after it has read a value of the last stage.",
        "Use the parameter before, or in the first training batch.",
    ),
    "LH410": Entry(
        "A later step uses a parameter on another stage than the first step.",
        "Use it in the first batch (`x + 0 * parameter.sum()`), or set `dynamic_shapes=True`.",
    ),
    "LH411": Entry(
        "Code around the layers reads parameters of layers, such as a penalty.",
        "Use `zero_stage=2`.",
    ),
    "LH412": Entry(
        "Code around the layers reads a cache, and tensor-parallel ranks have parts of it.",
        "Return the tensor from the layer.",
    ),
    "LH413": Entry(
        "A layer reads a cache that a layer of another stage wrote.",
        "Return the tensor, and pass it to the other layer.",
    ),
    "LH414": Entry(
        "A layer keeps a result in an attribute, and code around the layers reads it.",
        "Return it.",
    ),
    "LH415": Entry(
        "A function uses parameters that are on different stages.",
        "Use them inside one layer, or set the same `layer.pipeline_stage`.",
    ),
    "LH416": Entry(
        "A tensor of another stage is hidden in an object, or was not used in the first such batch.",
        "Pass it as a tensor argument, or set `dynamic_shapes=True`.",
    ),
    "LH417": Entry(
        "`full_parameters` got a module that is not part of the LightningModule.",
        "Pass a submodule, or nothing.",
    ),
    "LH418": Entry(
        "A parameter was replaced inside `full_parameters`.",
        "Use `parameter.copy_(...)` under `torch.no_grad()`.",
    ),
    "LH419": Entry(
        "`full_parameters` was entered in a step under ZeRO.",
        "Enter it in a hook, such as `on_train_batch_end`.",
    ),
    "LH420": Entry(
        "`full_parameters` was entered before the module was split.",
        "Enter it in a hook after `configure_optimizers`.",
    ),
    "LH421": Entry(
        "A layer is called inside `full_parameters`.",
        "Call layers outside of it.",
    ),
    "LH422": Entry(
        "An attribute of a tensor of another stage is set.",
        "Make a new tensor.",
    ),
    "LH424": Entry(
        "An average of weights is on another stage than the weights.",
        "Use `WeightAveraging`, or use both in one layer.",
    ),
    "LH425": Entry(
        "A hook assigns `p.grad = ...`.",
        "Change `p.grad` in place, or use `full_parameters(gradients=True, writes=True)`.",
    ),
    "LH426": Entry(
        "A generation loop calls layers depending on results, in a step that cannot follow it.",
        "Call it in `validation_step`, `test_step` or `predict_step`, or after the run.",
    ),
    "LH430": Entry(
        "An `nn.Sequential` is called layer by layer, twice or not at all.",
        'Write `x = self.body(x)`, or set `body=["body"]`.',
    ),
    "LH431": Entry(
        "Code of the step depends on a counter or on Python's `random`.",
        "Let it depend on the batch, or set `dynamic_shapes=True`.",
    ),
    "LH432": Entry(
        "The path changed after the step wrote state that cannot be restored, or began to average gradients.",
        "Write the state in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH433": Entry(
        "Code of the step depends on the rank.",
        "Remove `if self.global_rank == 0` from the step.",
    ),
    "LH434": Entry(
        "A generation step uses a private random generator.",
        "Use the global generators of torch, numpy and `random`.",
    ),
    "LH435": Entry(
        "A step calls a layer several times: a recurrence over the layers.",
        "Use a layout without a pipeline, or set `body` to layers that are called once.",
    ),
    "LH436": Entry(
        "Layers are called in another order than they are defined.",
        "Set the `body=[...]` of the message.",
    ),
    "LH437": Entry(
        "The result of a layer depends on values.",
        "Always return the same structure of tensors.",
    ),
    "LH438": Entry(
        "Shapes or plain values between stages depend on values.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH440": Entry(
        "One checkpoint contains several layers.",
        "Checkpoint each layer, or set `recompute`.",
    ),
    "LH441": Entry(
        "A recomputed layer uses a counter or a private generator.",
        "Make it deterministic, or turn `recompute` off.",
    ),
    "LH442": Entry(
        "A step calls a collective, which not all stages reach.",
        'Call it in a hook, or use the group of `self.device_mesh["data_parallel"]`.',
    ),
    "LH443": Entry(
        "A step calls `trainer.save_checkpoint`, `barrier` or `broadcast`.",
        "Call it in a hook, such as `on_train_batch_end`.",
    ),
    "LH444": Entry(
        "A forward hook changes an output in some steps only.",
        "Change it always, or never.",
    ),
    "LH445": Entry(
        "Forward hooks collect other values in later steps.",
        "Let hooks see the same calls in every step.",
    ),
    "LH446": Entry(
        "The shapes that a layer returns depend on values.",
        "Move the code into the next layer, or set `dynamic_shapes=True`.",
    ),
    "LH447": Entry(
        "The input of the body has another number of parts for the same batch shape.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH448": Entry(
        "A step draws from its own generator, and stages run different parts of the step.",
        "Draw without `generator=`.",
    ),
    "LH449": Entry(
        "A function is applied outside of the pipelined layers, and its backward cannot be split.",
        "Call it inside a layer.",
    ),
    "LH450": Entry(
        "A layer changes a list or dictionary that it receives.",
        "Return the new value.",
    ),
    "LH451": Entry(
        "A step reads an iterator of the module.",
        "Put the data into the batch, with `CombinedLoader`.",
    ),
    "LH460": Entry(
        "`x.add_(...)` in a layer.",
        "Use the result of the layer.",
    ),
    "LH461": Entry(
        "Another stage reads the state in the next step.",
        "Keep it inside one layer, or write it in a hook.",
    ),
    "LH462": Entry(
        "A teacher and its student are on different stages.",
        "Set the same `layer.pipeline_stage`, or write it in a hook.",
    ),
    "LH463": Entry(
        "A parameter of several stages is written with values of one stage.",
        "Write it in a hook, or make it part of a layer.",
    ),
    "LH464": Entry(
        "A step writes a parameter that another stage uses in the same step.",
        "Write it in a hook, such as `on_train_batch_end`.",
    ),
    "LH465": Entry(
        "A generation step writes a parameter that some stages have.",
        "Write it in a hook, such as `on_validation_batch_end`.",
    ),
    "LH466": Entry(
        "The value that a step writes depends on the microbatch.",
        "Set `num_microbatches=1`, or write it in a hook.",
    ),
    "LH467": Entry(
        "A step uses a parameter before and after it writes it.",
        "Set `num_microbatches=1`, or write it in a hook.",
    ),
    "LH468": Entry(
        "A buffer is written with values that have gradients.",
        "Use `x.detach()` or `torch.no_grad()`.",
    ),
    "LH469": Entry(
        "Several stages have a part of the gradient that a hook reads.",
        "Put the hook on `x = x * 1`.",
    ),
    "LH470": Entry(
        "A later stage writes into a tensor of which an earlier stage sent a view.",
        "Make a new tensor.",
    ),
    "LH471": Entry(
        "`parameter.data` gets a tensor of another shape or dtype.",
        "Keep shape and dtype.",
    ),
    "LH472": Entry(
        "A step changes an attribute that it did not change when it was traced.",
        "Change it in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH473": Entry(
        "A step writes state after it has read a value of the last stage.",
        "Write it before, or in a hook.",
    ),
}
