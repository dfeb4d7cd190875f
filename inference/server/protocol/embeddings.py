"""Bodies of POST /v1/embeddings, and the encoding of vectors."""

import base64
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from inference.server.protocol.fields import (
    EmbeddingFields,
    Inputs,
    Short,
    Side,
    TruncatedTokens,
)

MAX_INPUTS = 2048


class PooledRequest(EmbeddingFields, kw_only=True):
    """Fields of all requests that read prompts alone; priority, cache_salt, truncate_prompt_tokens
    and truncation_side are vLLM's. The first tokens of a text are kept unless its left side is cut;
    user has no effect.
    """

    model: Short | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    user: Short | None = None


class EmbeddingRequest(PooledRequest, kw_only=True):
    """POST /v1/embeddings. null stands for the default everywhere.

    Attributes:
        input: a text, token ids, or a list of one of the two.
        encoding_format: of vectors: lists of numbers, or the base64 of little-endian float32s.
        dimensions: vectors are cut after so many numbers, and have length 1 again.
        add_special_tokens: as vLLM has it.
    """

    input: Inputs = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None


class Embedding(Struct):
    """The vector of one input."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class PooledUsage(Struct):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompts: Iterable[Sequence[int]]) -> "PooledUsage":
        num_tokens = sum(map(len, prompts))
        return cls(num_tokens, num_tokens)


class Embeddings(Struct):
    """Vectors, in the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: PooledUsage
    object: str = "list"


def vector(data: bytes, dimensions: int | None, encoding: str | None) -> list[float] | str:
    """Encodes a vector, scaled to length 1.

    Args:
        data: float32s, as in `RequestOutput.embedding`.
        dimensions, encoding: fields of the request.
    """
    vector_D = np.frombuffer(data, "<f4")[:dimensions].astype(np.float64)
    vector_D = (vector_D / (np.linalg.norm(vector_D) or 1.0)).astype("<f4")
    if encoding == "base64":
        return base64.b64encode(vector_D.tobytes()).decode()
    return vector_D.tolist()
