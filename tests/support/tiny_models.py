"""Small random models on disk, complete enough to be served: weights, config, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")  # ids 0 to 3; byte b is one token
END_ID = 2
MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 260,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    max_position: int = 512,
    rope: dict[str, Any] | None = None,
    rope_theta: float = 10000.0,
    rope_form: str = "rope_scaling",
    tie: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
) -> Path:
    """Write a random model, a Llama or as `architecture` says, and a byte tokenizer; returns `folder`.

    `rope` is the scaling dict of config.json ({"rope_type": "yarn", "factor": 4.0, ...}), written under the key
    `rope_form`: "rope_scaling" (with rope_theta beside it) or "rope_parameters" (with rope_theta inside).
    The weights are large enough for greedy outputs to be far from ties.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES.get(architecture, "llama"),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tie,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": END_ID,
    }
    if architecture == "Qwen3MoeForCausalLM":
        config |= EXPERTS
    if rope_form == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": rope_theta, "rope_type": "default", **(rope or {})}
    else:
        config |= {"rope_theta": rope_theta, "rope_scaling": rope}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": END_ID})
    tensors = random_llama_tensors(config, seed)
    _write_tensors(folder, {name: tensor.to(dtype) for name, tensor in tensors.items()}, sharded)
    write_byte_tokenizer(folder, vocab_size)
    return folder


def make_embedding_model(folder: Path, mode: str) -> None:
    """Lay a model out as Qwen3-Embedding is: no prefix, no output matrix, sentence-transformers' files."""
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors")
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": False, f"pooling_mode_{mode}": True, "include_prompt": True}
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **modes})
    kinds = enumerate(("Transformer", "Pooling", "Normalize"))
    modules = [{"idx": index, "type": f"sentence_transformers.models.{kind}"} for index, kind in kinds]
    _write_json(folder / "modules.json", modules)


def random_llama_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The float32 tensors of a Llama with the sizes of a config.json, under Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors: dict[str, Tensor] = {}

    def add_linear(name: str, rows: int, columns: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = noise(rows, columns, scale=1.5 * columns**-0.5)
        if bias:
            tensors[f"{name}.bias"] = noise(rows, scale=0.5)

    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    bias, mlp_bias = config["attention_bias"], config["mlp_bias"]
    tensors["model.embed_tokens.weight"] = noise(config["vocab_size"], hidden, scale=0.3)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = 1 + noise(hidden, scale=0.1)
        add_linear(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden, bias)
        add_linear(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden, bias)
        add_linear(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden, bias)
        add_linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, bias)
        if config["model_type"] != "llama":
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = 1 + noise(head_dim, scale=0.3)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = 1 + noise(hidden, scale=0.1)
        mlps, inner = [f"{prefix}.mlp"], config["intermediate_size"]
        if "num_experts" in config:
            mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
            inner = config["moe_intermediate_size"]
            add_linear(f"{prefix}.mlp.gate", len(mlps), hidden, False)
        for mlp in mlps:
            add_linear(f"{mlp}.gate_proj", inner, hidden, mlp_bias)
            add_linear(f"{mlp}.up_proj", inner, hidden, mlp_bias)
            add_linear(f"{mlp}.down_proj", hidden, inner, mlp_bias)
    tensors["model.norm.weight"] = 1 + noise(hidden, scale=0.1)
    if not config["tie_word_embeddings"]:
        add_linear("lm_head", config["vocab_size"], hidden, False)
    return tensors


def write_byte_tokenizer(folder: Path, vocab_size: int = 260) -> None:
    """Write tokenizer.json and tokenizer_config.json: the special tokens, then one token a byte, then spares."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    if vocab_size < len(vocab):
        raise ValueError(f"a byte tokenizer has {len(vocab)} tokens, over vocab_size {vocab_size}")
    vocab |= {f"<spare{i}>": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[END_ID],
        "pad_token": SPECIAL_TOKENS[3],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _write_tensors(folder: Path, tensors: dict[str, Tensor], sharded: bool) -> None:
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, half = list(tensors), len(tensors) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
