"""Repositories of the Hugging Face hub: `owner/name`, optionally `@revision`.

The revision is resolved once, to a commit; every file comes from that commit. Only what is read is
fetched, never a pickle. Cache, token and offline mode are the hub client's own (HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE, HF_ENDPOINT).
"""

import contextlib
import dataclasses
import glob
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.errors import InputError, reason
from inference.checkpoints import safetensors_file, text_files

# How GPTQ, AWQ and ModelOpt described their weights before transformers did.
QUANTIZED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,255})?")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A repository at a commit; `directory` holds the files fetched so far."""

    repo: str
    commit: str
    directory: Path


def is_id(model: str) -> bool:
    """Whether a text has the form of `owner/name` or `owner/name@revision`."""
    return _ID.fullmatch(model) is not None and ".." not in model


def open_snapshot(model: str) -> Snapshot:
    """Resolves the revision, and fetches nothing but what describes the model.

    Raises:
        InputError: there is no such repository or revision, it is gated, or it cannot be reached.
    """
    import huggingface_hub

    repo, _, revision = model.partition("@")
    with _one_line(model):
        api = huggingface_hub.HfApi()
        commit = api.resolve_revision(repo, revision=revision or None).resolved
        path = huggingface_hub.hf_hub_download(repo, text_files.CONFIG, revision=commit)
    snapshot = Snapshot(repo, commit, Path(path).parent)
    _download(snapshot, list(QUANTIZED))
    return snapshot


def fetch(snapshot: Snapshot) -> Path:
    """Fetches a snapshot's tokenizer and weights; raises as `open_snapshot`, or for a bad index."""
    patterns = [
        text_files.CONFIG,
        *text_files.NAMES,
        f"{text_files.TEMPLATES}/*.jinja",
        safetensors_file.INDEX,
    ]
    _download(snapshot, patterns)
    if (snapshot.directory / safetensors_file.INDEX).exists():
        weights = sorted(set(safetensors_file.read_index(snapshot.directory).values()))
    else:
        weights = [safetensors_file.SINGLE]
    _download(snapshot, [*patterns, *map(glob.escape, weights)])
    return snapshot.directory


def _download(snapshot: Snapshot, patterns: list[str]) -> None:
    import huggingface_hub
    from huggingface_hub import utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    with _one_line(f"{snapshot.repo}@{snapshot.commit}"):
        huggingface_hub.snapshot_download(
            snapshot.repo, revision=snapshot.commit, allow_patterns=patterns
        )


@contextlib.contextmanager
def _one_line(model: str) -> Iterator[None]:
    from huggingface_hub import errors

    prefix = f"cannot fetch {model} from the Hugging Face hub"
    repository = model.partition("@")[0]
    try:
        yield
    except errors.GatedRepoError:
        why = f"it is gated: accept its terms at huggingface.co/{repository}, then set HF_TOKEN"
    except errors.RevisionNotFoundError:
        why = "it has no such revision"
    except errors.RepositoryNotFoundError:
        why = "there is no such repository, or it is private and HF_TOKEN is not set"
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            why = _unreachable()
        else:
            why = f"it holds no {text_files.CONFIG}: not a model in Hugging Face format"
    except errors.RevisionResolutionError:
        why = _unreachable()
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        denied = status in (401, 403)
        why = "it is not for this HF_TOKEN, or it needs one" if denied else "the hub answered"
        why += f" (status {status})" if denied else f" with status {status}"
    except Exception as error:  # the HTTP client's own too, whatever package it is
        why = reason(error)[:300]
    else:
        return
    raise InputError(f"{prefix}: {why}") from None


def _unreachable() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the cache does not hold all of it"
    return f"{constants.ENDPOINT} cannot be reached and the cache does not hold all of it"
