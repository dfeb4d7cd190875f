"""All families of checkpoints, each registered with a line here."""

import difflib
from collections.abc import Iterable

from configs.errors import InputError, shown
from configs.model import ModelConfig
from inference.families import (
    afmoe,
    apertus,
    arcee,
    axk1,
    bailing,
    bamba,
    cohere,
    deepseek,
    deepseek_v4,
    dots1,
    ernie4_5,
    exaone4,
    exaone_moe,
    falcon,
    falcon_h1,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    helium,
    hunyuan,
    hunyuan_moe,
    internlm,
    jamba,
    kimi,
    laguna,
    lfm2,
    llama,
    llama4,
    mamba,
    mellum,
    mimo,
    minimax,
    missing,
    mistral,
    mistral4,
    mixtral,
    nemotron,
    nemotron_dense,
    olmo,
    olmo_hybrid,
    phi,
    phi3,
    phimoe,
    qwen,
    qwen_linear,
    qwen_moe,
    seed_oss,
    solar,
    stablelm,
    starcoder2,
    step3p5,
    youtu,
)
from inference.families.family import Family, Gguf, GgufReader


def registered(families: Iterable[Family]) -> dict[str, Family]:
    """Returns the families by name; raises an `InputError` if two share a name or architecture."""
    by_name: dict[str, Family] = {}
    taken: dict[tuple[str, str], str] = {}
    for family in families:
        readers = family.gguf.readers if family.gguf else ()
        for kind, name in (
            ("name", family.name),
            *(("architecture", name) for name in (family.architecture, *family.spellings)),
            *(("architecture of llama.cpp", reader) for reader in readers),
        ):
            if (kind, name) in taken:
                raise InputError(
                    f"family {family.name!r}: the {kind} {name!r} is taken by the family "
                    f"{taken[kind, name]!r}"
                )
            taken[kind, name] = family.name
        by_name[family.name] = family
    return by_name


# The most used ones first: messages list them in this order.
_MODULES = (
    *(llama, gemma, gemma4, gpt2, qwen, qwen_moe, qwen_linear, mixtral, olmo, olmo_hybrid, phi3),
    *(deepseek, deepseek_v4, glm4_moe, dots1, gpt_oss, minimax, kimi, mamba, jamba, bamba),
    *(falcon_h1, granite, nemotron, lfm2, ernie4_5, hunyuan, mistral, mistral4, llama4),
    *(bailing, solar, hunyuan_moe, exaone_moe, mellum, afmoe, laguna, mimo, youtu),
    *(phimoe, step3p5, axk1),
    *(seed_oss, exaone4, apertus, arcee, glm4, helium, internlm, nemotron_dense),
    *(cohere, phi, gpt_neox, stablelm, starcoder2, falcon),
)
_CLASSIFIER = "ForSequenceClassification"
_LONGEST_NAME = 80  # characters that are compared
ALL = registered(family for module in _MODULES for family in module.FAMILIES)


def of(config: ModelConfig) -> Family:
    """Returns the family of a model; raises an `InputError` if no checkpoints have it."""
    family = ALL.get(config.family)
    if family is None:
        raise InputError(f"{config.name}: the family {config.family} has no checkpoints")
    return family


def of_architecture(name: object) -> Family | None:
    """Returns the family with this name in "architectures" of `config.json`, or None; that of a
    sequence classifier by the name of the language model that it was made of.
    """
    names: list[object] = [name]
    if is_classifier(name):
        stem = str(name).removesuffix(_CLASSIFIER)
        stems = stem, stem.removesuffix("Text")  # Gemma3TextForSequenceClassification
        names = [f"{stem}{head}" for stem in stems for head in ("ForCausalLM", "LMHeadModel")]
    return next(
        (f for f in ALL.values() if any(n in names for n in (f.architecture, *f.spellings))), None
    )


def is_classifier(name: object) -> bool:
    """Returns whether an architecture is that of a sequence classifier."""
    return isinstance(name, str) and name.endswith(_CLASSIFIER)


def unknown(architecture: object) -> str:
    """Returns the message for an architecture that no family has."""
    problem = f"architecture {shown(architecture)} is not supported"
    name = str(architecture)[:_LONGEST_NAME]
    if part := missing.PARTS.get(name):
        return f"{problem}; the part that it needs first is not here: {part}"
    names = [
        name for f in ALL.values() for name in (f.architecture, *f.spellings, f.wrapper) if name
    ]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    closest = f"the nearest names: {', '.join(near)}; " if near else ""
    return f"{problem}; {closest}docs/families.md lists all that are"


def of_wrapper(name: object) -> tuple[Family, ...]:
    """Returns the families that may be the text part of this architecture, the default first."""
    return tuple(f for f in ALL.values() if name is not None and f.wrapper == name)


def gguf(config: ModelConfig) -> Gguf:
    """Returns how `.gguf` files hold a model; raises an `InputError` if they cannot."""
    record = of(config).gguf
    if record is None:
        raise InputError(f"{config.name}: llama.cpp does not have the family {config.family}")
    return record


def gguf_readers() -> dict[str, tuple[str, GgufReader]]:
    """Returns the family and its reader by llama.cpp's architecture."""
    families = ((family.name, family.gguf) for family in ALL.values() if family.gguf)
    return {name: (family, r) for family, gguf in families for name, r in gguf.readers.items()}
