"""Youtu-LLM (Tencent 2025, arXiv 2512.24618): DeepSeek-V3's attention, dense feed-forwards."""

from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufWriter, ModelFields
from inference.families.shared import fields, gguf_names, hf_names, latents, mixtures, parts
from inference.families.shared.config_keys import Keys


def _read_youtu(keys: Keys) -> ModelFields:
    is_neighbours = keys.boolean("rope_interleave", True)
    dense = [fields.gated(keys)] * fields.num_layers(keys)
    model = latents.model(keys, None, is_neighbours, first_dense=0, ffns=dense)
    return {**model, "tied": keys.boolean("tie_word_embeddings", True)}


def _write_youtu(config: ModelConfig) -> dict[str, object]:
    raw = latents.written(config)
    for key in (*mixtures.routed(config), "moe_layer_freq"):
        del raw[key]
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export checks the kinds"
    return raw | {
        "intermediate_size": ffn.width,
        "mlp_bias": ffn.has_bias,
        "rope_interleave": config.mixers(Latent)[0].rope.neighbours,
    }


FAMILIES = (
    Family(
        name="youtu",
        architecture="YoutuForCausalLM",
        read=_read_youtu,
        reads=("attention_bias",),
        write=_write_youtu,
        mixers=(Latent,),
        feed_forwards=(Gated,),
        tensors=hf_names.LATENT,
        splits=(parts.latent_heads,),
        gguf=Gguf(gguf_names.LATENT, writer=GgufWriter("deepseek2")),
    ),
)
