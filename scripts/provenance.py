"""Which weights answer: a name that --model takes may stand for others tomorrow."""

import glob
from pathlib import Path

from configs import presets
from configs.weights import Wheels
from inference.checkpoints.hf import hub
from inference.checkpoints.native import converted, manifest

_READ = (".json", ".jinja", ".safetensors")  # of a directory, what loading reads


def of(model: str) -> list[str]:
    """Tells the weights of a model that was resolved from others: a published digest, the commit of
    a repository, our manifest, or else place, size and time of change of the files.
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
        return [converted.fingerprint(file) for file in found if file.is_file()]
    elif path.exists():
        name, cut, count = map(glob.escape, path.name.partition("-00001-of-"))
        parts = path.parent.glob(f"{name}-*-of-{count}" if cut else name)
        return [converted.fingerprint(part) for part in sorted(parts)]
    snapshot = hub.open_snapshot(model)
    return [snapshot.repo, snapshot.commit]
