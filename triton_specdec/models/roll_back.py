"""Which Transformers models can take rejected tokens back: those whose layers keep every token apart."""

from __future__ import annotations

from typing import Any

# Layers that keep keys and values of every token, and layers that keep nothing.
_KEEP_NOTHING = ("mlp", "moe", "dense", "sparse")
_KEEP_ALL = ("full_attention", "attention", "global")
# Where a config says how far a window reaches, and the type of layer that has one; None: every layer.
_WINDOWS = {
    "sliding_window": "sliding_attention",
    "attention_chunk_size": "chunked_attention",
    "keep_window_size": None,
}
# Where a config names the type of each layer.
_TYPES = ("layer_types", "layers_block_type", "attention_layers")
# Rotary embeddings whose frequencies change once a text outgrows the length the model was first trained on: what is in
# the cache would no longer fit, and a row would depend on the longest of its batch.
_CHANGING_ROPES = ("dynamic", "longrope")


def longest_text(config: Any, no_limit: int) -> int:
    """Most tokens of a text that a model's config allows."""
    longest = getattr(config, "max_position_embeddings", None) or no_limit
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if not isinstance(given, dict):
            continue
        # One for all layers, or one for each type of layer.
        for rope in (given, *(part for part in given.values() if isinstance(part, dict))):
            if rope.get("rope_type", rope.get("type")) in _CHANGING_ROPES:
                first = rope.get("original_max_position_embeddings")
                longest = min(longest, first or getattr(config, "original_max_position_embeddings", None) or longest)
    return int(longest)


def most_slots(model: Any, config: Any, no_limit: int) -> int:
    """Slots a cache of the model may have, where its own code looks at how far the longest row of a batch reaches."""
    most = no_limit
    if getattr(config, "_attn_implementation", None) == "eager":
        # A triangle that masks the scores, beside the mask that is given.
        shapes = (buffer.shape for buffer in model.buffers())
        most = min([most, *(shape[-1] for shape in shapes if len(shape) == 4 and shape[-1] == shape[-2])])
    if getattr(config, "attn_temperature_tuning", False):
        # From this position on queries are scaled by the batch's, not by the row's position (Llama 4).
        most = min(most, int(getattr(config, "floor_scale", no_limit)) - 1)
    return most


def check_rolls_back(model: Any, config: Any, max_length: int) -> None:
    """Raise ValueError for a model whose cache cannot be truncated, with the layers that are to blame."""
    name = type(model).__name__
    types: list[str] = next((t for t in (getattr(config, field, None) for field in _TYPES) if t), [])
    foreign = sorted({str(t) for t in types} - {*_KEEP_ALL, *_KEEP_NOTHING, *_WINDOWS.values()})
    if not foreign and getattr(model, "_is_stateful", False):
        foreign = ["recurrent"]
    if foreign:
        raise ValueError(
            f"{name} has layers of type {', '.join(foreign)}: their state cannot be rolled back to the accepted tokens"
        )
    for field, kind in _WINDOWS.items():
        window = getattr(config, field, None)
        used = kind is None or kind in types if types else getattr(config, "use_sliding_window", True)
        if window and used and window < max_length:
            raise ValueError(
                f"{name} has a {field} of {window}, shorter than texts of {max_length} tokens, and a cache of a window "
                f"cannot be rolled back: pass max_length={window} for texts that stay within it"
            )
