"""A fake engine that says what it is told to, under any chat template."""

import dataclasses
import json
from pathlib import Path

import msgspec

from tests.inference.server.fake_engine import END, FakeEngine, tokenizer

_FAMILIES = json.loads(
    (Path(__file__).parents[2] / "golden" / "chat-templates" / "expected.json").read_text("utf-8")
)["families"]
TEMPLATES = {name: family["template"] for name, family in _FAMILIES.items()}
CONTEXT = 16_384


class Parrot(FakeEngine):
    """It says `says`, and ends; without that, what every fake engine says. After `breaks_at` tokens
    it fails at an answer, by constraints of its own where `failure` says so.
    """

    def __init__(self, template: str | None = None):
        super().__init__()
        self.says: str | None = None
        self.breaks_at: int | None = None
        self.failure = ""
        self._template = template

    @property
    def prompt(self) -> str:
        """The last one as text, control tokens among it."""
        return tokenizer().decode(self.prompts[-1], skip_special=False)

    def facts(self):
        facts = super().facts()
        text = msgspec.structs.replace(facts.text, template=self._template or facts.text.template)
        return msgspec.structs.replace(facts, max_context=CONTEXT, text=text)

    def plan(self, params, seed):
        if self.says is None:
            return super().plan(params, seed)
        return [*self.says.encode(), END]

    def _advance(self, each):
        output = super()._advance(each)
        if each.num_told == self.breaks_at:
            return dataclasses.replace(output, token_ids=[], text="", finish_reason="error",
                                       failure=self.failure)  # fmt: skip
        return output


class Control(Parrot):
    """Marks that are special tokens are such in what it says."""

    def plan(self, params, seed):
        return [*tokenizer().encode(self.says, add_special=False), END]
