"""Which weights a model's name stands for, since they may change while the name stays, and what
made them: stages of pruning, training and quantizing, which each directory lists.
"""

import dataclasses
import glob
import hashlib
import json
from collections.abc import Mapping

import numpy as np

from configs import presets
from configs.errors import InputError
from configs.heads import Heads
from configs.weights import Wheels
from inference.checkpoints import load, manifest, mapped, text_files
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.hf import hub
from inference.files import contents as file_contents
from inference.files import mirror
from layers import params

_DIGESTED_ROWS = 4  # of each matrix
_MOST_VALUES = 1 << 24  # numbers of removed units among them
_STAGES = "stages"
_READ = (".json", ".jinja", ".safetensors")  # what loading reads of a directory


def identity(model: str) -> list[str]:
    """Texts that identify the weights of a model that was resolved: a published digest, the commit
    of a repository, our manifest, or else path, size and time of change of each file.
    """
    path = mirror.path_of(model)
    if model in presets.NAMES:
        weights = presets.get(model).weights
        if isinstance(weights, Wheels):
            return [weights.sha256]
        model = weights.repo_id
    elif path.is_dir():
        listed = path / manifest.NAME
        if listed.exists():
            return [mapped.read_text(listed)]
        files = (file for file in sorted(path.rglob("*")) if file.suffix in _READ)
        return [file_contents.fingerprint(file) for file in files if file.is_file()]
    elif path.exists():
        name, cut, count = map(glob.escape, path.name.partition("-00001-of-"))
        parts = path.parent.glob(f"{name}-*-of-{count}" if cut else name)
        return [file_contents.fingerprint(part) for part in sorted(parts)]
    snapshot = hub.open_snapshot(model)
    return [snapshot.repo, snapshot.commit]


def weights_digest(checkpoint: Checkpoint) -> str:
    """Names the weights that heads are trained for, in whatever format of equal values: by shapes,
    and by the first rows of every parameter.
    """
    contents, whole = checkpoint.contents(), hashlib.sha256()
    plain = dataclasses.replace(checkpoint.config, formats=())
    for path, info in params.flatten(plain.parameters()).items():
        stored = load.StoredParameter(contents.source, contents.name_map(path), info)
        rows = np.ascontiguousarray(stored[:_DIGESTED_ROWS], np.float32)
        whole.update(f"{path} {info.shape}".encode() + rows.tobytes())
    return whole.hexdigest()


def check_target(heads: Heads, checkpoint: Checkpoint) -> None:
    """Raises an `InputError` unless heads were trained for, or came with, these weights."""
    if heads.target and (digest := weights_digest(checkpoint)) != heads.target:
        raise InputError(
            f"{heads.name} was trained for other weights ({heads.target[:12]}) than those of "
            f"{checkpoint.config.name} ({digest[:12]}): heads draft for the model that they were "
            "trained for"
        )


def stages(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    """Returns what made a checkpoint, oldest first; none: no program of ours did.

    Args:
        files: the small files beside its weights, by name (`Contents.read_files`).

    Raises:
        InputError: the file that lists them is damaged.
    """
    if text_files.PROVENANCE not in files:
        return []
    label = text_files.PROVENANCE
    listed = mapped.parse_json(files[label], label, _MOST_VALUES).get(_STAGES)
    if not isinstance(listed, list) or not all(isinstance(stage, dict) for stage in listed):
        raise InputError(
            f"{label}: must list objects as {_STAGES}; remove the file to go on without them"
        )
    return listed


def appended(files: Mapping[str, bytes], stage: Mapping[str, object]) -> dict[str, bytes]:
    """Returns the small files of a checkpoint with one more stage.

    Args:
        stage: plain JSON values: `made_by`, `parent` (`weights_digest` of what it started from),
            `data` (a digest, or None) and whatever else says how, such as steps.

    Raises:
        InputError: as `stages`.
    """
    text = json.dumps({_STAGES: [*stages(files), dict(stage)]}) + "\n"
    return {**files, text_files.PROVENANCE: text.encode()}
