"""A tiny checkpoint of each family, and of each form of weights, is read twice alike."""

from pathlib import Path

import numpy as np
import pytest

from inference.checkpoints import load, resolve
from inference.families import families
from layers import params

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
TINY = [min(GOLDEN.glob(f"{name}-*/config.json")).parent for name in families.ALL]
FEW_BITS = sorted(path.parent for path in GOLDEN.glob("*/*/config.json"))


def contents(folder: Path) -> dict[str, bytes]:
    """Reads every parameter of a directory anew, as bytes."""
    resolved = resolve.resolve(str(folder), drafts=True)
    stored = resolved.open(None).contents()
    return {
        path: np.asarray(load.StoredParameter(stored.source, stored.name_map(path), info)).tobytes()
        for path, info in params.flatten(resolved.config.parameters()).items()
    }


@pytest.mark.parametrize("folder", [*TINY, *FEW_BITS], ids=lambda folder: folder.name)
def test_a_checkpoint_is_read_twice_alike(folder):
    first = contents(folder)
    assert first and first == contents(folder)
