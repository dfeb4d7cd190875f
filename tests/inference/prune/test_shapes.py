"""Every golden checkpoint in every shape that it can have, without weights."""

import dataclasses

import numpy as np

from configs.errors import InputError
from configs.kinds.params import leaves
from inference.checkpoints import resolve
from inference.checkpoints.checkpoint import Contents
from inference.checkpoints.names import identity
from inference.checkpoints.tensor_source import TensorSource
from inference.prune import axes, child, selection, shapes
from tests.inference.prune.children import GOLDEN


@dataclasses.dataclass(frozen=True)
class RandomImportance:
    config: object

    def depth(self):
        return np.arange(self.config.num_layers) + 1.0

    def layer(self, index):
        rng = np.random.default_rng(index)
        scores = {axes.WIDTH: rng.random(self.config.width)}
        for axis, part in axes.of_layer(self.config.layers[index]):
            size = axis.size(part.kind)
            shape = (part.kind.experts[0], size) if axis.is_stacked else (size,)
            scores[axis.name] = rng.random(shape)
        return scores


def zeros(config):
    """A checkpoint of zeros of one byte."""
    infos = {"/".join(path): info for path, info in leaves(config.parameters())}

    def read(name, start, stop, columns=slice(None)):
        rows = np.zeros(infos[name].in_rows, np.int8)[start:stop]
        return rows[:, columns] if rows.ndim > 1 else rows

    source = TensorSource("zeros", {path: info.in_rows for path, info in infos.items()}, read)
    return Contents(source, identity, dict)


def configs():
    for path in sorted(GOLDEN.glob("*/config.json")):
        try:
            yield resolve.resolve(str(path.parent)).config
        except InputError:
            continue


def test_children_of_every_family_have_the_tensors_that_they_declare():
    families, refused = set(), 0
    for config in configs():
        for axis, size in shapes.sizes(config).items():
            widths = {axis: max(size // 2, 1)}
            try:
                shapes.check(config, widths)
                importance = RandomImportance(config)
                count = widths.get(axes.LAYERS, config.num_layers)
                layers = selection.layers(importance, count, is_contiguous=False)
                model = shapes.pruned(config, widths, layers)
            except InputError as error:
                assert "\n" not in str(error)
                refused += 1
                continue
            stays = selection.select(importance, widths, layers)
            tensors = child.contents(config, model, zeros(config), stays, {}).source
            for path, info in leaves(model.parameters()):
                name = "/".join(path)
                rows = np.concatenate(list(tensors.blocks(name)))
                assert rows.shape == info.in_rows, (config.name, widths, name)
            families.add(config.family)
    assert len(families) > 50 and refused < 80
