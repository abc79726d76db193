"""Errors of context parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH601": Entry(
        "`context_parallel_size` shards activations, but the 2D, 2.5D and 3D modes already shard them.",
        'Set `tensor_parallel_mode="1d"`, or `context_parallel_size=1`.',
    ),
    "LH602": Entry(
        "Selective recomputation saves the results of torch's attention, but ring and all-gather attention use"
        " other operators.",
        'Set `recompute=True`, or `context_parallel="ulysses"`.',
    ),
    "LH603": Entry(
        "`context_parallel_size` and `sequence_parallel` both shard the sequence.",
        "Remove `sequence_parallel`.",
    ),
    "LH604": Entry(
        "A layer, such as a router, stores a loss as an attribute, but this loss covers only one sequence shard.",
        "Compute the loss from the outputs of the layer, or from the logits of each position.",
    ),
    "LH605": Entry(
        "A layer of the body gets no tensor of shape (batch, sequence, features).",
        "Set `body=[...]` to the layers that work on hidden states.",
    ),
    "LH606": Entry(
        "A sequence is too short for `context_parallel_size` ranks.",
        "Pad the sequence, or use fewer ranks.",
    ),
    "LH607": Entry(
        "A layer gets two sequences, and one of them is as long as a shard of the other, so they cannot be told apart.",
        "Pad one of the sequences.",
    ),
    "LH608": Entry(
        "A layer returns a sum over positions, such as a router loss, but this sum covers only one sequence shard.",
        "Return only hidden states from the layer.",
    ),
    "LH609": Entry(
        "A layer requests attention weights, but no rank has the weights of all positions.",
        "Set `need_weights=False`.",
    ),
    "LH610": Entry(
        "A layer uses `add_bias_kv` or `add_zero_attn`, which add keys without a position.",
        "Turn these options off.",
    ),
    "LH611": Entry(
        "Attention is called without a batch dimension, or with static keys or values.",
        "Add a batch dimension, and do not pass static keys or values.",
    ),
    "LH612": Entry(
        "The queries of an attention do not have four dimensions.",
        "Pass queries of shape (batch, heads, positions, features).",
    ),
    "LH613": Entry(
        "A key cache grows when a layer is recomputed.",
        "Set `use_cache=False`, or do not recompute the layer.",
    ),
    "LH614": Entry(
        "Causal attention has different numbers of queries and keys.",
        "Use the same sequence for both, or pass an explicit mask.",
    ),
    "LH615": Entry(
        'With `context_parallel="ulysses"`, the number of heads per rank must be a multiple of'
        " `context_parallel_size`.",
        'Set `context_parallel="all_gather"`, or use another `context_parallel_size`.',
    ),
    "LH616": Entry(
        "A layer creates its own attention mask, which covers only a sequence shard.",
        "Use `is_causal=True`, or create the mask outside the layers and pass it as an argument.",
    ),
    "LH617": Entry(
        "A forward hook writes into an argument of its module.",
        "Return a new output from the hook.",
    ),
    "LH618": Entry(
        "A forward hook replaces an output without a sequence dimension, or changes the structure of an output.",
        "Change the result in the layer instead.",
    ),
    "LH619": Entry(
        "A convolution, a recurrent layer, a batch norm or hand-written attention sees only a sequence shard.",
        "Use `F.scaled_dot_product_attention`, or set `body` to modules that do not mix positions:"
        " [context parallelism](../concepts/context-parallel.md).",
    ),
    "LH620": Entry(
        "A layer fails on a sequence shard, because it also gets a mask or another tensor for the full sequence.",
        'Use `F.scaled_dot_product_attention` (transformers: `attn_implementation="sdpa"`).',
    ),
}
