"""The rules that cut text into words before byte-level BPE, by the name in a GGUF file's `tokenizer.ggml.pre`.

Names and expressions are those of llama.cpp (src/llama-vocab.cpp), in the spelling of the models' own tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from tokenmill.errors import ModelUnreadable

SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_START, CASED_END = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
TEKKEN = f"{CASED_START}{UPPER}*{LOWER}+|{CASED_START}{UPPER}+{LOWER}*" + r"|\p{N}" + CASED_END
GPT4O = f"{CASED_START}{UPPER}*{LOWER}+{SUFFIX}?|{CASED_START}{UPPER}+{LOWER}*{SUFFIX}?" + r"|\p{N}{1,3}" + CASED_END
SEED_CODER = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + SPACES
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
CJK_AND_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
)
DEEPSEEK_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
DEEPSEEK_MARKS = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


@dataclass(frozen=True)
class Rule:
    """Expressions applied one after another; each cuts the pieces that the one before left.

    With `ignore_merges` a word that is a token stays whole; `add_bos` and `compose` (Unicode NFC) are how the models
    with this rule were trained.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    compose: bool = False

    def build(self) -> PreTokenizer:
        """The rule as a `tokenizers` pre-tokenizer that ends in the byte alphabet."""
        splits = [Split(Regex(expression), "isolated") for expression in self.expressions]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def rules() -> dict[str, Rule]:
    """Every rule by every name it goes under."""
    table = {
        "default": Rule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": Rule((GPT2,)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Rule((r"\p{N}", GPT2)),
        "falcon": Rule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Rule(
            (LLAMA3,), ignore_merges=True, add_bos=True
        ),
        "dbrx smaug-bpe glm4 chatglm-bpe": Rule((LLAMA3,)),
        "qwen2 deepseek-r1-qwen kormo megrez": Rule((QWEN2,), compose=True),
        "stablelm2 hunyuan solar-open grok-2": Rule((QWEN2,)),
        "qwen35": Rule((QWEN35,), compose=True),
        "gpt-4o llama4 kanana2 minimax-m2": Rule((GPT4O,)),
        "tekken": Rule((TEKKEN,), ignore_merges=True, add_bos=True),
        "deepseek-llm": Rule(("[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_MARKS, r"\s+$", DEEPSEEK_CJK, r"\p{N}+")),
        "deepseek-coder": Rule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}")),
        "deepseek-v3 hunyuan-dense": Rule((r"\p{N}{1,3}", CJK_AND_KANA, DEEPSEEK3)),
        "bloom poro-chat gpt3-finnish": Rule((BLOOM,)),
        "viking": Rule((BLOOM, r"\p{N}")),
        "bailingmoe bailingmoe2 llada-moe": Rule((BAILING,)),
        "seed-coder": Rule((SEED_CODER,)),
    }
    return {name: rule for names, rule in table.items() for name in names.split()}


def find_rule(name: str) -> Rule:
    """The rule of this name. Raises ModelUnreadable: the name is not known; the message lists those that are."""
    known = rules()
    if name not in known:
        raise ModelUnreadable(
            f"the file's pre-tokenizer rule {name!r} (tokenizer.ggml.pre) is not known; "
            f"known are {', '.join(sorted(known))}. Use the model's Hugging Face folder instead."
        )
    return known[name]
