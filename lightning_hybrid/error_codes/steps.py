"""Errors of steps of a pipeline."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH401": Entry(
        "A loss, a logged value or a hook reads parameters of layers on other stages.",
        "In a hook, use `with self.trainer.strategy.full_parameters():`. For a penalty on weights, use `weight_decay`.",
    ),
    "LH402": Entry(
        "The code calls `.numpy()` or `.tolist()` on a sharded parameter or gradient.",
        "Call the method inside `full_parameters()`.",
    ),
    "LH403": Entry(
        "`get_total_norm` received tensors other than the gradients of the module's parameters.",
        "Pass only the unmodified `p.grad` of the module's parameters.",
    ),
    "LH404": Entry(
        "In a step under ZeRO, `get_total_norm` finds no gradients, because each replica has only the gradients of"
        " its shards.",
        "Use `strategy.grad_norm()` or `clip_grad_norm_`.",
    ),
    "LH405": Entry(
        "A hook, or code after the run, calls the model, but some of its layers are on other stages.",
        "Use `trainer.predict`. After a run, call `trainer.strategy.gather_module()` before you call the model.",
    ),
    "LH406": Entry(
        "Code between layers reads activation values, for example with `.item()`, `if` or a boolean mask.",
        "Make the decision depend on the batch, or make it inside one layer. To find NaNs, use"
        " `Trainer(detect_anomaly=True)`.",
    ),
    "LH407": Entry(
        "A step computes derivatives through layers on several stages.",
        "Compute the derivatives inside one layer, or use a layout without a pipeline.",
    ),
    "LH408": Entry(
        "A step uses a parameter on a stage that does not have it, and the parameter cannot be sent there.",
        "Use the parameter on that stage in the first training batch too, for example as `x + 0 *"
        " parameter.sum()`. Or make it part of a layer.",
    ),
    "LH409": Entry(
        "A step reads a value that only a later stage has, and then uses a parameter of another stage.",
        "Use the parameter before reading the value, or use it on that stage in the first training batch too.",
    ),
    "LH410": Entry(
        "A step uses a parameter on a stage where the first training batch did not use it.",
        "Use the parameter on that stage in the first training batch too (`x + 0 * parameter.sum()`), or set"
        " `dynamic_shapes=True`.",
    ),
    "LH411": Entry(
        "With `zero_stage=3`, code around the layers reads parameters of layers, for example to compute a penalty.",
        "Use `zero_stage=2` or `zero_stage=1`.",
    ),
    "LH412": Entry(
        "Code around the layers reads a cache that is sharded over tensor-parallel ranks.",
        "Return the tensor from the layer.",
    ),
    "LH413": Entry(
        "A layer reads a cache that a layer on another stage wrote.",
        "Return the tensor from the layer that computes it, and pass it to the other layer as an argument.",
    ),
    "LH414": Entry(
        "A layer stores a result in an attribute, and code around the layers reads it.",
        "Return the result from the layer.",
    ),
    "LH415": Entry(
        "A function or a module uses parameters that are on different stages.",
        "Use these parameters inside one layer, or set `layer.pipeline_stage` so that they are on the same stage.",
    ),
    "LH416": Entry(
        "A step uses a tensor from another stage that is hidden in an object, or that it did not use in the first"
        " batch of these shapes.",
        "Pass the tensor as an argument, or set `dynamic_shapes=True`.",
    ),
    "LH417": Entry(
        "`full_parameters` received a module that is not part of the LightningModule.",
        "Pass a submodule of the LightningModule, or no argument.",
    ),
    "LH418": Entry(
        "A parameter was replaced inside `full_parameters`.",
        "Set the values with `parameter.copy_(...)` under `torch.no_grad()`.",
    ),
    "LH419": Entry(
        "A step under ZeRO enters `full_parameters`.",
        "Enter `full_parameters` in a hook, such as `on_train_batch_end`.",
    ),
    "LH420": Entry(
        "A hook enters `full_parameters` before the module is split.",
        "Enter `full_parameters` in a hook that runs after `configure_optimizers`.",
    ),
    "LH421": Entry(
        "A layer is called inside `full_parameters`.",
        "Call layers outside `full_parameters`.",
    ),
    "LH422": Entry(
        "A step sets an attribute of a tensor that is on another stage.",
        "Create a new tensor instead.",
    ),
    "LH424": Entry(
        "A moving average and the weights that it averages are on different stages.",
        "Use Lightning's `WeightAveraging`, or make the average and the weights part of one layer.",
    ),
    "LH425": Entry(
        "A hook assigns `p.grad = ...` for a parameter on another stage.",
        "Change `p.grad` in place, or use `full_parameters(gradients=True, writes=True)`.",
    ),
    "LH426": Entry(
        "A generation loop, which calls layers depending on earlier results, runs in a step that does not support it.",
        "Run the loop in `validation_step`, `test_step` or `predict_step`, or after the run and a call of"
        " `gather_module`.",
    ),
    "LH430": Entry(
        "A step calls an `nn.Sequential` body layer by layer, more than once, or not at all.",
        'Call `x = self.body(x)` exactly once, or set `body=["body"]` to allow calls of single layers.',
    ),
    "LH431": Entry(
        "The step takes a path that depends on something other than the batch, such as a counter or `random`.",
        "Make the path depend on the batch, or set `dynamic_shapes=True`.",
    ),
    "LH432": Entry(
        "The step took a different path, but cannot be repeated, because it had already written state that cannot"
        " be restored or begun to average gradients.",
        "Write the state in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH433": Entry(
        "The step runs different code on different ranks.",
        "Remove code such as `if self.global_rank == 0` from the step.",
    ),
    "LH434": Entry(
        "A generation step uses a private random generator, so ranks generate different tokens.",
        "Use the global generators of torch, numpy and `random`.",
    ),
    "LH435": Entry(
        "A step calls the same layer several times, as in a recurrence over the layers.",
        "Use a layout without a pipeline, or set `body` to layers that are called once.",
    ),
    "LH436": Entry(
        "Layers are called in a different order than the one in which they are defined.",
        "Set `body=[...]` as the message shows.",
    ),
    "LH437": Entry(
        "The structure of a layer's result depends on the data.",
        "Always return the same structure of tensors.",
    ),
    "LH438": Entry(
        "The shapes or Python values that stages send to each other depend on the data.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH440": Entry(
        "One call of `torch.utils.checkpoint` contains several layers, or random numbers that are drawn outside"
        " the layers.",
        "Checkpoint each layer separately, or use `recompute` instead.",
    ),
    "LH441": Entry(
        'With `recompute="selective"`, a layer runs different operations in backward than in forward, for example'
        " because of a counter or a private random generator.",
        "Make the layer deterministic, or exclude it: name only the other layers in `recompute=[...]`.",
    ),
    "LH442": Entry(
        "A step calls a collective that not all stages reach.",
        'Call the collective in a hook, or pass `group=self.device_mesh["data_parallel"].get_group()`.',
    ),
    "LH443": Entry(
        "A step calls `trainer.save_checkpoint`, `barrier` or `broadcast`.",
        "Call the method in a hook, such as `on_train_batch_end`.",
    ),
    "LH444": Entry(
        "A forward hook changes an output in some steps but not in others.",
        "Change the output in every step, or never.",
    ),
    "LH445": Entry(
        "Forward hooks collect values that code around the layers uses, but these values differ from the first"
        " step with the same shapes.",
        "Make sure that the hooks receive the same calls in every step.",
    ),
    "LH446": Entry(
        "The shapes that a layer returns depend on the values of its inputs.",
        "Move the code that depends on these values into the next layer, or set `dynamic_shapes=True`.",
    ),
    "LH447": Entry(
        "For the same batch shape, the input of the body was split into a different number of microbatches than"
        " before.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH448": Entry(
        "A step draws random numbers from its own generator, but stages run different parts of the step and would"
        " draw different numbers.",
        "Draw random numbers without `generator=`.",
    ),
    "LH449": Entry(
        "A function with a custom backward, or a hook on gradients, is applied outside the pipelined layers.",
        "Apply the function or the hook inside a layer.",
    ),
    "LH450": Entry(
        "A layer changes a list or dictionary that it receives, but other stages do not see the change.",
        "Return the new value from the layer.",
    ),
    "LH451": Entry(
        "A step reads from an iterator that is an attribute of the module.",
        "Add the data to the batch with Lightning's `CombinedLoader`.",
    ),
    "LH460": Entry(
        "A layer changes a tensor in place (`x.add_(...)`), and another stage uses it afterward.",
        "Use the value that the layer returns.",
    ),
    "LH461": Entry(
        "A step writes a buffer or an attribute on one stage and reads it on another stage.",
        "Read and write the value inside one layer, or write it in a hook.",
    ),
    "LH462": Entry(
        "A step updates a parameter from a parameter on a different stage, as a teacher from a student.",
        "Set the same `layer.pipeline_stage` for both layers, or update the parameter in a hook.",
    ),
    "LH463": Entry(
        "A step writes a parameter that several stages have, with values that only one stage has.",
        "Write the parameter in a hook, or make it part of a layer.",
    ),
    "LH464": Entry(
        "A step writes a parameter that another stage uses in the same step.",
        "Write the parameter in a hook, such as `on_train_batch_end`.",
    ),
    "LH465": Entry(
        "A generation step writes a parameter that only some stages have.",
        "Write the parameter in a hook, such as `on_validation_batch_end`.",
    ),
    "LH466": Entry(
        "A step writes a parameter, and the written values differ between microbatches.",
        "Set `num_microbatches=1`, or write the parameter in a hook.",
    ),
    "LH467": Entry(
        "A step uses a parameter both before and after writing it.",
        "Set `num_microbatches=1`, or write the parameter in a hook.",
    ),
    "LH468": Entry(
        "A step writes values that require gradients into a buffer.",
        "Write `x.detach()` into the buffer, or write under `torch.no_grad()`.",
    ),
    "LH469": Entry(
        "A gradient hook is on a tensor that several stages compute, so each stage has only a part of the gradient.",
        "Register the hook on a new tensor that was not written in place, such as the result of `x = x * 1`.",
    ),
    "LH470": Entry(
        "A stage writes to a tensor in place, but an earlier stage has sent a view of the tensor.",
        "Create a new tensor instead.",
    ),
    "LH471": Entry(
        "The code assigns a tensor of a different shape or dtype to `parameter.data`.",
        "Assign a tensor of the same shape and dtype.",
    ),
    "LH472": Entry(
        "A step changes an attribute that it did not change in the first batch of these shapes.",
        "Change the attribute in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH473": Entry(
        "A step reads a value that only the last stage has, and then writes state.",
        "Write the state before reading the value, or in a hook.",
    ),
}
