"""Errors of steps of a pipeline."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH401": Entry(
        "A step or a hook reads parameters of layers on other stages, for example to compute a loss or a logged value."
        " This rank does not have the values of these parameters.",
        "In a hook, read the parameters inside `with self.trainer.strategy.full_parameters():`. To penalize weights,"
        " use the `weight_decay` of the optimizer.",
    ),
    "LH402": Entry(
        "The code calls `.numpy()` or `.tolist()` on a sharded parameter or gradient.",
        "Call the method inside `with self.trainer.strategy.full_parameters():`. To read gradients, pass"
        " `gradients=True` to `full_parameters`.",
    ),
    "LH403": Entry(
        "`get_total_norm` received the gradients of the module's parameters together with other tensors, which would"
        " be counted once per rank.",
        "Pass only the unmodified gradients (`p.grad`) of the module's parameters.",
    ),
    "LH404": Entry(
        "With ZeRO, `get_total_norm` finds no gradients in a step, because each replica has only the gradients of its"
        " own shards.",
        "Use `self.trainer.strategy.grad_norm()` or `torch.nn.utils.clip_grad_norm_`.",
    ),
    "LH405": Entry(
        "This rank called a layer that is on another stage. The call came from a hook, from code after the run, or"
        " from a step that calls layers one by one.",
        "In a step, call the whole body exactly once. To run the model outside of steps, use `trainer.predict`, or"
        " first call `trainer.strategy.gather_module()` on every rank after the run.",
    ),
    "LH406": Entry(
        "Code between pipelined layers reads the values of activations, for example with `.item()`, `if` or a boolean"
        " mask, but only one stage has these values.",
        "Use only values of the batch in this code, or move the code into one layer. To find NaNs, use"
        " `Trainer(detect_anomaly=True)`.",
    ),
    "LH407": Entry(
        "A step computes derivatives through layers on several stages, for example with `torch.autograd.grad`, but no"
        " rank has the autograd graph of all these layers.",
        "Compute the derivatives inside one layer, or use a layout without a pipeline.",
    ),
    "LH408": Entry(
        "A step uses a parameter on a stage that does not have it, and the parameter cannot be sent there.",
        "Use the parameter on that stage in the first training batch too, for example by adding `0 * parameter.sum()`"
        " to a tensor. Alternatively, make the parameter part of a layer.",
    ),
    "LH409": Entry(
        "A step reads a value that only a later stage has, and afterward uses a parameter that this later stage does"
        " not have.",
        "Use the parameter before you read the value. Alternatively, use the parameter on the later stage in the first"
        " training batch too.",
    ),
    "LH410": Entry(
        "A step uses a parameter on a stage that did not use this parameter in the first training batch.",
        "Use the parameter on that stage in the first training batch too, for example with `x + 0 *"
        " parameter.sum()`, or set `dynamic_shapes=True`.",
    ),
    "LH411": Entry(
        "With `zero_stage=3`, each replica has only a shard of the parameters of a layer, but code around the layers"
        " reads these parameters, for example to compute a penalty.",
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
        "A function or a module uses parameters that are on different stages, so no stage has all of them.",
        "Use these parameters inside one layer, or set `layer.pipeline_stage` so that they are on the same stage.",
    ),
    "LH416": Entry(
        "A step uses a tensor from another stage that was not sent to this stage. Either the tensor is hidden in an"
        " object, or the step did not use the tensor in the first batch with the same shapes.",
        "Pass the tensor as an argument to the code that uses it, or set `dynamic_shapes=True`.",
    ),
    "LH417": Entry(
        "`full_parameters` was called with a module that is not part of the LightningModule.",
        "Pass a submodule of the LightningModule, or call `full_parameters` without an argument.",
    ),
    "LH418": Entry(
        "A parameter was replaced by another one inside `full_parameters`.",
        "Keep the parameter, and change its values with `parameter.copy_(...)` under `torch.no_grad()`.",
    ),
    "LH419": Entry(
        "`full_parameters` was entered in a step. With ZeRO, the parameters of some layers are already gathered at"
        " that time.",
        "Enter `full_parameters` in a hook, such as `on_train_batch_end`.",
    ),
    "LH420": Entry(
        "`full_parameters` was entered before the module was sharded.",
        "Enter `full_parameters` in `configure_optimizers` or in a later hook.",
    ),
    "LH421": Entry(
        "A layer was called inside `full_parameters`. Inside this context, the layer has its full parameters, but its"
        " code expects only the shard of this rank.",
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
        "A hook assigns `p.grad = ...` for a parameter on another stage, so the new gradient would be lost.",
        "Change `p.grad` in place, or assign it inside `full_parameters(gradients=True, writes=True)`.",
    ),
    "LH426": Entry(
        "A step contains a generation loop, in which earlier results decide which layers are called next. Such loops"
        " are not supported in `training_step`, nor in steps that compute gradients or use context parallelism.",
        "Run the loop in `validation_step`, `test_step` or `predict_step`, without gradients and without context"
        " parallelism. Alternatively, call `gather_module` after the training run, and then run the loop.",
    ),
    "LH430": Entry(
        "A step calls the layers of an `nn.Sequential` body one by one, or calls the body more than once or not at"
        " all.",
        'Call `x = self.body(x)` exactly once in each step, or set `body=["body"]` to allow calls of single layers.',
    ),
    "LH431": Entry(
        "Which code a step runs depends on something other than the batch, such as a counter or `random`.",
        "Make sure that only the batch determines which code the step runs, or set `dynamic_shapes=True`.",
    ),
    "LH432": Entry(
        "The step took a different path than an earlier step whose batch had the same shapes. The strategy could not"
        " restart the step, because the step had already changed state that cannot be restored or had begun to average"
        " gradients.",
        "Change the state in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH433": Entry(
        "The step runs different code on different ranks.",
        "Make sure that every rank runs the same code in the step. For example, do not use `if self.global_rank == 0`.",
    ),
    "LH434": Entry(
        "A step with a generation loop draws random numbers from its own generator, so ranks generate different"
        " tokens.",
        "Use the global random generators of torch, numpy and Python (`random`).",
    ),
    "LH435": Entry(
        "A step calls the same layer several times, as in a recurrence over the layers.",
        "Use a layout without a pipeline, or set `body` to layers that each step calls only once.",
    ),
    "LH436": Entry(
        "A step does not call the layers in the order in which they are defined.",
        "Set `body=[...]` to the list that the message shows.",
    ),
    "LH437": Entry(
        "The structure of a layer's result depends on the data, so other stages cannot know it in advance.",
        "Make the layer always return tensors in the same structure.",
    ),
    "LH438": Entry(
        "For batches of the same shapes, the stages exchange tensors of different shapes or different Python values.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH440": Entry(
        "A call to `torch.utils.checkpoint` recomputes several layers at once, or recomputes code outside the layers"
        " that draws random numbers.",
        "Checkpoint each layer separately, or use the strategy's argument `recompute` instead.",
    ),
    "LH441": Entry(
        'With `recompute="selective"`, a layer must run the same operations in forward as when it is recomputed in'
        " backward. This layer runs different operations, for example because of a counter or a private random"
        " generator.",
        "Make the layer run the same operations each time. Alternatively, exclude the layer from recomputation by"
        " listing only the other layers in `recompute=[...]`.",
    ),
    "LH442": Entry(
        "A step calls a `torch.distributed` collective, but not all stages reach this call.",
        "Call the collective in a hook, or call it only among replicas, with"
        ' `group=self.device_mesh["data_parallel"].get_group()`.',
    ),
    "LH443": Entry(
        "A step calls `trainer.save_checkpoint`, `barrier` or `broadcast`, but not all ranks reach this call.",
        "Call the method in a hook, such as `on_train_batch_end`.",
    ),
    "LH444": Entry(
        "A forward hook changes the output of a module in some steps, but not in others.",
        "Write the hook so that it either changes the output in every step or never changes it.",
    ),
    "LH445": Entry(
        "Code around the layers uses values that forward hooks collect. These values have a different structure than"
        " in the first step with the same shapes.",
        "Make sure that the hooks run for the same module calls in every step.",
    ),
    "LH446": Entry(
        "The shapes of the tensors that a layer returns depend on the values of its inputs.",
        "Move the code whose output shape depends on values into the layer that uses this output. Alternatively, set"
        " `dynamic_shapes=True`.",
    ),
    "LH447": Entry(
        "For batches of the same shapes, the input to the body was split into different numbers of microbatches.",
        "If the shape of the input to the body depends on values in the batch, set `dynamic_shapes=True`.",
    ),
    "LH448": Entry(
        "A step draws random numbers from a generator of its own. Each stage runs a different part of the step, so the"
        " stages would draw different numbers.",
        "Draw the random numbers without `generator=`.",
    ),
    "LH449": Entry(
        "A gradient hook, or a function with a custom backward pass, is used outside the pipelined layers. Its"
        " backward pass cannot be split into stages.",
        "Use the function or the hook inside a layer.",
    ),
    "LH450": Entry(
        "A layer changes a list or dictionary that it receives, but other stages do not see the change.",
        "Return the new value from the layer instead.",
    ),
    "LH451": Entry(
        "A step reads from an iterator that is an attribute of the module, so each stage would read different items.",
        "Make the data part of the batch with Lightning's `CombinedLoader`.",
    ),
    "LH460": Entry(
        "A layer changes a tensor in place, for example with `x.add_(...)`, and another stage uses this tensor"
        " afterward.",
        "Use the value that the layer returns instead of the changed tensor.",
    ),
    "LH461": Entry(
        "A step updates a buffer or an attribute on one stage and reads it on another stage.",
        "Update and read the value inside one layer, or update it before the first layer or in a hook.",
    ),
    "LH462": Entry(
        "A step computes the new values of a parameter from a parameter on a different stage, for example to update a"
        " teacher from its student.",
        "Set the same `layer.pipeline_stage` for the layers of both parameters, or update the parameter in a hook.",
    ),
    "LH463": Entry(
        "A step updates a parameter that several stages have, but only the last stage has the new values.",
        "Update the parameter in a hook, or make the parameter part of a layer.",
    ),
    "LH464": Entry(
        "A step updates a parameter, and another stage uses this parameter in the same step.",
        "Update the parameter in a hook, such as `on_train_batch_end`.",
    ),
    "LH465": Entry(
        "A step with a generation loop updates a parameter that only some stages have.",
        "Update the parameter in a hook, such as `on_validation_batch_end`.",
    ),
    "LH466": Entry(
        "`training_step` updates a parameter, and the new values differ between microbatches.",
        "Set `num_microbatches=1`, or update the parameter in a hook.",
    ),
    "LH467": Entry(
        "A step with several microbatches updates a parameter that it uses both before and after the update, or that"
        " several stages of one rank have.",
        "Set `num_microbatches=1`, or update the parameter in a hook.",
    ),
    "LH468": Entry(
        "A step stores values that require gradients in a buffer.",
        "Store `x.detach()` in the buffer, or update the buffer under `torch.no_grad()`.",
    ),
    "LH469": Entry(
        "A gradient hook is registered on a tensor that several stages compute, so each stage has only a part of the"
        " gradient of this tensor.",
        "Create a new tensor, for example with `y = x * 1`, and never modify it in place. Register the hook on the new"
        " tensor, and use only this tensor in the code that follows.",
    ),
    "LH470": Entry(
        "A stage changes a tensor in place, but an earlier stage has already sent a view of this tensor to another"
        " stage.",
        "Create a new tensor instead of changing the existing one in place.",
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
        "A step reads a value that only the last stage has, and afterward updates state that all stages read.",
        "Update the state before you read the value, or in a hook.",
    ),
}
