"""`config.json` as a `ModelConfig`."""

from configs.errors import InputError, shown
from configs.model import ModelConfig
from inference.families import families
from inference.families.shared.config_keys import Keys

# Keys that change the mathematics, and the values under which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "rope_interleaved": (False, None),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (False, None),
    "auto_map": (None,),
    "mamba_ssm_dtype": ("float32", None),  # of states, which nothing here rounds
    "mamba_ssm_cache_dtype": ("float32", None),
}

_SUFFIX = "ForCausalLM"  # of nearly every architecture
# Keys of a model of images or sounds too that say something of its text.
_OF_THE_WHOLE = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id"),
    *("quantization_config", "compression_config", "auto_map"),
)


def build(keys: Keys, name: str) -> ModelConfig:
    """Returns the model that a configuration describes.

    Raises:
        InputError: an unknown architecture, or a key that is unsound or changes the model in a way
            that is not supported.
    """
    architecture = _architecture(keys.raw)
    family = families.of_architecture(architecture)
    if family is None:
        valid = ", ".join(
            family.architecture.removesuffix(_SUFFIX) for family in families.ALL.values()
        )
        raise InputError(
            f"architecture {shown(architecture)} is not supported; valid, with {_SUFFIX} behind "
            f"most of them: {valid}"
        )
    keys.require_neutral(_NEUTRAL, except_for=family.reads)
    return family.model(keys, name)


def text_part(raw: dict[str, object]) -> dict[str, object]:
    """Returns what describes the text of a model that reads images and sounds too, as if it stood
    alone; other configurations as they are.

    Raises:
        InputError: it describes no text.
    """
    architecture = _architecture(raw)
    family = families.of_wrapper(architecture)
    if family is None:
        return raw
    text = Keys(raw).nested("text_config")
    if text is None:
        raise InputError(f"architecture {architecture} has a text_config, which is missing")
    shared = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    names = {"architectures": [family.architecture], "model_type": family.model_type or family.name}
    return text.raw | shared | names


def packs_experts(raw: dict[str, object]) -> bool:
    """Returns whether the architecture may store experts as MXFP4."""
    family = families.of_architecture(_architecture(raw))
    return family is not None and family.packs_experts


def _architecture(raw: dict[str, object]) -> object:
    architectures = raw.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None
