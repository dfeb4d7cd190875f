"""The metadata of a `.gguf` file, read by type."""

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

# Those of YaRN, beside the factor and the context that it stretches.
YARN = tuple(
    f"rope.scaling.{key}"
    for key in ("attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
)


def _no_numbers(name: str) -> np.ndarray:
    raise KeyError(name)


@dataclasses.dataclass(frozen=True)
class GgufKeys:
    """An architecture's metadata, read by type.

    Attributes:
        architecture: as llama.cpp calls it, the prefix of its keys.
        metadata: of the file.
        shapes: of its tensors, by name.
        read_numbers: reads a small tensor in float32.
    """

    architecture: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    read_numbers: Callable[[str], np.ndarray] = _no_numbers

    def refuse_unknown(self, known: set[str]) -> None:
        """Raises InputError for a key of the architecture that nothing here reads."""
        prefix = f"{self.architecture}."
        for key in self.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in known:
                raise InputError(f"metadata {shown(key)} is not supported")

    def has(self, key: str) -> bool:
        """Whether the file states it."""
        return f"{self.architecture}.{key}" in self.metadata

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds it."""
        return name in self.shapes

    def get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        """A value of one of these types, or an array of equal ones."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one value a layer, all equal
        if value is None:
            raise InputError(f"metadata {self.architecture}.{key!s} is missing")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InputError(f"metadata {self.architecture}.{key} must be one {kinds[0].__name__}")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = MOST_WIDTH) -> int:
        """An integer from 1 to `limit`."""
        value = self.get(key, (int,), default)
        if not 1 <= value <= limit:
            raise InputError(
                f"metadata {self.architecture}.{key} must be 1 to {limit}, not {value}"
            )
        return value

    def whole(self, key: str, limit: int = MOST_WIDTH) -> int:
        """An integer from 0, where it is not stated, to `limit`."""
        return self.integer(key, limit=limit) if self.get(key, (int,), 0) else 0

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        # Stored in float32: the shortest decimal that rounds to it is the number that was meant.
        value = float(str(np.float32(self.get(key, (float, int), default))))
        if not 0 < value < math.inf:
            raise InputError(f"metadata {self.architecture}.{key} must be positive, not {value}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        return self.get(key, (str,), default)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, bool):
            raise InputError(f"metadata {self.architecture}.{key} must be true or false")
        return value

    def booleans(self, key: str, length: int) -> list[bool] | None:
        """True or false for each of `length` layers; None where the file states nothing."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype != bool or len(value) != length:
            raise InputError(f"metadata {self.architecture}.{key} must list {length} booleans")
        return value.tolist()

    def integers(self, key: str, length: int) -> list[int]:
        """An integer from 1 to `MOST_WIDTH` for each of `length` layers, or one for all of them."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if (
            not isinstance(value, np.ndarray)
            or len(value) != length
            or value.dtype.kind not in "iu"
        ):
            return [self.integer(key)] * length
        if not ((value >= 1) & (value <= MOST_WIDTH)).all():
            raise InputError(f"metadata {self.architecture}.{key} must list 1 to {MOST_WIDTH}")
        return value.tolist()

    def listed(self, key: str) -> list[int]:
        """An integer from 0 to `MOST_WIDTH` for each layer, or one for all of them."""
        count, value = self.num_layers, self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return [self.whole(key)] * count
        is_sound = value.dtype.kind in "iu" and len(value) == count
        if not is_sound or not ((value >= 0) & (value <= MOST_WIDTH)).all():
            raise InputError(
                f"metadata {self.architecture}.{key} must list {count} integers from 0 to {MOST_WIDTH}"
            )
        return value.tolist()

    def kv_heads(self) -> list[int]:
        """Of each layer, 0 of one that has states in their place."""
        return self.listed("attention.head_count_kv")

    @property
    def num_layers(self) -> int:
        """Blocks of the file."""
        return self.integer("block_count", limit=MOST_LAYERS)

    @property
    def head_width(self) -> int:
        """H."""
        heads = max(self.whole("attention.head_count"), 1)  # 0 where no layer attends
        own = max(self.integer("embedding_length") // heads, 1)
        return self.integer("attention.key_length", own)

    def attention(self, rope: Rope | None, **own: Any) -> Attention:
        """Heads as every architecture writes them, and what one adds."""
        num_heads = self.integer("attention.head_count")
        num_kv_heads = self.integer("attention.head_count_kv", num_heads)
        return Attention(num_heads, num_kv_heads, self.head_width, rope, **own)

    def layer(self, rope: Rope | None, **own: Any) -> LayerSpec:
        """A layer of Llama's and most others': attention, and a gated feed-forward."""
        return LayerSpec(self.attention(rope, **own), Gated(self.ffn_width))

    @property
    def ffn_width(self) -> int:
        """F of a dense layer."""
        return self.integer("feed_forward_length")

    def rope(
        self, key: str = "rope.freq_base", default: float = 10_000.0, has_yarn: bool = False
    ) -> Rope:
        """Positions, stretched linearly, or where the architecture may be, by YaRN."""
        theta, scaling = self.number(key, default), self.text("rope.scaling.type", "linear")
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
