"""Who proposes drafts."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from configs.engine import Config
from configs.errors import InputError
from configs.heads import BRANCHING, MOST_TREE_DRAFTS, Medusa
from configs.settings.drafts import ACCEPTANCES, LOOKUPS, PROPOSERS

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.load import Progress
    from inference.checkpoints.resolve import Resolved

SPECULATE = flags.DEFINE_string(
    "speculate",
    None,
    "Who proposes tokens that a step then verifies: 'ngram' (what followed before; also 'auto'), "
    "'suffix' (what followed before in any request), "
    "'draft:MODEL' (a smaller model of the same tokenizer), 'medusa:DIR' or 'eagle:DIR' (heads; "
    "without a name those that scripts.train has made for the model), 'dflash:DIR' (heads that "
    "fill in a block of drafts at once), or 'mtp' (the layer that predicts a second token in the "
    "model's own checkpoint). 'ngram,k=4': four at a time; "
    "without k up to four, as many as pay. 'eagle,tree=16': sixteen as a tree, several for each "
    "place. Answers stay the same; with 'ngram,rejection' their distribution does, with "
    "'medusa,typical' neither: more is kept than is exact. `plan`: "
    "k,acceptance,cost of a draft in steps; or auto, or auto,greedy.",
)
_MTP = "mtp"  # the target's own layer, a proposer of EAGLE's kind
_NUM_DRAFTS = 4
_MOST_DRAFTS = MOST_TREE_DRAFTS  # of chains, too: none that are longer pay


def apply(config: Config, model: str) -> Config:
    """The configuration of `model` with the proposer that --speculate names; raises InputError if
    that does not exist or go with the model.
    """
    if SPECULATE.value in (None, "none"):
        return config
    speculation = _parsed()
    num_drafts = speculation.num_drafts or _NUM_DRAFTS
    draft: Any = None
    tree: dict[str, object] = {}
    if speculation.name not in LOOKUPS:
        draft_config = _resolved(config.model.name, model).config
        draft = dataclasses.replace(
            draft_config, dtype=config.model.dtype, cache_format=config.model.cache_format
        )
    if speculation.is_tree:
        from inference.speculation import draft_tree

        tree = draft_tree.settings(draft, num_drafts)
    elif speculation.num_drafts is None and isinstance(draft, Medusa):
        num_drafts = min(num_drafts, draft.num_heads)
    engine = config.engine.replace(
        proposer=speculation.proposer, num_drafts=num_drafts, acceptance=speculation.acceptance,
        adapt_drafts=speculation.num_drafts is None, **tree,
    )  # fmt: skip
    return dataclasses.replace(config, engine=engine, draft=draft)


def open_draft(config: Config, model: str, progress: "Progress | None") -> "Checkpoint":
    return _resolved(config.model.name, model).open(progress)


def _resolved(target: str, model: str) -> "Resolved":
    """What --speculate names, or what scripts.train has made for the target."""
    from inference.checkpoints import resolve
    from inference.files import cache_directory

    name, drafts = _parsed()[:2]
    if name == _MTP:
        return resolve.predicting(model)
    if drafts:
        return resolve.resolve(drafts, drafts=True)
    path = cache_directory.trained(f"{target}-{name}")
    if not path.is_dir():
        raise InputError(
            f"nothing that drafts for {target} is at {path}: name it (--speculate={name}:DIR), or "
            f"train it (python -m scripts.train --task={name} --model=...)"
        )
    return resolve.resolve(str(path), drafts=True)


class _Speculation(NamedTuple):
    name: str  # of the proposer, or `_MTP`
    model: str  # that drafts
    num_drafts: int | None  # None: whatever pays
    is_tree: bool
    acceptance: str

    @property
    def proposer(self) -> str:
        return "eagle" if self.name == _MTP else self.name


def _parsed() -> _Speculation:
    text = SPECULATE.value or ""
    name_and_model, *options = text.split(",")
    name, _, model = name_and_model.partition(":")
    name = "ngram" if name == "auto" else name
    is_named = model or name != "dflash"  # scripts.train makes all others
    if name not in (*PROPOSERS, _MTP) or not is_named or (model and name in (*LOOKUPS, _MTP)):
        raise InputError(
            "--speculate is auto, ngram, suffix, draft:MODEL, medusa:DIR, eagle:DIR, dflash:DIR, "
            f"mtp or none, not {text[:80]!r}"
        )
    keys = ("k", "tree") if name in (*BRANCHING, _MTP) else ("k",)
    sizes: list[str] = []
    rules: list[str] = []
    for option in options:
        key, _, value = option.partition("=")
        is_number = value.isascii() and value.isdigit() and len(value) < 4
        is_size = key in keys and is_number and 1 <= int(value) <= _MOST_DRAFTS
        group = rules if option in ACCEPTANCES else sizes
        if group or not (is_size or option in ("k=auto", *ACCEPTANCES)):
            raise InputError(
                f"--speculate={name} takes one of k=auto and {' or '.join(keys)}=1 to "
                f"{_MOST_DRAFTS}, and one of {' or '.join(ACCEPTANCES)}, not "
                f"{','.join(options)[:80]!r}"
            )
        group.append(option)
    key, _, value = (sizes or ["k=auto"])[0].partition("=")
    num_drafts = None if value == "auto" else int(value)
    return _Speculation(name, model, num_drafts, key == "tree", (rules or ACCEPTANCES)[0])
