"""A pruned model as a checkpoint, which says what it was made of."""

from collections.abc import Mapping

from inference.checkpoints import provenance
from inference.checkpoints.checkpoint import Checkpoint, NewCheckpoint
from inference.prune import child, shapes
from inference.prune.refit import Refitted
from inference.prune.selection import Selection
from inference.prune.shapes import Widths


def checkpoint(
    parent: Checkpoint,
    widths: Widths,
    selection: Selection,
    record: Mapping[str, object],
    refitted: Refitted | None = None,
) -> NewCheckpoint:
    """Returns what is left of a checkpoint, not written yet.

    Args:
        record: what else its stage of `provenance` says, plain JSON values.
        refitted: matrices in place of the parent's.
    """
    config, before = parent.config, parent.contents()
    model = shapes.pruned(config, widths, selection.layers)
    stage = {
        "made_by": "prune",
        **record,
        "widths": dict(widths),
        "layers": list(selection.layers),
        "removed": selection.removed(),
        "parameters": shapes.num_parameters(model),
        "parameters_before": shapes.num_parameters(config),
    }
    contents = child.contents(config, model, before, selection, refitted or {})

    def read_files() -> dict[str, bytes]:
        return provenance.appended(before.read_files(), stage)

    return NewCheckpoint(
        config=model,
        eos_ids=parent.eos_ids,
        new_contents=type(contents)(contents.source, contents.name_map, read_files),
    )
