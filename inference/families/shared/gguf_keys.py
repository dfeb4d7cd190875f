"""The metadata of a `.gguf` file, read by type; errors name the key."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import MOST_WIDTH
from configs.kinds.rope import Linear, Rope, Yarn
from configs.model import MOST_LAYERS, LayerSpec

RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Keys of YaRN, in addition to the factor and the context that it stretches.
YARN = tuple(
    f"rope.scaling.{key}"
    for key in ("attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
)


def _no_numbers(name: str) -> np.ndarray:
    raise KeyError(name)


@dataclasses.dataclass(frozen=True)
class GgufKeys:
    """The metadata of one architecture.

    Attributes:
        architecture: llama.cpp's name, the prefix of its keys.
    """

    architecture: str
    metadata: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    read_numbers: Callable[[str], np.ndarray] = _no_numbers

    def refuse_unknown(self, valid: set[str]) -> None:
        """Raises InputError for a key of the architecture that is not in `valid`."""
        prefix = f"{self.architecture}."
        for key in self.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in valid:
                raise InputError(f"metadata {shown(key)} is not supported")

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.shapes

    def get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        """Returns a value of one of these types, which an array of equal ones stands for, too."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one value a layer, all equal
        if value is None:
            raise InputError(f"metadata {self.architecture}.{key!s} is missing")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InputError(f"metadata {self.architecture}.{key} must be one {kinds[0].__name__}")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = MOST_WIDTH) -> int:
        """Returns an integer from 1 to `limit`."""
        value = self.get(key, (int,), default)
        if not 1 <= value <= limit:
            raise InputError(
                f"metadata {self.architecture}.{key} must be 1 to {limit}, not {value}"
            )
        return value

    def whole(self, key: str, limit: int = MOST_WIDTH) -> int:
        """Returns an integer from 0, which is the default, to `limit`."""
        return self.integer(key, limit=limit) if self.get(key, (int,), 0) else 0

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        # Stored in float32: the shortest decimal that rounds to it is the number that was meant.
        value = float(str(np.float32(self.get(key, (float, int), default))))
        if not 0 < value < math.inf:
            raise InputError(f"metadata {self.architecture}.{key} must be positive, not {value}")
        return value

    def text(self, key: str, default: str) -> str:
        return self.get(key, (str,), default)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, bool):
            raise InputError(f"metadata {self.architecture}.{key} must be true or false")
        return value

    def booleans(self, key: str, length: int) -> list[bool] | None:
        """Returns a value for each of `length` layers, which may be 0 or 1; None: the key is
        absent.
        """
        values = self._values(key, length, "biu", "booleans")
        if values is not None and not np.isin(values, (0, 1)).all():
            raise InputError(f"metadata {self.architecture}.{key} must list {length} booleans")
        return None if values is None else values.astype(bool).tolist()

    def limits(self, key: str, length: int) -> list[float | None]:
        """Returns a limit for each of `length` layers; 0, or no key: there is none."""
        values = self._values(key, length, "f", "numbers")
        if values is None:
            return [None] * length
        return [float(str(value)) or None for value in values.astype(np.float32)]

    def _values(self, key: str, length: int, kinds: str, valid: str) -> np.ndarray | None:
        """Returns what is listed for each of `length` layers, without layers behind them."""
        values = self.metadata.get(f"{self.architecture}.{key}")
        if values is None:
            return None
        if (
            not isinstance(values, np.ndarray)
            or values.dtype.kind not in kinds
            or len(values) not in (length, self.num_layers)
        ):
            raise InputError(f"metadata {self.architecture}.{key} must list {length} {valid}")
        return values[:length]

    def integers(self, key: str, length: int) -> list[int]:
        """Returns an integer from 1 for each of `length` layers; a file may state one for all."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return [self.integer(key)] * length
        if value.dtype.kind not in "iu" or len(value) != length:
            return [self.integer(key)] * length
        if not ((value >= 1) & (value <= MOST_WIDTH)).all():
            raise InputError(f"metadata {self.architecture}.{key} must list 1 to {MOST_WIDTH}")
        return value.tolist()

    def listed(self, key: str) -> list[int]:
        """Returns an integer from 0 for each layer; a file may state one for all."""
        count, value = self.num_layers, self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return [self.whole(key)] * count
        is_sound = value.dtype.kind in "iu" and len(value) == count
        if not is_sound or not ((value >= 0) & (value <= MOST_WIDTH)).all():
            raise InputError(
                f"metadata {self.architecture}.{key} must list {count} integers from 0 to "
                f"{MOST_WIDTH}"
            )
        return value.tolist()

    def kv_heads(self) -> list[int]:
        """Returns the key and value heads of each layer; 0: it has states instead."""
        return self.listed("attention.head_count_kv")

    @property
    def num_layers(self) -> int:
        return self.integer("block_count", limit=MOST_LAYERS)

    @property
    def head_width(self) -> int:
        if self.has("attention.key_length"):
            return self.integer("attention.key_length")
        heads = max(self.whole("attention.head_count"), 1)  # 0 where no layer attends
        return max(self.integer("embedding_length") // heads, 1)

    def attention(self, rope: Rope | None, **fields: Any) -> Attention:
        """Returns attention with the heads that every architecture states, and `fields`."""
        num_heads = self.integer("attention.head_count")
        num_kv_heads = self.integer("attention.head_count_kv", num_heads)
        return Attention(num_heads, num_kv_heads, self.head_width, rope, **fields)

    def layer(self, rope: Rope | None, **fields: Any) -> LayerSpec:
        """Returns a layer with `attention` and a gated feed-forward."""
        return LayerSpec(self.attention(rope, **fields), Gated(self.ffn_width))

    @property
    def ffn_width(self) -> int:
        return self.integer("feed_forward_length")

    @property
    def rotary_share(self) -> float:
        """Returns the share of each head that rotates."""
        return self.integer("rope.dimension_count", self.head_width) / self.head_width

    def rope(self, default: float = 10_000.0, has_yarn: bool = False) -> Rope:
        """Returns the positions, which may be scaled linearly or, with `has_yarn`, by YaRN."""
        theta, scaling = (
            self.number("rope.freq_base", default),
            self.text("rope.scaling.type", "linear"),
        )
        valid = ("none", "linear", "yarn") if has_yarn else ("none", "linear")
        if scaling not in valid:
            raise InputError(
                f"rope scaling {shown(scaling)} is not supported; valid: {', '.join(valid)}"
            )
        factor = 1.0 if scaling == "none" else self.number("rope.scaling.factor", 1.0)
        if scaling == "yarn":
            return Rope(theta, self._yarn(factor))
        return Rope(theta) if factor == 1.0 else Rope(theta, Linear(factor))

    def _yarn(self, factor: float) -> Yarn:
        spellings = ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor")
        stated = (key for key in spellings if self.has(key))
        return Yarn(
            factor,
            self.integer("rope.scaling.original_context_length"),
            self.number("rope.scaling.yarn_beta_fast", 32.0),
            self.number("rope.scaling.yarn_beta_slow", 1.0),
            next((self.number(key) for key in stated), None),
        )
