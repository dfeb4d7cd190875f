"""A host of two that reads its chip's parts of a model: `host.py MODEL CHIP` prints a digest of
each parameter's part.
"""

import hashlib
import json
import sys

import numpy as np

from configs.mesh import Mesh
from inference.checkpoints import resolve
from layers import decoder
from sharding import rules


def main(model, chip):
    checkpoint, digests = resolve.resolve(model).open(None), {}

    def place(path, info, stored):
        part = rules.part(checkpoint.config, path, info, stored, Mesh(model=2), 0, int(chip))
        digests[path] = hashlib.sha256(np.ascontiguousarray(part)).hexdigest()
        return part

    checkpoint.load_params(decoder.param_infos(checkpoint.config), None, place, in_part=True)
    print(json.dumps(digests, sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
