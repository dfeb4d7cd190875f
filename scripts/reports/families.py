"""Writes the tables of docs/families.md: families that run, and checkpoints that tests compare.

python -m scripts.reports.families [FILE]
"""

import json
import sys
from pathlib import Path

import numpy as np

from configs import presets
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.compressed import Compressed
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.checkpoints.gguf.pretokenizers import SPLITS
from inference.checkpoints.hf import config_json
from inference.families import families, missing
from inference.planner import weights
from scripts.reports import most_tried
from scripts.reports.pages.markdown import fill, table

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"

PAGE = ROOT / "docs" / "families.md"


def page() -> str:
    """Returns the page, with its tables written anew."""
    folders = {path.parent.name: path.parent for path in sorted(GOLDEN.glob("*/expected.npz"))}
    configs = {name: config_json.read_model(folder) for name, folder in folders.items()}
    names = []
    for family in families.ALL.values():
        tiny = [config for config in configs.values() if config.family == family.name]
        parts = dict.fromkeys(part for config in tiny for part in _parts(config))
        sizes = [
            f"`{name}` ({weights.num_parameters(preset.config) / 1e9:.2f} B)"
            for name, preset in presets.NAMES.items()
            if preset.config.family == family.name
        ]
        names.append((family.name, family.architecture, ", ".join(parts), ", ".join(sizes)))
    header = (
        *("checkpoint", "heads", "experts", "layers", "head", "stored", "keys of", "prompts"),
        "greedy",
    )
    rows = [_checkpoint(name, folders[name], config) for name, config in configs.items()]
    blocks = {
        "families": table(("family", "architecture", "in addition to Llama", "presets"), names),
        "pre-tokenizers": [", ".join(f"`{name}`" for name in SPLITS) + "."],
        "most tried": table(most_tried.COLUMNS, most_tried.rows(GOLDEN / "published")),
        "missing": table(("architecture", "part that is not here"), sorted(missing.PARTS.items())),
        "checkpoints": table(header, rows),
    }
    return fill(PAGE.read_text("utf-8"), blocks)


def _parts(config: ModelConfig) -> list[str]:
    """Returns the parts of a model that the first Llama lacks."""
    layers = config.layers
    mixer = layers[0].mixer
    ffns = [layer.ffn for layer in layers if layer.ffn]
    mixers = config.mixers(Attention)
    attention = next(iter(mixers), Attention(1, 1, 2))
    reading = [part for layer in layers for part in layer.mixer.parts if hasattr(part, "rope")]
    ropes = [part.rope for part in reading]
    chunks = [getattr(part, "chunked", False) for part in reading]
    pairs = zip(reading, chunks, strict=True)
    windows = [getattr(part, "window", None) is not None and not chunk for part, chunk in pairs]
    temperatures = [getattr(part, "temperature", None) for part in reading]
    has_ffn_bias = any(isinstance(ffn, Gated | Plain) and ffn.has_bias for ffn in ffns)
    biases = (*attention.biases, *(("ffn",) if has_ffn_bias else ()))
    biases += ("head",) if config.has_head_bias else ()
    parts = [
        *_states(config),
        *_delta(config),
        *_linear(config),
        *_latent(next(iter(config.mixers(Latent)), mixer)),
        *_compressed(config),
        *_experts(config),
        {
            "rms": "",
            "layer": "layer norm",
            "layer_unbiased": "layer norm without a bias",
            "layer_bare": "layer norm without weights",
        }[config.norm],
        ("" if config.pre_norms else "norms after only"),
        ("norms before and after" if config.pre_norms and config.post_norms else ""),
        ("norms after in some layers" if any(layer.is_post_normed for layer in layers) else ""),
        {
            0: "",
            1: "feed-forward beside attention, one norm",
            2: "feed-forward beside attention, two norms",
        }[layers[0].parallel_norms],
        {
            None: "",
            "head": "norm of each query and key head",
            "all": "norm of all queries and keys",
            "each": "layer norm of each query and key head by weights that no other head has",
            "plain": "root mean square of queries and keys",
        }[attention.qk_norm],
        ("RoPE before that norm" if attention.rotates_first else ""),
        (f"biases ({', '.join(biases)})" if biases else ""),
        ("plain feed-forward" if any(isinstance(ffn, Plain) for ffn in ffns) else ""),
        ("activations that layers learn" if any(map(_is_learned, ffns)) else ""),
        ("learned positions" if config.learned_positions else ""),
        ("windows in some layers" if any(windows) and not all(windows) else ""),
        ("windows in all layers" if windows and all(windows) else ""),
        ("attention in chunks" if any(chunks) else ""),
        ("queries that grow with their position" if any(temperatures) else ""),
        ("layers without RoPE" if None in ropes and any(ropes) else ""),
        ("no positions" if mixers and not any(ropes) and not config.learned_positions else ""),
        ("soft cap of scores" if attention.score_cap else ""),
        ("sinks" if attention.has_sinks else ""),
        ("output gates" if attention.has_output_gate else ""),
        ("gates of heads" if attention.head_gate else ""),
        ("narrow values" if attention.value_width else ""),
        ("soft cap of logits" if config.logit_cap else ""),
        ("scaled embedding" if config.embedding_scale != 1 else ""),
        ("root mean square of values" if attention.has_value_norm else ""),
        ("values that are keys" if not all(m.has_values for m in mixers) else ""),
        ("wider heads without windows" if len({m.head_width for m in mixers}) > 1 else ""),
        ("shared caches" if any(m.owner is not None for m in mixers) else ""),
        ("inputs of each layer" if config.layer_inputs else ""),
        ("scales of layers" if config.has_layer_scales else ""),
        ("scaled residuals" if config.residual_scale != 1 else ""),
        ("scaled logits" if config.logit_scale != 1 else ""),
        ("scaled keys" if attention.key_scale != 1 else ""),
        ("a scale of scores of its own" if attention.scale is not None else ""),
    ]
    turning = [rope for rope in ropes if isinstance(rope, Rope)]
    kinds = {type(rope.scaling).__name__.lower() for rope in turning if rope.scaling is not None}
    parts += [f"RoPE {kind}" for kind in sorted(kinds)]
    parts += ["partial RoPE" for rope in turning[:1] if rope.share < 1]
    is_paired = any(mixer.rope and mixer.rope.neighbours for mixer in mixers)
    parts += ["rotary pairs side by side"] * is_paired
    return [part for part in parts if part]


def _delta(config: ModelConfig) -> list[str]:
    """Of layers with the delta rule."""
    mixers = config.mixers(DeltaNet)
    if not mixers:
        return []
    is_by_channel = any(mixer.decay_rank for mixer in mixers)
    return [
        "Kimi Delta Attention" if is_by_channel else "gated DeltaNet",
        ("steps that overshoot" if any(mixer.most_beta > 1 for mixer in mixers) else ""),
    ]


def _states(config: ModelConfig) -> list[str]:
    """Of layers that keep a state of fixed size."""
    selective, heads = config.mixers(Mamba), config.mixers(Mamba2)
    kinds = [layer.mixer.parts for layer in config.layers]
    both = any(len(parts) > 1 for parts in kinds)
    norms = {mixer.norms for mixer in selective}
    limits = {mixer.step_limits for mixer in heads} - {Mamba2(1, 1, 1).step_limits}
    return [
        ("Mamba" if selective else ""),
        ("Mamba-2" if heads else ""),
        ("norms without weights of what tokens choose" if "plain" in norms else ""),
        ("norms of what tokens choose" if "weighted" in norms else ""),
        ("limited steps" if limits else ""),
        ("attention and states in one layer" if both else ""),
        ("layers of one part" if any(isinstance(p[0], NoMixer) for p in kinds) else ""),
        ("no feed-forward" if all(layer.ffn is None for layer in config.layers) else ""),
    ]


def _latent(mixer: Mixer) -> list[str]:
    if not isinstance(mixer, Latent):
        return []
    return [
        "latent attention",
        ("latent queries" if mixer.query_rank else ""),
        ("an indexer that chooses tokens" if mixer.indexer else ""),
        ("choices of earlier layers" if mixer.choice_owner is not None else ""),
        ("rotary pairs side by side" if mixer.rope and mixer.rope.neighbours else ""),
        ("no positions" if mixer.rope is None else ""),
        ("scores scaled for the context" if mixer.scale else ""),
    ]


def _compressed(config: ModelConfig) -> list[str]:
    mixers = config.mixers(Compressed)
    return [
        ("compressed attention" if mixers else ""),
        ("an indexer that chooses entries" if any(mixer.indexer for mixer in mixers) else ""),
        ("several residual streams" if config.hyper_connections else ""),
    ]


def _experts(config: ModelConfig) -> list[str]:
    ffns = [layer.ffn for layer in config.layers if layer.ffn]
    mixture = next((ffn for ffn in ffns if isinstance(ffn, Experts)), None)
    if mixture is None:
        return []
    router = mixture.router
    return [
        "experts",
        ("dense layers beside them" if any(isinstance(ffn, Gated) for ffn in ffns) else ""),
        ("a shared expert" if mixture.shared_width else ""),
        ("a gate of the shared expert" if mixture.has_shared_gate else ""),
        ("weights not normalized" if not router.is_normalized else ""),
        ("sigmoid scores" if router.scores == "sigmoid" else ""),
        ("square roots of softplus as scores" if router.scores == "sqrt_softplus" else ""),
        ("experts chosen one by one" if router.jitter else ""),
        ("experts by token id" if config.reads_tokens else ""),
        ("offsets in the choice" if router.has_offsets else ""),
        ("groups of experts" if router.num_groups > 1 else ""),
        ("bias of the router" if router.has_bias else ""),
        ("biases of experts" if mixture.has_bias else ""),
        ("limited hidden values" if mixture.limit else ""),
        ("limits behind the activation" if any(map(_late_limits, ffns)) else ""),
        ("norms of experts and router" if mixture.has_norms else ""),
        ("norms behind mixtures" if mixture.has_post_norm else ""),
        ("plain experts" if not mixture.is_gated else ""),
        ("experts behind a latent" if mixture.latent_width else ""),
        ("experts whose inputs are weighed" if mixture.weighs_inputs else ""),
    ]


def _is_learned(ffn: FeedForward) -> bool:
    return isinstance(ffn, Plain) and ffn.activation == "xielu"


def _late_limits(ffn: FeedForward) -> bool:
    return isinstance(ffn, Experts) and any(ffn.late_limits)


def _linear(config: ModelConfig) -> list[str]:
    """Of layers whose states decay alike at every token, or are what was convolved last."""
    attends, factors = config.mixers(LinearAttention), any(layer.factors for layer in config.layers)
    return [
        ("gated short convolutions" if config.mixers(ShortConv) else ""),
        ("lightning attention" if any(mixer.decay is not None for mixer in attends) else ""),
        ("a residual stream that goes on from norms" if factors else ""),
    ]


def _heads(mixer: Mixer) -> str:
    if isinstance(mixer, ShortConv):
        return f"{mixer.channels} channels"
    if isinstance(mixer, LinearAttention):
        return f"{mixer.num_heads} of {mixer.key_width} x {mixer.value_width}"
    if isinstance(mixer, Latent):
        return f"{mixer.num_heads} of {mixer.nope_width} + {mixer.rope_width}"
    if isinstance(mixer, Compressed):
        entries = f", entries of {mixer.stride}" if mixer.stride else ""
        return f"{mixer.num_heads}/1 of {mixer.head_width}{entries}"
    if isinstance(mixer, DeltaNet):
        sizes = f"{mixer.key_width} x {mixer.value_width}"
        return f"{mixer.num_heads}/{mixer.num_key_heads} of {sizes}"
    if isinstance(mixer, Mamba):
        return f"{mixer.channels} channels of {mixer.state_width}"
    if isinstance(mixer, Mamba2):
        return f"{mixer.num_heads}/{mixer.num_groups} of {mixer.state_width} x {mixer.head_width}"
    if isinstance(mixer, Parallel):
        return f"{_heads(mixer.attention)} and {_heads(mixer.recurrent)}"
    if isinstance(mixer, NoMixer):
        return ""
    assert isinstance(mixer, Attention)
    return f"{mixer.num_heads}/{mixer.num_kv_heads} of {mixer.head_width}"


def _checkpoint(name: str, directory: Path, config: ModelConfig) -> tuple[str, ...]:
    visited = next((layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts)), None)
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    with np.load(directory / "expected.npz") as arrays:
        prompts = [str(len(arrays[f"tokens_{i}"])) for i in (0, 1)]
        greedy = sum(file.startswith("greedy_") for file in arrays.files)
        greedy = len(arrays["greedy_prompts"]) if "greedy_prompts" in arrays.files else greedy
    return (
        f"`{name}`",
        ", ".join(filter(None, dict.fromkeys(_heads(layer.mixer) for layer in config.layers))),
        f"{visited.top_k}/{visited.num_experts}" if visited else "",
        str(config.num_layers),
        "tied" if config.tied else "own",
        str(raw.get("dtype", raw.get("torch_dtype"))),
        "transformers 5" if "dtype" in raw else "transformers 4",
        " and ".join(prompts),
        f"{greedy} prompts" if greedy else "",
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
