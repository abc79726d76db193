"""Errors of steps of a pipeline."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH401": Entry(
        "A loss, a logged value or a hook reads parameters of layers on other stages, but this rank does not have"
        " their values.",
        "In a hook, read the parameters inside `with self.trainer.strategy.full_parameters():`. To penalize"
        " weights, use the `weight_decay` of the optimizer.",
    ),
    "LH402": Entry(
        "The code calls `.numpy()` or `.tolist()` on a sharded parameter or gradient.",
        "Call the method inside `with self.trainer.strategy.full_parameters():`, and add `gradients=True` to read"
        " gradients.",
    ),
    "LH403": Entry(
        "`get_total_norm` received other tensors together with the gradients of the module's parameters.",
        "Pass only the unmodified gradients (`p.grad`) of the module's parameters.",
    ),
    "LH404": Entry(
        "`get_total_norm` was called in a step under ZeRO, where it finds no gradients, because each replica has"
        " only the gradients of its shards.",
        "Use `self.trainer.strategy.grad_norm()` or `torch.nn.utils.clip_grad_norm_`.",
    ),
    "LH405": Entry(
        "A layer was called in a hook, after the run, or alone in a step, but the layer is on another stage.",
        "In a step, call the whole body once. In a hook, use `trainer.predict`. After the run, call"
        " `trainer.strategy.gather_module()` before you call the model.",
    ),
    "LH406": Entry(
        "Code between layers reads the values of activations, for example with `.item()`, `if` or a boolean mask.",
        "Make the decision depend only on the batch, or make it inside one layer. To find NaNs, use"
        " `Trainer(detect_anomaly=True)`.",
    ),
    "LH407": Entry(
        "A step computes derivatives through layers on several stages, but no rank has the full autograd graph.",
        "Compute the derivatives inside one layer, or use a layout without a pipeline.",
    ),
    "LH408": Entry(
        "A step uses a parameter on a stage that does not have it, and the parameter cannot be sent there.",
        "Use the parameter on that stage in the first training batch too, for example by adding `0 *"
        " parameter.sum()` to a tensor. Or make the parameter part of a layer.",
    ),
    "LH409": Entry(
        "A step reads a value that only a later stage has, and then uses a parameter that is on another stage.",
        "Use the parameter before you read the value, or make sure that the first training batch also uses the"
        " parameter on the later stage.",
    ),
    "LH410": Entry(
        "A step uses a parameter on a stage where the first training batch did not use it.",
        "Use the parameter on that stage in the first training batch too, for example with `x + 0 *"
        " parameter.sum()`, or set `dynamic_shapes=True`.",
    ),
    "LH411": Entry(
        "With `zero_stage=3`, code around the layers reads the parameters of a layer, for example to compute a"
        " penalty, but each replica has only a shard of them.",
        "Use `zero_stage=2` or `zero_stage=1`.",
    ),
    "LH412": Entry(
        "Code around the layers reads a tensor that a layer stored in an object, such as a cache, but this tensor"
        " is sharded over tensor-parallel ranks.",
        "Return the tensor from the layer instead of storing it.",
    ),
    "LH413": Entry(
        "A layer reads a tensor that a layer on another stage stored in an object, such as a cache.",
        "Return the tensor from the layer that computes it, and pass the tensor to the other layer as an argument.",
    ),
    "LH414": Entry(
        "A layer stores a result in an attribute instead of returning it, and code around the layers reads the"
        " attribute.",
        "Return the result from the layer.",
    ),
    "LH415": Entry(
        "A function or a module uses parameters of several stages, so no stage has all of these parameters.",
        "Use these parameters inside one layer, or set `layer.pipeline_stage` so that they are on the same stage.",
    ),
    "LH416": Entry(
        "A step uses a tensor from another stage that is hidden in an object, or that the step did not use in the"
        " first batch with the same shapes.",
        "Pass the tensor as an argument to the code that uses it, or set `dynamic_shapes=True`.",
    ),
    "LH417": Entry(
        "`full_parameters` was called with a module that is not part of the LightningModule.",
        "Pass a submodule of the LightningModule, or call `full_parameters` without an argument.",
    ),
    "LH418": Entry(
        "A parameter was replaced by another one inside `full_parameters`.",
        "Keep the parameter, and write its values with `parameter.copy_(...)` under `torch.no_grad()`.",
    ),
    "LH419": Entry(
        "`full_parameters` was entered in a step under ZeRO, where the parameters of some layers are already gathered.",
        "Enter `full_parameters` in a hook, such as `on_train_batch_end`.",
    ),
    "LH420": Entry(
        "`full_parameters` was entered before the module was sharded.",
        "Enter `full_parameters` in `configure_optimizers` or in a later hook.",
    ),
    "LH421": Entry(
        "A layer was called inside `full_parameters`, where its parameters are full, but the layer expects the"
        " shard of this rank.",
        "Call layers before or after the `full_parameters` block.",
    ),
    "LH422": Entry(
        "A step sets an attribute of a tensor that is on another stage.",
        "Create a new tensor instead of changing the existing one.",
    ),
    "LH424": Entry(
        "A hook averages weights, but the average and the weights are on different stages.",
        "Use Lightning's `WeightAveraging`, or make both the average and the weights part of one layer.",
    ),
    "LH425": Entry(
        "A hook assigns `p.grad = ...` for a parameter on another stage.",
        "Change `p.grad` in place, or assign it inside `full_parameters(gradients=True, writes=True)`.",
    ),
    "LH426": Entry(
        "A generation loop, in which earlier results decide which layers are called next, runs in a step that does"
        " not support such loops.",
        "Run the loop in `validation_step`, `test_step` or `predict_step`. Or run it after the training run, once"
        " you have called `gather_module`.",
    ),
    "LH430": Entry(
        "A step calls the layers of an `nn.Sequential` body one by one, or calls the body more than once or not at"
        " all.",
        'Call `x = self.body(x)` exactly once in each step, or set `body=["body"]` to allow calls of single layers.',
    ),
    "LH431": Entry(
        "A step takes a path that depends on something other than the batch, such as a counter or `random`.",
        "Make the path depend only on the batch, or set `dynamic_shapes=True`.",
    ),
    "LH432": Entry(
        "The step took a different path than before, and cannot be repeated, because it had already written state"
        " that cannot be restored or had begun to average gradients.",
        "Write the state in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH433": Entry(
        "The step runs different code on different ranks.",
        "Remove code such as `if self.global_rank == 0` from the step.",
    ),
    "LH434": Entry(
        "A step with a generation loop draws random numbers from its own generator, so ranks generate different"
        " tokens.",
        "Use the global generators of torch, numpy and `random`.",
    ),
    "LH435": Entry(
        "A step calls the same layer several times, as in a recurrence over the layers.",
        "Use a layout without a pipeline, or set `body` to layers that are called only once in a step.",
    ),
    "LH436": Entry(
        "A step calls the layers in a different order than the one in which they are defined.",
        "Set `body=[...]` to the list that the message shows.",
    ),
    "LH437": Entry(
        "The structure of a layer's result depends on the data, so other stages cannot know it in advance.",
        "Return tensors from the layer, always in the same structure.",
    ),
    "LH438": Entry(
        "The shapes or Python values that stages send to each other differ between batches of the same shapes.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH440": Entry(
        "One call of `torch.utils.checkpoint` contains several layers, or random numbers that are drawn outside"
        " the layers.",
        "Checkpoint each layer separately, or use the argument `recompute` of the strategy instead.",
    ),
    "LH441": Entry(
        'With `recompute="selective"`, a layer runs different operations in backward than in forward, for example'
        " because of a counter or a private random generator.",
        "Make the layer run the same operations each time, or exclude it: list only the other layers in"
        " `recompute=[...]`.",
    ),
    "LH442": Entry(
        "A step calls a collective that not all stages reach.",
        "Call the collective in a hook, or restrict it to the replicas with"
        ' `group=self.device_mesh["data_parallel"].get_group()`.',
    ),
    "LH443": Entry(
        "A step calls `trainer.save_checkpoint`, `barrier` or `broadcast`.",
        "Call the method in a hook, such as `on_train_batch_end`.",
    ),
    "LH444": Entry(
        "A forward hook changes the output of a module in some steps but not in others.",
        "Change the output in every step, or never.",
    ),
    "LH445": Entry(
        "Code around the layers uses values that forward hooks collect, but the hooks received different values"
        " than in the first step with the same shapes.",
        "Make sure that the hooks see the same calls in every step.",
    ),
    "LH446": Entry(
        "The shapes that a layer returns depend on the values of its inputs.",
        "Move the code that depends on these values into the layer that uses its result, or set `dynamic_shapes=True`.",
    ),
    "LH447": Entry(
        "The input of the body was split into different numbers of microbatches for batches of the same shapes.",
        "If the shape of this input depends on values in the batch, set `dynamic_shapes=True`.",
    ),
    "LH448": Entry(
        "A step draws random numbers from its own generator, but each stage runs a different part of the step and"
        " would draw different numbers.",
        "Draw the random numbers without `generator=`.",
    ),
    "LH449": Entry(
        "A function with a custom backward, or a hook on gradients, is used outside the pipelined layers.",
        "Use the function or the hook inside a layer.",
    ),
    "LH450": Entry(
        "A layer changes a list or dictionary that it receives, but other stages do not see the change.",
        "Return the new value from the layer instead.",
    ),
    "LH451": Entry(
        "A step reads from an iterator that is an attribute of the module.",
        "Make the data part of the batch with Lightning's `CombinedLoader`.",
    ),
    "LH460": Entry(
        "A layer changes a tensor in place, for example with `x.add_(...)`, and another stage uses this tensor"
        " afterward.",
        "Use the value that the layer returns instead of the changed tensor.",
    ),
    "LH461": Entry(
        "A step writes a buffer or an attribute on one stage and reads it on another stage.",
        "Read and write the value inside one layer, or write it before the layers or in a hook.",
    ),
    "LH462": Entry(
        "A step sets a parameter from a parameter on a different stage, for example a teacher's from a student's.",
        "Set the same `layer.pipeline_stage` for the layers of both parameters, or write the parameter in a hook.",
    ),
    "LH463": Entry(
        "A step writes a parameter that several stages have, but the written values exist only on the last stage.",
        "Write the parameter in a hook, or make the parameter part of a layer.",
    ),
    "LH464": Entry(
        "A step writes a parameter, and another stage uses this parameter in the same step.",
        "Write the parameter in a hook, such as `on_train_batch_end`.",
    ),
    "LH465": Entry(
        "A step with a generation loop writes a parameter that only some stages have.",
        "Write the parameter in a hook, such as `on_validation_batch_end`.",
    ),
    "LH466": Entry(
        "`training_step` writes a parameter, and the written values differ between microbatches.",
        "Set `num_microbatches=1`, or write the parameter in a hook.",
    ),
    "LH467": Entry(
        "A step with several microbatches writes a parameter that it uses both before and after the write, or that"
        " several stages of a rank have.",
        "Set `num_microbatches=1`, or write the parameter in a hook.",
    ),
    "LH468": Entry(
        "A step writes values that require gradients into a buffer.",
        "Write `x.detach()` into the buffer, or write under `torch.no_grad()`.",
    ),
    "LH469": Entry(
        "A hook is registered on the gradient of a tensor that several stages compute, so each stage has only a"
        " part of the gradient.",
        "Create a new tensor, for example with `y = x * 1`, and never modify it in place. Register the hook on this"
        " tensor, and use the tensor from there on.",
    ),
    "LH470": Entry(
        "A stage writes to a tensor in place, but an earlier stage has already sent a view of this tensor.",
        "Create a new tensor instead of writing in place.",
    ),
    "LH471": Entry(
        "The code assigns a tensor of a different shape or dtype to `parameter.data`.",
        "Assign a tensor with the shape and dtype of the parameter.",
    ),
    "LH472": Entry(
        "A step changes an attribute that it did not change in the first batch with the same shapes.",
        "Change the attribute in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH473": Entry(
        "A step reads a value that only the last stage has, and then writes state that other stages read.",
        "Write the state before the value is read, or write it in a hook.",
    ),
}
