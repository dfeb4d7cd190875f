"""Recall: small decoders of one size, which keep the past in different ways, trained to answer with
the values of keys that they were shown (multi-query associative recall, Arora et al. 2023, arXiv
2312.04927).

All begin with the same layer of short convolutions, by which a value meets its key, as the models
of BASED do (Arora et al. 2024, arXiv 2402.18668); two layers of mixers follow, without
feed-forwards and, in attention, without positions.
"""

import dataclasses

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.kind import Mixer
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.s4 import S4
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import LayerSpec, ModelConfig
from configs.recipes.training import TrainingConfig

NUM_KEYS = NUM_VALUES = 128
FILLER = 0  # the token between queries; then come keys, then values
WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Task:
    """Sequences of `length` tokens with so many keys and values.

    Raises:
        InputError: there are not as many keys, or no place to ask for each of them.
    """

    length: int
    num_pairs: int

    def __post_init__(self) -> None:
        max_pairs = min(NUM_KEYS, NUM_VALUES, self.length // 4)  # a pair, its query and a filler
        if not 1 <= self.num_pairs <= max_pairs:
            raise InputError(
                f"a task of {self.length} tokens has at most {max_pairs} pairs, and at least "
                f"1, not {self.num_pairs}"
            )


def _model(name: str, *mixers: Mixer) -> ModelConfig:
    return ModelConfig(
        name=f"recall-{name}",
        family="recall",
        vocab_size=1 + NUM_KEYS + NUM_VALUES,
        width=WIDTH,
        num_layers=1 + len(mixers),
        max_context=4096,
        pattern=tuple(LayerSpec(mixer, None) for mixer in (ShortConv(WIDTH), *mixers)),
        tied=True,
        dtype="float32",
    )


_ATTENTION = Attention(2, num_kv_heads=2, head_width=32, rope=None)
_WINDOW = dataclasses.replace(_ATTENTION, window=32)
# With norms of steps, B and C, as Jamba has them: without, no run learned to answer (docs/log.md).
_MAMBA = Mamba(WIDTH, state_width=16, step_rank=4, norms="weighted")
_MAMBA2 = Mamba2(num_heads=2, head_width=32, state_width=32)
_TAYLOR = LinearAttention(2, key_width=8, value_width=32, feature_map="taylor")
_DELTA = DeltaNet(2, num_key_heads=2, key_width=32, value_width=32)

# By what keeps the past.
MODELS = {
    "attention": _model("attention", _ATTENTION, _ATTENTION),
    "window": _model("window", _WINDOW, _WINDOW),
    "S4": _model("s4", S4(WIDTH), S4(WIDTH)),
    "Mamba": _model("mamba", _MAMBA, _MAMBA),
    "Mamba-2": _model("mamba2", _MAMBA2, _MAMBA2),
    "BASED": _model("based", _TAYLOR, dataclasses.replace(_WINDOW, window=16)),
    "gated DeltaNet": _model("delta-net", _DELTA, _DELTA),
    "Mamba-2, attention": _model("mamba2-attention", _MAMBA2, _ATTENTION),
    "gated DeltaNet, attention": _model("delta-net-attention", _DELTA, _ATTENTION),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a training: what its sequences are, and the steps."""

    tasks: tuple[Task, ...]
    training: TrainingConfig


def _stage(length: int, counts: tuple[int, ...], steps: int, batch: int, rate: float) -> Stage:
    training = TrainingConfig(
        steps=steps, batch=batch, window=length, learning_rate=rate, warmup_steps=steps // 20
    )
    return Stage(tuple(Task(length, count) for count in counts), training)


def stages(model: ModelConfig) -> tuple[Stage, ...]:
    """How a model is trained, one stage after the other: what to do is learned where it is cheap,
    then to do it with much to keep. By the rate at which states learn this best, attention to all
    of the past does not learn it at all.
    """
    has_attention = any(mixer.window is None for mixer in model.mixers(Attention))
    rate = 3e-3 if has_attention else 1e-2
    return (
        _stage(32, (2, 4, 8), steps=6000, batch=16, rate=rate),
        _stage(256, (8, 16, 32, 64), steps=500, batch=4, rate=rate / 2),
    )


# What is asked for of each trained model.
HELD_OUT = tuple(
    Task(length, count)
    for length, count in ((256, 8), (256, 16), (256, 32), (256, 64), (1024, 16), (1024, 64))
)
