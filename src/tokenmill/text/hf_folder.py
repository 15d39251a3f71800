"""Tokenizers out of a folder in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tokenmill.errors import ModelUnreadable
from tokenmill.text.sentence_piece import CONTROL, UNKNOWN, add_ends, add_tokens, piece_backend, read_pieces
from tokenmill.text.vocabulary import Vocabulary
from tokenmill.types import MAX_INT32, Pooling

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
ENDS = ("bos", "eos")
PIECE_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}
POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean"}
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_folder_vocabulary(path: Path) -> Vocabulary:
    """Read tokenizer.json, else tokenizer.model, and the small files beside it, of which each may be missing.

    Raises ModelUnreadable: there is neither, or a file is damaged.
    """
    config, generation, model = (
        _read_json(path / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    backend, named, hidden = _backend(path, config)
    special_tokens = named | {
        name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None
    }
    declared = _declared_tokens(config)
    _add_missing(backend, declared, [*special_tokens.values(), *_extra_tokens(config)])
    defaults = {name: generation[name] for name in SAMPLING_NAMES if isinstance(generation.get(name), int | float)}
    return Vocabulary(
        backend=backend,
        end_ids=_end_ids(backend, generation, model, special_tokens.get("eos_token")),
        special_tokens=special_tokens,
        chat_template=_chat_template(path, config),
        sampling_defaults=defaults,
        pooling=_pooling(path),
        hidden_ids=hidden.union(token_id for token_id, (_, is_special) in declared.items() if is_special),
    )


def _backend(path: Path, config: dict[str, Any]) -> tuple[Backend, dict[str, str], frozenset[int]]:
    """The tokenizer; of a tokenizer.model also the special tokens by their names, and ids that are not shown."""
    file, pieces_file = path / "tokenizer.json", path / "tokenizer.model"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:
            raise ModelUnreadable(f"{file} is damaged or of a newer kind: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return backend, {}, frozenset()
    if not pieces_file.is_file():
        advice = "convert the tokenizer with transformers' save_pretrained, or use a .gguf"
        raise ModelUnreadable(f"{path} has neither tokenizer.json nor tokenizer.model: {advice}")
    pieces = read_pieces(pieces_file)
    try:
        backend = piece_backend(pieces, prefix_everywhere=config.get("legacy") is not False)
    except ModelUnreadable as error:
        raise ModelUnreadable(f"{pieces_file}: {error.message}") from error
    add_tokens(backend, pieces.tokens, pieces.kinds)
    later = [(number, text) for text, number in _read_json(path / "added_tokens.json").items() if type(number) is int]
    for number, text in sorted(later):
        if number == backend.get_vocab_size():
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    bos, eos = (pieces.ids.get(name) if config.get(f"add_{name}_token", name == "bos") else None for name in ENDS)
    add_ends(backend, pieces.tokens, bos, eos)
    named = {name: pieces.tokens[pieces.ids[key]] for name, key in PIECE_NAMES.items() if key in pieces.ids}
    return backend, named, frozenset(i for i, kind in enumerate(pieces.kinds) if kind in (UNKNOWN, CONTROL))


def _pooling(path: Path) -> Pooling:
    """What the files of sentence-transformers say; their modules run one after another."""
    modules = _read_json(path / "modules.json", list)
    kinds = {str(module.get("type")).rpartition(".")[2] for module in modules if isinstance(module, dict)}
    pooling = _read_json(path / "1_Pooling" / "config.json")
    modes = {name.removeprefix("pooling_mode_") for name, value in pooling.items() if value is True and "mode_" in name}
    odd = sorted(kinds - {"Transformer", "Pooling", "Normalize"}) + sorted(modes - POOLINGS.keys())
    if odd or len(modes) > 1:
        known = "one pooling (lasttoken or mean_tokens), then Normalize"
        raise ModelUnreadable(
            f"{path}: embeddings by {', '.join(odd or sorted(modes))} are not supported; known: {known}"
        )
    return POOLINGS[modes.pop()] if modes else "last"


def _read_json(path: Path, kind: type = dict) -> Any:
    if not path.is_file():
        return kind()
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelUnreadable(f"{path} cannot be read as JSON: {error}") from error
    return content if isinstance(content, kind) else kind()


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _declared_tokens(config: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return {}
    return {
        int(token_id): (text, bool(value.get("special", False)))
        for token_id, value in declared.items()
        if (text := _token_text(value)) is not None and token_id.isdecimal()
    }


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        tokens = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        texts = map(_token_text, tokens)
        found += [text for text in texts if text is not None]
    return found


def _add_missing(backend: Backend, declared: dict[int, tuple[str, bool]], special: list[str]) -> None:
    """Make known to the backend what only tokenizer_config.json declares; ids that it already has stay."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, (text, is_special) in sorted(declared.items()):
        own = backend.token_to_id(text)
        if text not in known and token_id == (backend.get_vocab_size() if own is None else own):
            backend.add_tokens([AddedToken(text, special=is_special, normalized=False)])
            known.add(text)
    missing = [AddedToken(text, special=True, normalized=False) for text in special if text not in known]
    backend.add_special_tokens([token for token in missing if backend.token_to_id(token.content) is not None])


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnreadable(f"{file} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
        if isinstance(with_tools := named.get("tool_use"), str) and isinstance(template, str):
            parts = (part.removesuffix("\n") for part in (with_tools, template))
            template = "{% if tools +%}" + "{%+ else +%}".join(parts) + "{%+ endif %}"
    return template if isinstance(template, str) else None


def _end_ids(
    backend: Backend, generation: dict[str, Any], model: dict[str, Any], eos_token: str | None
) -> tuple[int, ...]:
    configured = _ids(generation.get("eos_token_id")) or _ids(model.get("eos_token_id"))
    own = None if eos_token is None else backend.token_to_id(eos_token)
    return tuple(dict.fromkeys(configured if own is None else [*configured, own]))


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int) and 0 <= token_id <= MAX_INT32]
