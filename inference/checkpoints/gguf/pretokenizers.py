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


def _by_case(digits: str, suffix: str = "", upper: str = _UPPER, lower: str = _LOWER) -> str:
    """The pattern of o200k, which cuts words where capitals begin."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
    )


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE, _THREE = r"\p{N}", r"\p{N}{1,3}"
_LLAMA3 = Split((_by_digits(_THREE),), whole_words=True, adds_bos=True)
_DIGITS_FIRST = Split((_ONE, GPT2))
_CL100K, _SINGLE = Split((_by_digits(_THREE),)), Split((_by_digits(_ONE),))
_O200K = Split((_by_case(_THREE, f"{_CONTRACTIONS}?"),))
# Words keep their combining marks.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_END}"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = Split(
    (
        _THREE,
        _CJK,
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_END}",
    )
)
_HANGUL_AND_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, of an older Unicode, as DeepSeek's file lists them.
_CASED = (
    "["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]"
)
_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
# Han stands alone, with o200k's words around it.
_KIMI = r"[\p{Han}]+|" + _by_case(
    _THREE, f"{_CONTRACTIONS}?", *(f"[{kind[1:-1]}&&[^\\p{{Han}}]]" for kind in (_UPPER, _LOWER))
).replace(r"[\r\n/]*", r"[\r\n]*")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

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
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"), Split((GPT2,))),
    **dict.fromkeys(("exaone4", "granite-docling", "mellum", "gigachat"), Split((GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS_FIRST),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_FIRST),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("lfm2", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    "qwen2": Split((_by_digits(_ONE),), composes=True),
    "qwen35": Split((_QWEN35,), composes=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open"), _SINGLE),
    "tekken": Split((_by_case(_ONE),), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K),
    "kimi-k2": Split((_KIMI,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-llm": Split(
        (r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_SIGNS}+", r"\s+$", _HANGUL_AND_HAN, r"\p{N}+")
    ),
    "deepseek-coder": Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HANGUL_AND_HAN, _ONE)
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), Split((_BAILING,))),
    "seed-coder": Split(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_ONE}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+{_END}",
        )
    ),
}  # fmt: skip
