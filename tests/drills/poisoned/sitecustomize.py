"""Faults in the engine of a server under test: Python imports this where the folder is on its path.

Code that works on one sequence raises for requests that carry a mark: a seed from `FIRST_SEED` on,
a stop string or a grammar that names the place. Every other fault is a panic of Rust code, which is
no `Exception`.
"""

import importlib.abc
import importlib.machinery
import itertools
import sys

FIRST_SEED = 66_600
PLACES = ("mask", "accept", "commit", "build", "proposer", "detokenizer")


class PanicException(BaseException):
    """Of the name that PyO3 gives a panic."""


_faults = itertools.count()


def _fail(place: str) -> None:
    kind = PanicException if next(_faults) % 2 else RuntimeError
    raise kind(f"a fault in {place}")


def _fail_for(place: str, sequence) -> None:
    if sequence.params.seed == FIRST_SEED + PLACES.index(place):
        _fail(place)


def _grammars(module) -> None:
    start, mask, accept = module.Grammars.start, module.Grammar.mask, module.Grammar.accept

    def marked(self, grammar, *rest):
        made = start(self, grammar, *rest)
        made.poison = next((p for p in PLACES[:2] if f"poison-{p}" in grammar), None)
        return made

    def poisoned_mask(self):
        if getattr(self, "poison", None) == "mask":
            _fail("mask")
        return mask(self)

    def poisoned_accept(self, token):
        if getattr(self, "poison", None) == "accept":
            _fail("accept")
        return accept(self, token)

    module.Grammars.start = marked
    module.Grammar.mask, module.Grammar.accept = poisoned_mask, poisoned_accept


def _commits(module) -> None:
    commit = module.StepResults.commit

    def poisoned(self, row, chunk):
        if chunk.sequence.num_output_tokens >= 3:
            _fail_for("commit", chunk.sequence)
        return commit(self, row, chunk)

    module.StepResults.commit = poisoned


def _inputs(module) -> None:
    request_row = module.request_row

    def poisoned(sequence, vocab_size):
        _fail_for("build", sequence)
        return request_row(sequence, vocab_size)

    module.request_row = poisoned


def _proposers(module) -> None:
    verified = module.AdaptiveDrafts.verified

    def poisoned(self, sequence, *counts):
        _fail_for("proposer", sequence)
        return verified(self, sequence, *counts)

    module.AdaptiveDrafts.verified = poisoned


def _detokenizers(module) -> None:
    push = module.Detokenizer.push
    create = module.Detokenizer.__init__

    def marked(self, tokenizer, stop=(), *rest):
        create(self, tokenizer, stop, *rest)
        self.poison = "poison-detokenizer" in stop

    def poisoned(self, ids):
        ids = list(ids)
        if ids and self.poison:
            _fail("detokenizer")
        return push(self, ids)

    module.Detokenizer.__init__, module.Detokenizer.push = marked, poisoned


_PATCHES = {
    "inference.text.grammar": _grammars,
    "inference.scheduling.step_output": _commits,
    "inference.sampling.parameters": _inputs,
    "inference.scheduling.adaptive_drafts": _proposers,
    "inference.text.detokenizer": _detokenizers,
}


class _Poisoner(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _PATCHES[name](module)

        spec.loader.exec_module = exec_module
        return spec


if any(argument.startswith("--engine_socket") for argument in sys.orig_argv):
    sys.meta_path.insert(0, _Poisoner())
