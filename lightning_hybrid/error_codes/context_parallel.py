"""Errors of context parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH601": Entry(
        "Context parallelism cannot be combined with 2D, 2.5D or 3D tensor parallelism, which already shards"
        " activations.",
        'Set `tensor_parallel_mode="1d"`, or `context_parallel_size=1`.',
    ),
    "LH602": Entry(
        '`recompute="selective"` works only with torch\'s own attention operators, but the context-parallel methods'
        " `ring` and `all_gather` use other operators.",
        'Set `recompute=True`, or `context_parallel="ulysses"`.',
    ),
    "LH603": Entry(
        "Context parallelism and `sequence_parallel=True` both shard the sequence, so they cannot be combined.",
        "Remove `sequence_parallel=True`.",
    ),
    "LH604": Entry(
        "A layer, such as a router, stores a loss as an attribute, but this loss covers only one sequence shard.",
        "Compute this loss outside the layer, from the outputs of the layer. Alternatively, collect the router logits"
        " of all positions with a forward hook, and compute the loss from these logits.",
    ),
    "LH605": Entry(
        "Each layer of the [body](glossary.md#body) must receive hidden states of shape (batch, sequence, features),"
        " but one layer receives no such tensor.",
        "In `body`, list the names of the layers that receive hidden states.",
    ),
    "LH606": Entry(
        "A sequence has too few positions to be sharded over `context_parallel_size` ranks.",
        "Pad the sequence to at least the length that the message states, or use a smaller `context_parallel_size`.",
    ),
    "LH607": Entry(
        "A layer receives two sequences. The second sequence is as long as a shard of the first sequence, so the"
        " strategy cannot distinguish the second sequence from a shard.",
        "Pad one of the sequences to a different length.",
    ),
    "LH608": Entry(
        "A layer returns a tensor, such as a router loss, that has no sequence dimension. This tensor covers only one"
        " sequence shard.",
        "Return only hidden states from the layer.",
    ),
    "LH609": Entry(
        "A layer requests attention weights, but with context parallelism, each rank computes only a part of these"
        " weights.",
        "Call the attention with `need_weights=False`.",
    ),
    "LH610": Entry(
        "An attention layer uses `add_bias_kv` or `add_zero_attn`. Context parallelism does not support these options,"
        " because they add keys without a position in the sequence.",
        "Turn off both options.",
    ),
    "LH611": Entry(
        "`nn.MultiheadAttention` is called with inputs that have no batch dimension, or with static keys or values."
        " Context parallelism supports neither.",
        "Add a batch dimension to the inputs, and do not pass static keys or values.",
    ),
    "LH612": Entry(
        "Context parallelism requires attention queries with four dimensions, but a layer has queries with more or"
        " fewer dimensions.",
        "Pass queries of shape (batch, heads, positions, features).",
    ),
    "LH613": Entry(
        "The key-value cache of a layer grows when the layer is recomputed in the backward pass.",
        "Set `use_cache=False`, or exclude the layer from recomputation.",
    ),
    "LH614": Entry(
        "Causal attention is called with different numbers of queries and keys, so the positions of the queries"
        " relative to the keys are unknown.",
        "Use the same sequence for queries and keys, or pass an explicit mask.",
    ),
    "LH615": Entry(
        'With `context_parallel="ulysses"`, the number of attention heads per rank must be a multiple of'
        " `context_parallel_size`. A layer does not meet this requirement.",
        'Set `context_parallel="all_gather"`, or set `context_parallel_size` to a divisor of the number of heads per'
        " rank.",
    ),
    "LH616": Entry(
        "A layer creates its own attention mask, which covers only one sequence shard.",
        "Use `is_causal=True`. Alternatively, create the mask outside the layers, and pass the mask to the layers as"
        " an argument.",
    ),
    "LH617": Entry(
        "A forward hook changes an argument of its module in place.",
        "In the hook, leave the argument unchanged, and return a new output.",
    ),
    "LH618": Entry(
        "A forward hook replaces an output that has no sequence dimension, or changes the structure of an output.",
        "Change the output in the layer instead of in a hook.",
    ),
    "LH619": Entry(
        "A layer of the [body](glossary.md#body) combines values from different positions, for example in a"
        " convolution, a recurrent layer, batch norm or hand-written attention. On sequence shards, this layer"
        " computes other results than on the full sequence.",
        "Use `F.scaled_dot_product_attention`. Alternatively, in `body`, list only modules that do not combine"
        " positions. See [context parallelism](../concepts/context-parallel.md).",
    ),
    "LH620": Entry(
        "A layer raises an error on a sequence shard, for example because of hand-written attention with a mask for"
        " the full sequence.",
        'Use `F.scaled_dot_product_attention`. With transformers, set `attn_implementation="sdpa"`.',
    ),
}
