"""Errors of context parallelism."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH601": Entry(
        "`context_parallel_size` shards activations, which 2D, 2.5D and 3D modes have sharded already.",
        'Set `tensor_parallel_mode="1d"`, or `context_parallel_size=1`.',
    ),
    "LH602": Entry(
        "Selective recomputation keeps results of torch's attention, which ring and all-gather replace.",
        'Set `recompute=True`, or `context_parallel="ulysses"`.',
    ),
    "LH603": Entry(
        "Both arguments shard the sequence.",
        "Remove `sequence_parallel`.",
    ),
    "LH604": Entry(
        "A layer keeps a loss as an attribute, such as a router.",
        "Compute it from outputs of the layer, or from logits of each position.",
    ),
    "LH605": Entry(
        "The body works on tensors other than (batch, sequence, features).",
        "Set `body=[...]` to the layers with hidden states.",
    ),
    "LH606": Entry(
        "The sequence is too short for this number of ranks.",
        "Pad it, or use fewer ranks.",
    ),
    "LH607": Entry(
        "Another sequence is as long as one shard.",
        "Pad one of them.",
    ),
    "LH608": Entry(
        "A layer returns a sum over the positions of one shard.",
        "Return hidden states only.",
    ),
    "LH609": Entry(
        "A layer asks for attention weights.",
        "Set `need_weights=False`.",
    ),
    "LH610": Entry(
        "A layer uses `add_bias_kv` or `add_zero_attn`.",
        "Turn them off.",
    ),
    "LH611": Entry(
        "Attention is called without a batch, or with static keys or values.",
        "Add a batch dimension; pass no static keys.",
    ),
    "LH612": Entry(
        "Queries have another number of dimensions.",
        "Pass (batch, heads, positions, features).",
    ),
    "LH613": Entry(
        "A cache of keys grows when a layer is recomputed.",
        "Set `use_cache=False`, or do not recompute the layer.",
    ),
    "LH614": Entry(
        "A causal attention has different numbers of queries and keys.",
        "Pass the same sequence, or an explicit mask.",
    ),
    "LH615": Entry(
        "The heads on a rank are not a multiple of the size.",
        'Set `context_parallel="all_gather"`, or another size.',
    ),
    "LH616": Entry(
        "A layer makes a mask for its shard.",
        "Use `is_causal=True`, or pass the mask as an argument.",
    ),
    "LH617": Entry(
        "A forward hook writes into an argument.",
        "Return a new output from the hook.",
    ),
    "LH618": Entry(
        "A forward hook replaces an output that has no sequence dimension, or changes its structure.",
        "Change the result of the layer.",
    ),
    "LH619": Entry(
        "A convolution, a recurrent layer, a batch norm or attention written by hand sees a shard of the sequence"
        " only.",
        "Use `F.scaled_dot_product_attention`, or set `body` to modules that do not mix positions: [context"
        " parallelism](../concepts/context-parallel.md).",
    ),
    "LH620": Entry(
        "A layer gets a mask or a tensor for the whole sequence, and fails on a shard.",
        'Use `F.scaled_dot_product_attention` (transformers: `attn_implementation="sdpa"`).',
    ),
}
