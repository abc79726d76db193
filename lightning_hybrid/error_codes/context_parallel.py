"""Errors of context parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH601": Entry(
        "`context_parallel_size` shards activations, but 2D, 2.5D and 3D modes already shard them.",
        'Set `tensor_parallel_mode="1d"`, or `context_parallel_size=1`.',
    ),
    "LH602": Entry(
        "Selective recomputation saves the results of torch's attention, which ring and all-gather attention replace.",
        'Set `recompute=True`, or `context_parallel="ulysses"`.',
    ),
    "LH603": Entry(
        "Both arguments shard the sequence.",
        "Remove `sequence_parallel`.",
    ),
    "LH604": Entry(
        "A layer, such as a router, stores a loss as an attribute.",
        "Compute the loss from the outputs of the layer, or from the logits of each position.",
    ),
    "LH605": Entry(
        "A layer of the body gets no tensor of shape (batch, sequence, features).",
        "Set `body=[...]` to the layers that work on hidden states.",
    ),
    "LH606": Entry(
        "The sequence is too short for this number of ranks.",
        "Pad it, or use fewer ranks.",
    ),
    "LH607": Entry(
        "Another sequence has the same length as a shard of the first one.",
        "Pad one of them.",
    ),
    "LH608": Entry(
        "A layer returns a sum over the positions of one shard.",
        "Return only hidden states.",
    ),
    "LH609": Entry(
        "A layer requests attention weights.",
        "Set `need_weights=False`.",
    ),
    "LH610": Entry(
        "A layer uses `add_bias_kv` or `add_zero_attn`.",
        "Turn them off.",
    ),
    "LH611": Entry(
        "Attention is called without a batch dimension, or with static keys or values.",
        "Add a batch dimension, and do not pass static keys or values.",
    ),
    "LH612": Entry(
        "Queries do not have four dimensions.",
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
        "The number of heads per rank is not a multiple of `context_parallel_size`.",
        'Set `context_parallel="all_gather"`, or another size.',
    ),
    "LH616": Entry(
        "A layer creates an attention mask for its sequence shard.",
        "Use `is_causal=True`, or pass the mask as an argument.",
    ),
    "LH617": Entry(
        "A forward hook writes into an argument.",
        "Return a new output from the hook.",
    ),
    "LH618": Entry(
        "A forward hook replaces an output that has no sequence dimension, or changes its structure.",
        "Change the result in the layer instead.",
    ),
    "LH619": Entry(
        "A convolution, a recurrent layer, a batch norm or hand-written attention sees only a sequence shard.",
        "Use `F.scaled_dot_product_attention`, or set `body` to modules that do not mix positions:"
        " [context parallelism](../concepts/context-parallel.md).",
    ),
    "LH620": Entry(
        "A layer gets a mask or another tensor for the full sequence, and fails on a shard.",
        'Use `F.scaled_dot_product_attention` (transformers: `attn_implementation="sdpa"`).',
    ),
}
