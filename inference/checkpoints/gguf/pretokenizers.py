"""How byte-level vocabularies cut text before merging, by the names llama.cpp gives them.

The patterns are those of each model's own `tokenizer.json`. llama.cpp's regular expressions know no
letter case outside ASCII and approximate two of them (tekken, gpt-4o), and it leaves out Qwen's
normal form.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Split:
    """How one vocabulary does it.

    Attributes:
        patterns: each isolates its matches in what the ones before it left.
        whole_words: a word that is a token is taken without merging.
        adds_bos: where the file does not say.
        composes: text is brought into NFC first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_digits(digits: str) -> str:
    """The pattern of cl100k, for which Qwen takes digits one by one."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}"
    )


def _by_case(digits: str, suffix: str = "") -> str:
    """The pattern of o200k, which cuts words where capitals begin."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{_UPPER}*{_LOWER}+{suffix}|{first}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
    )


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE, _THREE = r"\p{N}", r"\p{N}{1,3}"
_LLAMA3 = Split((_by_digits(_THREE),), whole_words=True, adds_bos=True)
_DIGITS_FIRST = Split((_ONE, GPT2))

# Of files from before llama.cpp wrote it (April 2024), by their architecture.
FAMILY_DEFAULTS = {
    "gpt2": "gpt-2",
    "llama": "llama-bpe",  # earlier ones have no byte-level vocabulary
    "smollm3": "llama-bpe",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "olmoe": "olmo",
    "olmo2": "dbrx",
    "gpt-oss": "gpt-4o",
    "mamba": "gpt-2",
    "mamba2": "gpt-2",
}

SPLITS = {
    "gpt-2": Split((GPT2,)),
    "phi-2": Split((GPT2,)),
    "olmo": Split((GPT2,)),
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": Split((_by_digits(_THREE),)),
    "smaug-bpe": Split((_by_digits(_THREE),)),
    "qwen2": Split((_by_digits(_ONE),), composes=True),
    "deepseek-r1-qwen": Split((_by_digits(_ONE),)),
    "tekken": Split((_by_case(_ONE),), whole_words=True, adds_bos=True),
    "gpt-4o": Split((_by_case(_THREE, f"{_CONTRACTIONS}?"),)),
    "llama4": Split((_by_case(_THREE, f"{_CONTRACTIONS}?"),)),
}
