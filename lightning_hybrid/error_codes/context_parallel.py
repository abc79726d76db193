"""Errors of context parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH601": Entry(
        "`context_parallel_size` is combined with a 2D, 2.5D or 3D tensor-parallel mode, which already shards"
        " activations.",
        'Set `tensor_parallel_mode="1d"`, or `context_parallel_size=1`.',
    ),
    "LH602": Entry(
        '`recompute="selective"` saves the results of torch\'s attention, but the context-parallel methods `ring`'
        " and `all_gather` use other operators.",
        'Set `recompute=True`, or `context_parallel="ulysses"`.',
    ),
    "LH603": Entry(
        "`context_parallel_size` is combined with `sequence_parallel`, but both shard the sequence.",
        "Remove `sequence_parallel`.",
    ),
    "LH604": Entry(
        "A layer, such as a router, stores a loss as an attribute, but this loss covers only one sequence shard.",
        "Compute the loss from the outputs of the layer, or from the logits of each position, which a forward hook"
        " can collect.",
    ),
    "LH605": Entry(
        "A layer of the body gets no hidden states, which have the shape (batch, sequence, features).",
        "Set `body=[...]` to the layers that work on hidden states.",
    ),
    "LH606": Entry(
        "A sequence has too few positions to be sharded over `context_parallel_size` ranks.",
        "Pad the sequence, or use a smaller `context_parallel_size`.",
    ),
    "LH607": Entry(
        "A layer gets two sequences, one of which is as long as a shard of the other, so it could be taken for"
        " this shard.",
        "Pad one of the sequences.",
    ),
    "LH608": Entry(
        "A layer returns a tensor without a sequence dimension, such as a router loss, which covers only one"
        " sequence shard.",
        "Return only hidden states from the layer.",
    ),
    "LH609": Entry(
        "A layer requests attention weights, but with context parallelism, no rank has the weights of all positions.",
        "Call the attention with `need_weights=False`.",
    ),
    "LH610": Entry(
        "An attention uses `add_bias_kv` or `add_zero_attn`, which add keys that have no position in the sequence.",
        "Turn off both options.",
    ),
    "LH611": Entry(
        "`nn.MultiheadAttention` is called without a batch dimension, or with static keys or values.",
        "Add a batch dimension to the inputs, and do not pass static keys or values.",
    ),
    "LH612": Entry(
        "The queries of an attention do not have four dimensions, as context parallelism requires.",
        "Pass queries of shape (batch, heads, positions, features).",
    ),
    "LH613": Entry(
        "The key cache of a layer grows when the layer is recomputed in backward.",
        "Set `use_cache=False`, or exclude the layer from recomputation.",
    ),
    "LH614": Entry(
        "Causal attention has different numbers of queries and keys, so their positions are unknown.",
        "Use the same sequence for queries and keys, or pass an explicit mask.",
    ),
    "LH615": Entry(
        'With `context_parallel="ulysses"`, the number of attention heads per rank must be a multiple of'
        " `context_parallel_size`, but it is not.",
        'Set `context_parallel="all_gather"`, or use another `context_parallel_size`.',
    ),
    "LH616": Entry(
        "A layer creates its own attention mask, which covers only one sequence shard.",
        "Use `is_causal=True`, or create the mask outside the layers and pass it as an argument.",
    ),
    "LH617": Entry(
        "A forward hook changes an argument of its module in place.",
        "Return a new output from the hook instead.",
    ),
    "LH618": Entry(
        "A forward hook replaces an output that has no sequence dimension, or changes the structure of an output.",
        "Change the result in the layer instead of in a hook.",
    ),
    "LH619": Entry(
        "A layer of the body mixes positions, for example with a convolution, a recurrent layer, a batch norm or"
        " hand-written attention, but gets only one sequence shard.",
        "Use `F.scaled_dot_product_attention`, or set `body` to modules that do not mix positions. See [context"
        " parallelism](../concepts/context-parallel.md).",
    ),
    "LH620": Entry(
        "A layer fails on a sequence shard, for example because it also gets a mask for the full sequence and"
        " applies it in hand-written attention.",
        'Use `F.scaled_dot_product_attention`. With transformers, set `attn_implementation="sdpa"`.',
    ),
}
