"""Queries and bodies of the endpoints that control the engine."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

_Path = Annotated[str, Meta(min_length=1, max_length=4096)]
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Version = Annotated[int, Meta(ge=1, le=2**53)]


class PauseQuery(Struct, forbid_unknown_fields=True):
    """POST /pause. `mode`: of the answers that are being generated."""

    mode: Literal["abort", "keep"] = "abort"


class SleepQuery(Struct, forbid_unknown_fields=True):
    """POST /sleep. `level`: 1 keeps the weights in the host's memory, 2 drops them."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1


class WakeQuery(Struct, forbid_unknown_fields=True):
    """POST /wake_up. `path` and `weight_version`: of other weights, as `UpdateRequest` has them."""

    path: _Path | None = None
    weight_version: _Version | None = None


class ControlQuery(Struct, forbid_unknown_fields=True):
    """A query without parameters."""


class UpdateRequest(Struct, kw_only=True):
    """POST /update_weights.

    Attributes:
        path: as `--model` takes it, or a step that Orbax wrote.
        weight_version: of these weights; the default is the next.
        flush_cache: what is cached is computed again (the default).
    """

    path: _Path
    weight_version: _Version | None = None
    flush_cache: bool | None = None


class LoadAdapterRequest(Struct, kw_only=True):
    """POST /v1/load_lora_adapter. `lora_path`: a directory of the peft package or a .gguf file, on
    disk or in a store.
    """

    lora_name: _Name
    lora_path: _Path


class UnloadAdapterRequest(Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: _Name


class EngineStatus(Struct):
    """The state of the engine.

    Attributes:
        is_sleeping: its device memory is free.
        is_paused: no step begins.
        weight_version: of its weights; 0: those that it was started with.
    """

    is_sleeping: bool
    is_paused: bool
    weight_version: int
