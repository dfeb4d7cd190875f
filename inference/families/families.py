"""All families of checkpoints, each registered with a line here."""

from collections.abc import Iterable

from configs.errors import InputError
from configs.model import ModelConfig
from inference.families import (
    bamba,
    deepseek,
    deepseek_v4,
    dots1,
    ernie4_5,
    falcon_h1,
    gemma,
    gemma4,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite,
    jamba,
    kimi,
    lfm2,
    llama,
    mamba,
    minimax,
    mixtral,
    nemotron,
    olmo,
    olmo_hybrid,
    phi3,
    qwen,
    qwen_linear,
    qwen_moe,
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
            ("architecture", family.architecture),
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
    *(
        deepseek,
        deepseek_v4,
        glm4_moe,
        dots1,
        gpt_oss,
        minimax,
        kimi,
        mamba,
        jamba,
        bamba,
        falcon_h1,
        granite,
    ),
    *(nemotron, lfm2, ernie4_5),
)
ALL = registered(family for module in _MODULES for family in module.FAMILIES)


def of(config: ModelConfig) -> Family:
    """Returns the family of a model; raises an `InputError` if no checkpoints have it."""
    family = ALL.get(config.family)
    if family is None:
        raise InputError(f"{config.name}: the family {config.family} has no checkpoints")
    return family


def of_architecture(name: object) -> Family | None:
    """Returns the family with this name in "architectures" of `config.json`, or None."""
    return next((family for family in ALL.values() if family.architecture == name), None)


def of_wrapper(name: object) -> Family | None:
    """Returns the family that reads the text part of this architecture, or None."""
    return next(
        (family for family in ALL.values() if name is not None and family.wrapper == name), None
    )


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
