"""The metadata of llama.cpp's GGUF files as a ModelSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.errors import ModelUnreadable
from tokenmill.spec import ModelSpec, RopeSpec
from tokenmill.weights.fields import Fields
from tokenmill.weights.hf_config import MOST_POSITIONS, check_spec

ARCHITECTURES: Mapping[str, str] = {"llama": "llama"}


def spec_from_metadata(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    frequency_factors: tuple[float, ...] | None,
    where: str,
) -> ModelSpec:
    """The shape of the model.

    Args:
        metadata: the file's key-value pairs.
        shapes: the tensors' shapes under GGUF names; they tell the vocabulary's size, biases and tied output.
        frequency_factors: the rope_freqs tensor, if there is one.
        where: the file's name for messages.

    Raises:
        ModelUnreadable: unknown architecture, something unsupported, values missing or impossible.
    """
    architecture = metadata.get("general.architecture")
    family = ARCHITECTURES.get(str(architecture))
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnreadable(f"{where}: architecture {architecture!r} is not supported; known: {known}")
    prefix = f"{architecture}."
    fields = Fields(where, {key.removeprefix(prefix): value for key, value in metadata.items()})
    if fields.whole("split.count", 1) > 1:
        raise ModelUnreadable(f"{where} is one of several parts of a model: merge them with llama.cpp's gguf-split")
    if fields.whole("expert_count", 0, least=0):
        raise ModelUnreadable(f"{where}: models with experts are not supported")
    if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
        raise ModelUnreadable(f"{where} lacks the tensor token_embd.weight. Fetch or convert it again.")
    vocab_size = shapes["token_embd.weight"][0]
    if fields.whole("vocab_size", vocab_size) != vocab_size:
        raise ModelUnreadable(f"{where}: its vocab_size contradicts its {vocab_size} token vectors")
    heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", max(1, hidden // heads))
    if fields.whole("attention.value_length", head_dim) != head_dim:
        raise ModelUnreadable(f"{where}: keys and values of different sizes are not supported")
    max_position = fields.whole("context_length", most=MOST_POSITIONS)
    return check_spec(
        ModelSpec(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=fields.whole("feed_forward_length"),
            num_layers=fields.whole("block_count"),
            num_heads=heads,
            num_kv_heads=fields.whole("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=_rope(fields, head_dim, max_position, frequency_factors),
            tie_embeddings="output.weight" not in shapes,
            attention_bias="blk.0.attn_q.bias" in shapes,
            attention_output_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
        ),
        where,
    )


def _rope(fields: Fields, head_dim: int, max_position: int, frequency_factors: tuple[float, ...] | None) -> RopeSpec:
    rotary_dim = fields.whole("rope.dimension_count", head_dim)
    plain = RopeSpec(
        theta=fields.number("rope.freq_base", 10000.0),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        frequency_factors=frequency_factors,
    )
    kind = fields.values.get("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise ModelUnreadable(f"{fields.where}: rope scaling {kind!r} is not supported; known: none, linear, yarn")
    if kind == "none" or factor in (0.0, 1.0):
        return plain
    if kind == "linear":
        return replace(plain, kind="linear", factor=factor)
    # llama.cpp multiplies the paper's attention factor by the file's, where transformers replaces it.
    attention = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_max_position=fields.whole("rope.scaling.original_context_length", max_position, most=MOST_POSITIONS),
        attention_factor=attention * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )
