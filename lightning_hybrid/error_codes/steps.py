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
        "Pass only `p.grad` of the module's parameters.",
    ),
    "LH404": Entry(
        "Under ZeRO, a replica has gradients only for its shards.",
        "Use `strategy.grad_norm()` or `clip_grad_norm_`.",
    ),
    "LH405": Entry(
        "A hook, or code after the run, calls the model.",
        "Use `trainer.predict`, or call `trainer.strategy.gather_module()` after the run.",
    ),
    "LH406": Entry(
        "Code between layers reads activation values: `.item()`, `if`, or a boolean mask.",
        "Make the decision from the batch, or inside one layer. To find NaNs, use `Trainer(detect_anomaly=True)`.",
    ),
    "LH407": Entry(
        "A step computes derivatives through layers on several stages.",
        "Compute them inside one layer, or use a layout without a pipeline.",
    ),
    "LH408": Entry(
        "A step uses a parameter on a stage that does not have it, and the parameter cannot be sent there.",
        "Use it on that stage in the first training batch (`x + 0 * parameter.sum()`), or make it part of a layer.",
    ),
    "LH409": Entry(
        "A step reads a value that only a later stage has, and then uses a parameter of another stage.",
        "Use the parameter before reading the value, or in the first training batch.",
    ),
    "LH410": Entry(
        "A step uses a parameter on a stage where the first training batch did not use it.",
        "Use it there in the first batch (`x + 0 * parameter.sum()`), or set `dynamic_shapes=True`.",
    ),
    "LH411": Entry(
        "With `zero_stage=3`, code around the layers reads parameters of layers, for example to compute a penalty.",
        "Use `zero_stage=2`.",
    ),
    "LH412": Entry(
        "Code around the layers reads a cache that is sharded over tensor-parallel ranks.",
        "Return the tensor from the layer.",
    ),
    "LH413": Entry(
        "A layer reads a cache that a layer on another stage wrote.",
        "Return the tensor, and pass it to the other layer as an argument.",
    ),
    "LH414": Entry(
        "A layer stores a result in an attribute, and code around the layers reads it.",
        "Return the result from the layer.",
    ),
    "LH415": Entry(
        "A function uses parameters that are on different stages.",
        "Use them inside one layer, or set the same `layer.pipeline_stage` for both.",
    ),
    "LH416": Entry(
        "A tensor from another stage is hidden in an object, or was not used in the first batch of these shapes.",
        "Pass it as a tensor argument, or set `dynamic_shapes=True`.",
    ),
    "LH417": Entry(
        "`full_parameters` received a module that is not part of the LightningModule.",
        "Pass a submodule, or no argument.",
    ),
    "LH418": Entry(
        "A parameter was replaced inside `full_parameters`.",
        "Use `parameter.copy_(...)` under `torch.no_grad()`.",
    ),
    "LH419": Entry(
        "A step under ZeRO enters `full_parameters`.",
        "Enter it in a hook, such as `on_train_batch_end`.",
    ),
    "LH420": Entry(
        "A hook enters `full_parameters` before the module is split.",
        "Enter it in a hook that runs after `configure_optimizers`.",
    ),
    "LH421": Entry(
        "A layer is called inside `full_parameters`.",
        "Call layers outside it.",
    ),
    "LH422": Entry(
        "A step sets an attribute of a tensor that is on another stage.",
        "Create a new tensor instead.",
    ),
    "LH424": Entry(
        "A moving average and the weights that it averages are on different stages.",
        "Use Lightning's `WeightAveraging`, or use both inside one layer.",
    ),
    "LH425": Entry(
        "A hook assigns `p.grad = ...` for a parameter on another stage.",
        "Change `p.grad` in place, or use `full_parameters(gradients=True, writes=True)`.",
    ),
    "LH426": Entry(
        "A generation loop, which calls layers depending on earlier results, runs in a step that does not support it.",
        "Call it in `validation_step`, `test_step` or `predict_step`, or after the run.",
    ),
    "LH430": Entry(
        "A step calls an `nn.Sequential` body layer by layer, more than once, or not at all.",
        'Write `x = self.body(x)`, or set `body=["body"]`.',
    ),
    "LH431": Entry(
        "The step takes a path that depends on something other than the batch, such as a counter or `random`.",
        "Make the path depend on the batch, or set `dynamic_shapes=True`.",
    ),
    "LH432": Entry(
        "The step took a different path after it wrote state that cannot be restored, or began to average gradients.",
        "Write the state in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH433": Entry(
        "The step runs different code on different ranks.",
        "Remove code such as `if self.global_rank == 0` from the step.",
    ),
    "LH434": Entry(
        "A generation step uses a private random generator.",
        "Use the global generators of torch, numpy and `random`.",
    ),
    "LH435": Entry(
        "A step calls the same layer several times, as in a recurrence over the layers.",
        "Use a layout without a pipeline, or set `body` to layers that are called once.",
    ),
    "LH436": Entry(
        "Layers are called in a different order than they are defined.",
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
        "One call of `torch.utils.checkpoint` contains several layers.",
        "Checkpoint each layer separately, or set `recompute`.",
    ),
    "LH441": Entry(
        "A recomputed layer uses a counter or a private random generator.",
        "Make the layer deterministic, or turn `recompute` off.",
    ),
    "LH442": Entry(
        "A step calls a collective that not all stages reach.",
        'Call it in a hook, or use the group of `self.device_mesh["data_parallel"]`.',
    ),
    "LH443": Entry(
        "A step calls `trainer.save_checkpoint`, `barrier` or `broadcast`.",
        "Call it in a hook, such as `on_train_batch_end`.",
    ),
    "LH444": Entry(
        "A forward hook changes an output in some steps but not in others.",
        "Change the output in every step, or never.",
    ),
    "LH445": Entry(
        "Forward hooks collect different values in later steps.",
        "Make the hooks see the same calls in every step.",
    ),
    "LH446": Entry(
        "The shapes that a layer returns depend on the values of its inputs.",
        "Move this code into the next layer, or set `dynamic_shapes=True`.",
    ),
    "LH447": Entry(
        "The input of the body was split into a different number of microbatches for the same batch shape.",
        "Set `dynamic_shapes=True`.",
    ),
    "LH448": Entry(
        "A step draws from its own random generator, but stages run different parts of the step.",
        "Draw without `generator=`.",
    ),
    "LH449": Entry(
        "A function with a custom backward, or a hook on gradients, is applied outside the pipelined layers.",
        "Apply it inside a layer.",
    ),
    "LH450": Entry(
        "A layer changes a list or dictionary that it receives.",
        "Return the new value.",
    ),
    "LH451": Entry(
        "A step reads from an iterator that is an attribute of the module.",
        "Put the data into the batch with `CombinedLoader`.",
    ),
    "LH460": Entry(
        "A layer changes a tensor in place (`x.add_(...)`), and another stage uses it afterward.",
        "Use the value that the layer returns.",
    ),
    "LH461": Entry(
        "A step writes a buffer or an attribute on one stage and reads it on another.",
        "Keep it inside one layer, or write it in a hook.",
    ),
    "LH462": Entry(
        "A step updates a teacher from a student on a different stage.",
        "Set the same `layer.pipeline_stage`, or update the teacher in a hook.",
    ),
    "LH463": Entry(
        "A parameter that several stages have is written with values that only one stage has.",
        "Write it in a hook, or make it part of a layer.",
    ),
    "LH464": Entry(
        "A step writes a parameter that another stage uses in the same step.",
        "Write it in a hook, such as `on_train_batch_end`.",
    ),
    "LH465": Entry(
        "A generation step writes a parameter that only some stages have.",
        "Write it in a hook, such as `on_validation_batch_end`.",
    ),
    "LH466": Entry(
        "The value that a step writes depends on the microbatch.",
        "Set `num_microbatches=1`, or write it in a hook.",
    ),
    "LH467": Entry(
        "A step uses a parameter both before and after writing it.",
        "Set `num_microbatches=1`, or write it in a hook.",
    ),
    "LH468": Entry(
        "A step writes values that require gradients into a buffer.",
        "Use `x.detach()` or `torch.no_grad()`.",
    ),
    "LH469": Entry(
        "A hook reads a gradient that is spread over several stages.",
        "Put the hook on `x = x * 1`.",
    ),
    "LH470": Entry(
        "A stage writes in place to a tensor, but an earlier stage has sent a view of it.",
        "Create a new tensor.",
    ),
    "LH471": Entry(
        "The code assigns a tensor of a different shape or dtype to `parameter.data`.",
        "Keep the shape and the dtype.",
    ),
    "LH472": Entry(
        "A step changes an attribute that it did not change when it was traced.",
        "Change it in a hook, or set `dynamic_shapes=True`.",
    ),
    "LH473": Entry(
        "A step reads a value that only the last stage has, and then writes state.",
        "Write the state before reading the value, or in a hook.",
    ),
}
