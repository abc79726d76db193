"""Errors of steps of a pipeline."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH401": Entry(
        "A step or a hook reads parameters of layers, for example to compute a loss or a logged value. The rank"
        " that runs this code does not have the values of these parameters, because the layers are on stages of"
        " other ranks.",
        "In a hook, read the parameters inside `with self.trainer.strategy.full_parameters():`. To penalize"
        " large weights, use the `weight_decay` of the optimizer.",
    ),
    "LH402": Entry(
        "Your code calls `.numpy()` or `.tolist()` on a sharded parameter or gradient.",
        "Call the method inside `with self.trainer.strategy.full_parameters():`. To read gradients, pass"
        " `gradients=True` to `full_parameters`.",
    ),
    "LH403": Entry(
        "`get_total_norm` received gradients of the module's parameters together with other tensors. The norm"
        " would count the other tensors once per rank.",
        "Pass only the unmodified gradients (`p.grad`) of the module's parameters.",
    ),
    "LH404": Entry(
        "In a step with ZeRO, `get_total_norm` receives no gradients, because each replica has only the"
        " gradients of its own parameter shards.",
        "Use `self.trainer.strategy.grad_norm()` or `torch.nn.utils.clip_grad_norm_`.",
    ),
    "LH405": Entry(
        "A rank called a layer that is on a stage of another rank. The call came from a hook, from code after"
        " `trainer.fit`, or from a step that calls layers one by one.",
        "In a step, call the whole body exactly once. To run the model outside of a step, use"
        " `trainer.predict`. Alternatively, call `trainer.strategy.gather_module()` on every rank after the"
        " run, and then run the model.",
    ),
    "LH406": Entry(
        "Code between pipelined layers reads the values of activations, for example with `.item()`, `if` or a"
        " boolean mask. Only one stage has these values.",
        "In this code, use only values of the batch, or move the code into one layer. To find NaNs, use"
        " `Trainer(detect_anomaly=True)`.",
    ),
    "LH407": Entry(
        "A step computes derivatives through layers on several stages, for example with"
        " `torch.autograd.grad`, but no rank has the full autograd graph.",
        "Compute the derivatives inside one layer, or use a layout without a pipeline.",
    ),
    "LH408": Entry(
        "A step uses a parameter on a stage that did not use this parameter in the first training batch. The"
        " parameter cannot be sent to this stage.",
        "Make that stage use the parameter in the first training batch too, for example by adding `0 *"
        " parameter.sum()` to a tensor that the stage computes. Alternatively, make the parameter part of a layer.",
    ),
    "LH409": Entry(
        "A step reads a value that only one stage has. Afterward, the step uses a parameter that this stage"
        " does not have.",
        "Use the parameter before you read the value, or make the stage that has this value use the parameter in"
        " the first training batch.",
    ),
    "LH410": Entry(
        "A step uses a parameter on a stage that did not use this parameter in the first training batch.",
        "Make that stage use the parameter in the first training batch too, for example by adding `0 *"
        " parameter.sum()` to a tensor that the stage computes. Alternatively, set `dynamic_shapes=True`.",
    ),
    "LH411": Entry(
        "Code outside a layer reads the parameters of this layer, for example to compute a penalty. With"
        " `zero_stage=3`, each replica has only a shard of these parameters.",
        "Use `zero_stage=2` or `zero_stage=1`.",
    ),
    "LH412": Entry(
        "A layer stored a tensor in an object, such as a cache, and code around the layers reads this tensor."
        " However, the tensor is sharded over tensor-parallel ranks.",
        "Return the tensor from the layer instead of storing it.",
    ),
    "LH413": Entry(
        "A layer stored a tensor in an object, such as a cache, and a layer on another stage reads this tensor.",
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
        "A stage uses a tensor that another stage computed, but that stage did not send the tensor. Either the"
        " tensor is hidden in an object, or the step did not use the tensor in an earlier batch that had the same"
        " shapes as this batch.",
        "Pass the tensor as an argument to the code that uses it, or set `dynamic_shapes=True`.",
    ),
    "LH417": Entry(
        "`full_parameters` received a module that is not part of the LightningModule.",
        "Pass a submodule of the LightningModule, or call `full_parameters` without an argument.",
    ),
    "LH418": Entry(
        "Inside `with strategy.full_parameters():`, your code replaced a parameter with another parameter.",
        "Keep the parameter, and change its values with `parameter.copy_(...)` under `torch.no_grad()`.",
    ),
    "LH419": Entry(
        "`full_parameters` was entered in a step. In a step with ZeRO, the parameters of some layers are"
        " already gathered.",
        "Enter `full_parameters` in a hook, such as `on_train_batch_end`.",
    ),
    "LH420": Entry(
        "`full_parameters` was entered before the module was sharded.",
        "Enter `full_parameters` in `configure_optimizers` or in a later hook.",
    ),
    "LH421": Entry(
        "A layer was called inside `with strategy.full_parameters():`. Inside this block, the layer has its"
        " full parameters, but its code expects only the shard of this rank.",
        "Call the layer before or after the `with` block.",
    ),
    "LH422": Entry(
        "A step assigns a new value to `.data` of a tensor that is on another stage.",
        "Create a new tensor instead of changing the existing one.",
    ),
    "LH424": Entry(
        "A hook averages weights, but the average and the weights are on different stages.",
        "Use Lightning's `WeightAveraging`, or make both the average and the weights part of one layer.",
    ),
    "LH425": Entry(
        "A hook assigns `p.grad = ...` for a parameter that is on another stage. The new gradient would be lost.",
        "Change `p.grad` in place, or assign the gradient inside `with"
        " self.trainer.strategy.full_parameters(gradients=True, writes=True):`.",
    ),
    "LH426": Entry(
        "A step contains a generation loop, in which earlier results decide which layers are called next."
        " Such a loop cannot run in `training_step`, in a step that computes gradients, or with context"
        " parallelism.",
        "Run the loop in `validation_step`, `test_step` or `predict_step`, without gradients and without"
        " context parallelism. Alternatively, call `gather_module` after training, and then run the loop.",
    ),
    "LH430": Entry(
        "A step calls the layers of an `nn.Sequential` body one by one, calls the body more than once, or"
        " does not call the body at all.",
        "Call the whole body exactly once in each step, as in `x = self.body(x)`. To call the layers of the"
        " `nn.Sequential` one by one, set the argument `body` to a list that contains its name, as in"
        ' `body=["body"]`.',
    ),
    "LH431": Entry(
        "The code that a step runs depends on something other than the batch, such as a counter or Python's `random`.",
        "Make sure that only the batch, `self.training` and `requires_grad` determine which code the step"
        " runs. Alternatively, set `dynamic_shapes=True`.",
    ),
    "LH432": Entry(
        "A step took a different path than an earlier step whose batch had the same shapes. The strategy"
        " could not restart the step, because the step had already begun to average gradients or had changed"
        " state that cannot be restored.",
        "Move the code that changes this state into a hook, or set `dynamic_shapes=True`.",
    ),
    "LH433": Entry(
        "The step runs different code on different ranks.",
        "Make sure that every rank runs the same code in the step. For example, do not use `if self.global_rank == 0`.",
    ),
    "LH434": Entry(
        "A step with a generation loop uses a random generator of its own, so ranks generate different tokens.",
        "Use the global random generators of torch, numpy and Python (`random`).",
    ),
    "LH435": Entry(
        "A step calls the same layer several times, as in a recurrent network.",
        "Use a layout without a pipeline, or set `body` to layers that each step calls only once.",
    ),
    "LH436": Entry(
        "A step does not call the layers in the order in which the module defines them.",
        "Set `body` to the list that the message shows.",
    ),
    "LH437": Entry(
        "The structure of a layer's result depends on the data. Other stages must know this structure in advance.",
        "Make the layer always return tensors in the same structure.",
    ),
    "LH438": Entry(
        "For two batches that have the same shapes, stages exchange different Python values, or tensors of"
        " different shapes.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH440": Entry(
        "A function passed to `torch.utils.checkpoint` calls several layers, or calls a layer and also draws"
        " random numbers outside the layers.",
        "Checkpoint each layer separately, or replace `torch.utils.checkpoint` with the strategy's argument"
        " `recompute`.",
    ),
    "LH441": Entry(
        'With `recompute="selective"`, a layer must run the same operations in forward and when it is'
        " recomputed in backward. This layer runs different operations, for example because of a counter or a"
        " private random generator.",
        "Make the layer run the same operations each time. Alternatively, exclude the layer from"
        " recomputation by listing only the other layers in `recompute=[...]`.",
    ),
    "LH442": Entry(
        "A step calls a `torch.distributed` collective, but not all stages reach this call.",
        "Call the collective in a hook, such as `on_train_batch_end`. Alternatively, restrict it to the replicas with"
        ' `group=self.device_mesh["data_parallel"].get_group()`.',
    ),
    "LH443": Entry(
        "A step calls `trainer.save_checkpoint`, `strategy.barrier` or `strategy.broadcast`, but not all"
        " ranks reach this call.",
        "Call the method in a hook, such as `on_train_batch_end`.",
    ),
    "LH444": Entry(
        "A forward hook changes the output of a module in some steps, but not in others.",
        "Make the hook change the output in every step or in no step.",
    ),
    "LH445": Entry(
        "Code around the layers uses values that forward hooks collect. These values have a different"
        " structure than in an earlier step whose batch had the same shapes.",
        "Make sure that these hooks run in the same way in every step.",
    ),
    "LH446": Entry(
        "The shapes of a layer's outputs depend on the values of its inputs.",
        "Move the operation whose output shape depends on values into the layer that uses this output."
        " Alternatively, set `dynamic_shapes=True`.",
    ),
    "LH447": Entry(
        "For two batches with the same shapes, the input to the body was split into different numbers of microbatches.",
        "If the shape of the input to the body depends on values in the batch, set `dynamic_shapes=True`.",
    ),
    "LH448": Entry(
        "A step draws random numbers from its own generator. Each stage runs a different part of the step, so"
        " the stages would draw different numbers.",
        "Draw the random numbers without `generator=`.",
    ),
    "LH449": Entry(
        "A module with a backward hook, or a `torch.autograd.Function`, is called outside the pipelined"
        " layers. The strategy cannot split the backward pass of this call into stages.",
        "Register the hook on a module inside a layer, or call the function inside a layer.",
    ),
    "LH450": Entry(
        "A layer changes a list or dictionary that it receives, but other stages do not see the change.",
        "Return the new value from the layer instead of changing the list or dictionary.",
    ),
    "LH451": Entry(
        "A step reads from an iterator that is an attribute of the module, so each stage would read different items.",
        "Put the data into the batch, for example with Lightning's `CombinedLoader`.",
    ),
    "LH460": Entry(
        "A layer changes a tensor in place, for example with `x.add_(...)`. Another stage uses this tensor"
        " afterward, but does not see the change.",
        "Return the new value from the layer, and use this value instead of the changed tensor.",
    ),
    "LH461": Entry(
        "A step updates a buffer or an attribute on one stage and reads it on another stage.",
        "Update and read the value inside one layer. Alternatively, update the value before the first layer"
        " or in a hook.",
    ),
    "LH462": Entry(
        "A step updates a parameter with the values of a parameter on a different stage, for example to"
        " update a teacher from its student.",
        "Set the same `pipeline_stage` for the layers of both parameters, or update the parameter in a hook.",
    ),
    "LH463": Entry(
        "A step updates a parameter that is on several stages, but only the last stage has the new values.",
        "Update the parameter in a hook, or make the parameter part of a layer.",
    ),
    "LH464": Entry(
        "A step updates a parameter on one stage, but another stage uses this parameter in the same step.",
        "Update the parameter in a hook, such as `on_train_batch_end`.",
    ),
    "LH465": Entry(
        "A step with a generation loop updates a parameter that only some stages have.",
        "Update the parameter in a hook, such as `on_validation_batch_end`.",
    ),
    "LH466": Entry(
        "`training_step` updates a parameter, and each microbatch gives the parameter a different value.",
        "Set `num_microbatches=1`, or update the parameter in a hook.",
    ),
    "LH467": Entry(
        "A step with several microbatches updates a parameter, and uses it both before and after the update.",
        "Set `num_microbatches=1`, or update the parameter in a hook.",
    ),
    "LH468": Entry(
        "A step stores a tensor in a buffer, but this tensor requires gradients.",
        "Store `x.detach()` in the buffer, or update the buffer under `torch.no_grad()`.",
    ),
    "LH469": Entry(
        "A gradient hook is registered on a tensor that several stages compute. Each of these stages has only"
        " a part of the tensor's gradient.",
        "Create a new tensor, for example with `y = x * 1`, and do not modify it in place. Register the hook"
        " on the new tensor, and use only the new tensor afterward.",
    ),
    "LH470": Entry(
        "A stage changes a tensor in place, but an earlier stage has already sent this stage a view of the tensor.",
        "Create a new tensor instead of changing the existing one in place.",
    ),
    "LH471": Entry(
        "Your code assigns a tensor to the `data` attribute of a parameter, but the tensor has a different shape"
        " or dtype than the parameter.",
        "Assign a tensor that has the same shape and dtype as the parameter.",
    ),
    "LH472": Entry(
        "A step changes an attribute, but an earlier step whose batch had the same shapes did not change this"
        " attribute.",
        "Change the attribute in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH473": Entry(
        "A step reads a value that only the last stage has. Afterward, the step updates a tensor that all stages read.",
        "Update the tensor before you read the value, or update it in a hook.",
    ),
    "LH474": Entry(
        "A step updates parameters outside an `nn.Sequential`, or uses tensors that hooks of its layers store. The"
        " layers must therefore be called one by one, but the tensor-parallel plan does not allow this.",
        "Set the name of a style for each of the layers in `tensor_parallel_plan`.",
    ),
}
