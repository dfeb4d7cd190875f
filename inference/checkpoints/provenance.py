"""Which weights a model's name stands for, since they may change while the name stays."""

import glob
from pathlib import Path

from configs import presets
from configs.weights import Wheels
from inference.checkpoints import mapped
from inference.checkpoints.hf import hub
from inference.checkpoints.native import manifest

_READ = (".json", ".jinja", ".safetensors")  # what loading reads of a directory


def identity(model: str) -> list[str]:
    """Texts that identify the weights of a model that was resolved: a published digest, the commit
    of a repository, our manifest, or else path, size and time of change of each file.
    """
    path = Path(model)
    if model in presets.NAMES:
        weights = presets.get(model).weights
        if isinstance(weights, Wheels):
            return [weights.sha256]
        model = weights.repo_id
    elif path.is_dir():
        listed = path / manifest.NAME
        if listed.exists():
            return [listed.read_text()]
        found = (file for file in sorted(path.rglob("*")) if file.suffix in _READ)
        return [mapped.fingerprint(file, file.stat()) for file in found if file.is_file()]
    elif path.exists():
        name, cut, count = map(glob.escape, path.name.partition("-00001-of-"))
        parts = path.parent.glob(f"{name}-*-of-{count}" if cut else name)
        return [mapped.fingerprint(part, part.stat()) for part in sorted(parts)]
    snapshot = hub.open_snapshot(model)
    return [snapshot.repo, snapshot.commit]
