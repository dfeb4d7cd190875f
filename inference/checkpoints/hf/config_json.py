"""`config.json` of a Hugging Face directory: the model, and how its tensors are stored."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from configs.errors import InputError
from configs.heads import Eagle
from configs.kinds.attention import Attention
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints import mapped, names, text_files
from inference.checkpoints.hf import hub, mxfp4, params_json
from inference.checkpoints.hf.quantized import methods, modelopt, tensors
from inference.checkpoints.hf.quantized.schemes import Quantization
from inference.families import families
from inference.families.shared.config_keys import Keys

# Keys that change the mathematics, and the values under which they do not. All others are ignored
# unless a family reads them; so is `auto_map` (`repository_code` says what it names).
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
    "is_causal": (True, None),
    "mamba_ssm_dtype": ("float32", None),  # of states, which nothing here rounds
    "mamba_ssm_cache_dtype": ("float32", None),
}

# Keys of a model of images or sounds too that say something of its text.
_OF_THE_WHOLE = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id"),
    *("quantization_config", "compression_config"),
)
QUANTIZATION = "quantization_config", "compression_config"  # keys; the second is older


@dataclasses.dataclass(frozen=True)
class Storage:
    """What `config.json` says of the tensors, and not of the model.

    Attributes:
        is_packed: experts are stored as MXFP4.
        num_predicting: layers behind the last one, which predict a second token.
        quantization: how weights are stored in few bits; None: they are not, or as MXFP4.
        integers: as `Family` has them.
        derived: as `Family.derived`; masks among them are no numbers.
    """

    is_packed: bool
    num_predicting: int
    quantization: Quantization | None = None
    integers: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    @property
    def codes_at(self) -> tuple[str, ...]:
        if self.quantization is not None:
            return ("",)
        packed = mxfp4.ENDINGS if self.is_packed else ()
        return (*self.derived, *packed, *self.integers)


def read(path: Path) -> dict[str, object]:
    """Returns a `config.json`, or of a model that reads images and sounds too what describes its
    text; where there is none, what a `params.json` says. Raises an `InputError` if the file is
    unsound.
    """
    params = path.with_name(params_json.NAME)
    if not path.exists() and params.exists():
        raw = mapped.read_json(params)
        with _naming(params):
            return params_json.described(Keys(raw))
    raw = mapped.read_json(path)
    with _naming(path):
        return text_part(raw)


def read_model(directory: Path) -> ModelConfig:
    """Returns the model of a Hugging Face directory, formats as its `config.json` alone has them.

    Raises:
        InputError: as `read_unformatted`.
    """
    raw = read(directory / text_files.CONFIG)
    stored = storage(raw, directory)
    return with_formats(read_unformatted(directory), stored, raw, directory)


def read_unformatted(directory: Path) -> ModelConfig:
    """Returns the model of a Hugging Face directory, but for its formats.

    Raises:
        InputError: as `parse`, or its weights are quantized in a way that is not served.
    """
    raw = read(directory / text_files.CONFIG)
    for name in hub.QUANTIZED:  # weights of few bits that `config.json` says nothing of
        if without_storage(raw) == raw and (directory / name).exists() and name != modelopt.FILE:
            raise InputError(
                f"{directory / name}: weights quantized like this are not served; use a repository "
                "whose config.json has a quantization_config, the unquantized one, or a .gguf file"
            )
    return parse(without_storage(raw), directory)


def with_formats(
    config: ModelConfig, stored: Storage, raw: dict[str, object], directory: Path
) -> ModelConfig:
    """Returns the model with the formats of its weights; raises an `InputError`."""
    with _naming(directory / text_files.CONFIG):
        if stored.is_packed:
            formats = tensors.packed_experts(config, Keys(raw))
        elif stored.quantization is not None:
            formats = tensors.formats(config, stored.quantization, names.huggingface(config))
        else:
            return config
        return dataclasses.replace(config, formats=tuple(formats.items()))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts a file's path before errors."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def parse(raw: dict[str, object], directory: Path) -> ModelConfig:
    """Returns the model that a directory's `config.json` describes, but for its formats.

    Raises:
        InputError: an unknown architecture, or a key that is unsound or changes the model in a way
            that is not supported.
    """
    with _naming(directory / text_files.CONFIG):
        keys, architecture = Keys(raw), _architecture(raw)
        family = families.of_architecture(architecture)
        if family is None:
            raise InputError(families.unknown(architecture))
        keys.require_neutral(family.reads, **_NEUTRAL)
        config = family.model(keys, directory.resolve().name)
        # Without a head for tokens; where there is one nevertheless, `hf_directory` finds it.
        return dataclasses.replace(config, tied=True) if is_classifier(raw) else config


def parse_predicting(raw: dict[str, object], directory: Path) -> Eagle:
    """The layer that predicts a second token, as heads for the model that a directory's
    `config.json` describes: it is of the kind that one more layer of the model would be,
    in hybrids of that of the last layer with attention.

    Raises:
        InputError: as `parse`, or there is no such layer, or more than one.
    """
    raw = without_storage(raw)
    config, count = parse(raw, directory), storage(raw, directory).num_predicting
    family = families.of(config)
    if family.predicting is None or count != 1:
        predicting = " or ".join(
            family.name for family in families.ALL.values() if family.predicting is not None
        )
        raise InputError(
            f"{directory / 'config.json'}: {config.family} with {family.predicting_key}={count}; "
            f"what drafts is one layer that predicts a second token, of {predicting}"
        )
    is_apart = family.predicting_layers is not None
    layer = _last_attention(config) if is_apart else _one_more(raw, config, directory)
    target = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}
    target |= {"name": f"{config.name}-mtp", "num_layers": 1, "pattern": (layer,), "tied": False}
    return Eagle(**target, shares_head=True, skips_first=not is_apart, omits_first=is_apart)


def _one_more(raw: dict[str, object], config: ModelConfig, directory: Path) -> LayerSpec:
    """The layer that would follow a model's last one."""
    listed = ((key, raw.get(key)) for key in families.of(config).listed)
    longer = {key: [*kinds, kinds[-1]] for key, kinds in listed if isinstance(kinds, list)}
    more = parse(raw | {"num_hidden_layers": config.num_layers + 1} | longer, directory)
    return more.layers[-1]


def _last_attention(config: ModelConfig) -> LayerSpec:
    """The last layer of a hybrid model that has attention; raises an `InputError`."""
    for layer in reversed(config.layers):
        if isinstance(layer.mixer, Attention):
            return layer
    raise InputError(
        f"{config.name}: no layer has attention, as one that predicts a second token would"
    )


def text_part(raw: dict[str, object]) -> dict[str, object]:
    """Returns what describes the text of a model that reads images and sounds too, as if it stood
    alone; other configurations as they are.

    Raises:
        InputError: it describes no text.
    """
    architecture = _architecture(raw)
    by_type = {
        family.model_type or family.name: family for family in families.of_wrapper(architecture)
    }
    if is_classifier(raw) and raw.get("text_config") is not None:
        raise InputError("text_config: classifiers of images and texts are not served")
    if not by_type:
        return raw
    text = Keys(raw).nested("text_config")
    if text is None:
        raise InputError(f"architecture {architecture} has a text_config, which is missing")
    for key in QUANTIZATION:
        if None not in (raw.get(key), text.raw.get(key)) and raw[key] != text.raw[key]:
            raise InputError(f"{key} and text_config: {key} differ; both must agree")
    shared = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    model_type = next(iter(by_type))
    if len(by_type) > 1:
        model_type = text.choice("model_type", {name: name for name in by_type}, model_type)
    family = by_type[model_type]
    names = {"architectures": [family.architecture], "model_type": model_type}
    return text.raw | shared | names | dict(family.text_keys)


def storage(raw: dict[str, object], directory: Path) -> Storage:
    """How a directory stores its tensors; raises an `InputError` if a key is unsound."""
    stated = [raw[key] for key in QUANTIZATION if raw.get(key) is not None]
    if any(other != stated[0] for other in stated[1:]):
        raise InputError(
            f"{directory / text_files.CONFIG}: {' and '.join(QUANTIZATION)} differ; weights are "
            "described twice, so both must agree"
        )
    with _naming(directory / text_files.CONFIG):
        described = modelopt.described(stated[0] if stated else None, directory)
    is_mxfp4 = isinstance(described, dict) and described.get("quant_method") == "mxfp4"
    family = families.of_architecture(_architecture(raw))
    is_packed = is_mxfp4 and family is not None and family.packs_experts
    with _naming(directory / text_files.CONFIG):
        key = "num_nextn_predict_layers" if family is None else family.predicting_key
        # Qwen3-Next says nothing of the layer that it comes with.
        default = 0 if family is None or family.predicting_layers is None else 1
        extra = Keys(raw).whole(key, default, limit=MOST_LAYERS)
        if isinstance(described, dict) and raw.get("expert_dtype") is not None:
            described = {"expert_dtype": raw["expert_dtype"]} | described
        quantization = None if described is None or is_packed else methods.read(described)
    integers, derived = ((), ()) if family is None else (family.integers, family.derived)
    return Storage(is_packed, extra, quantization, integers, derived)


def without_storage(raw: dict[str, object]) -> dict[str, object]:
    """A `config.json` without what is said of how weights are stored."""
    return {key: value for key, value in raw.items() if key not in QUANTIZATION}


def as_copied(raw: dict[str, object], config: ModelConfig) -> dict[str, object]:
    """A `config.json` for copies of its model: nothing is packed, layers that predict a second
    token and rows that no token has stay behind.
    """
    family = families.of(config)
    rows_key, listed = family.rows_key, ((key, raw.get(key)) for key in family.listed)
    read: dict[str, object] = {family.predicting_key: 0}
    read |= {key: kinds[: config.num_layers] for key, kinds in listed if isinstance(kinds, list)}
    read |= {rows_key: config.vocab_size} if rows_key else {}
    if config.tied:  # what lacks a head may say otherwise
        read["tie_word_embeddings"] = True
    return without_storage(raw) | {key: value for key, value in read.items() if key in raw}


def is_headless(raw: dict[str, object]) -> bool:
    """Returns whether a `config.json` is of a model that was saved without its head."""
    name = _architecture(raw)
    family = families.of_architecture(name)
    return family is not None and name in family.spellings and str(name).endswith("Model")


def is_classifier(raw: dict[str, object]) -> bool:
    """Returns whether a `config.json` is of a sequence classifier."""
    return families.is_classifier(_architecture(raw))


def _architecture(raw: dict[str, object]) -> object:
    architectures = raw.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None
