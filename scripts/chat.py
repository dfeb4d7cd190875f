"""Talks to a model in the terminal: python -m scripts.chat --model=smollm2-135m."""

import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from absl import flags

from configs.errors import InputError
from inference.request import SamplingParams
from scripts import common, interrupts, templates
from scripts.conversation import Conversation
from scripts.flags import sampling_flags
from scripts.reports import costs

_SYSTEM = flags.DEFINE_string("system", None, "What the model is told first; see /system.")
flags.adopt_module_key_flags(sampling_flags)
flags.adopt_module_key_flags(templates)

_HELP = """\
/system TEXT   another instruction for the model; without TEXT none
/reset         forget the conversation, keep the instruction
/stats         the context in use, and what the last answer took
/save FILE     the conversation as a line for generate --input
/help          these lines
/quit          leave, as Ctrl-D and Ctrl-C do
A line that ends in \\ goes on in the next; Ctrl-C there forgets it. A message that begins with /
is typed with //. Ctrl-C ends an answer early."""


def main(argv: Sequence[str]) -> None:
    del argv
    if common.JSON.value:
        raise InputError("chat prints what is said, not JSON: generate takes messages as JSON")
    if sys.stdin is None:
        raise InputError("stdin is closed: there is nobody to talk to")
    params = sampling_flags.read()
    if params.num_running > 1:
        raise InputError("a conversation has one answer a turn: leave --n, --best_of, --beam_width")
    resolved, config = common.resolve_config({"max_seqs": 1}, sampling_flags.engine_needs([params]))
    checkpoint, tokenizer = common.open_checkpoint(resolved)
    tokenizer = templates.choose(tokenizer, templates.FLAG.value)
    if tokenizer.template is None:
        named = ", ".join(tokenizer.templates)
        raise InputError(
            f"this checkpoint has no default chat template: choose one of {named} by --template"
            if named
            else "this checkpoint has no chat template: continue texts with generate"
        )
    conversation = Conversation(tokenizer, config.max_context)
    conversation.instruct(_SYSTEM.value or "")
    talk = _Talk(common.load_engine(checkpoint, config), conversation, params)
    if sys.stdin.isatty():
        common.say("/help lists what can be done beside talking; Ctrl-C ends an answer early")
    for text in _lines():
        try:
            if text.startswith("/") and not text.startswith("//"):
                command, _, rest = text.partition(" ")
                if command == "/quit":
                    return
                talk.obey(command, rest.strip())
            elif text.strip():
                talk.answer(text.removeprefix("/"))
        except (InputError, RuntimeError) as error:  # JAX's own are RuntimeErrors
            common.say(f"error: {' '.join(str(error).split())[:500]}")


def _lines() -> Iterator[str]:
    """What the user types, until the end of it or Ctrl-C, which in the middle of a message only
    forgets that; a prompt on a terminal only.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401  # gives `input` editing and a history of lines
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    held = ""
    while True:
        try:
            line = input(("... " if held else "> ") if is_terminal else "")
        except KeyboardInterrupt:
            if is_terminal:
                print()
            if held and is_terminal:
                held = ""
                continue
            return
        except EOFError:
            if is_terminal:
                print()
            if held:
                yield held
            return
        held += line
        if line.endswith("\\"):
            held = held[:-1] + "\n"
            continue
        text, held = held, ""
        yield text


class _Talk:
    """An engine, a conversation, and what the last answer took."""

    def __init__(self, engine: Any, conversation: Conversation, params: SamplingParams):
        self._engine = engine
        self._conversation = conversation
        self._params = params
        self._took: tuple[Any, ...] | None = None

    def obey(self, command: str, rest: str) -> None:
        """What a line with a slash asks for."""
        conversation = self._conversation
        if command == "/help":
            common.say(_HELP)
        elif command == "/stats":
            self._show_stats()
        elif command == "/system":
            conversation.instruct(rest)
            common.say("the model has its instruction" if rest else "the model has no instruction")
        elif command == "/reset" and not rest:
            conversation.reset()
            common.say("the conversation starts over")
        elif command == "/save" and rest:
            conversation.save(rest)
            common.say(f"{len(conversation.messages)} messages are in {rest}")
        else:
            common.say(f"error: {command} {rest}".rstrip() + " is no command: /help lists them")

    def answer(self, text: str) -> None:
        """Answers a message, as it comes; Ctrl-C ends the answer and not the program: after the
        next words, or pressed again at once.
        """
        with interrupts.Deferred() as interrupt:
            reason, has_said = self._answer(self._conversation.ask(text), interrupt)
        self._say_why(reason, has_said)

    def _answer(self, ids: list[int], interrupt: interrupts.Deferred) -> tuple[str | None, bool]:
        """Why the answer ended, and whether there is any."""
        said, num_tokens, reason = "", 0, None
        try:
            with closing(self._stream(ids)) as updates:
                for update in updates:
                    print(update.text, end="", flush=True)
                    said += update.text
                    num_tokens += len(update.token_ids)
                    reason = update.finish_reason
                    if interrupt.asked and reason is None:
                        reason = "interrupt"
                        break
        except KeyboardInterrupt:  # the second: not even a long prompt is waited for
            reason = "interrupt"
        finally:
            if said:
                print(flush=True)
            if said or reason in ("stop", "length"):
                self._conversation.answer(said, num_tokens)
            else:
                self._conversation.withdraw()
        return reason, bool(said)

    def _stream(self, ids: list[int]) -> Generator[Any, None, None]:
        """The engine's news of one answer, its costs noted."""
        engine = self._engine
        engine.records.clear()
        start, compiled_before = time.perf_counter(), engine.compile_s
        first_token_s, num_tokens = 0.0, 0
        with closing(engine.stream(ids, self._params)) as updates:
            for update in updates:
                num_tokens += len(update.token_ids)
                seconds = time.perf_counter() - start
                first_token_s = first_token_s or (seconds if update.token_ids else 0.0)
                compile_s = engine.compile_s - compiled_before
                self._took = (len(ids), num_tokens, first_token_s, seconds, compile_s)
                yield update

    def _say_why(self, reason: str | None, has_said: bool) -> None:
        """One line where an answer did not end by itself."""
        if reason == "error":
            common.say("error: the model gave non-finite logits")
        elif reason == "interrupt" and has_said:
            common.say("(stopped: what was said stays)")
        elif reason == "interrupt":
            common.say("(stopped before the first word: the message was not kept)")
        elif reason == "length" and self._conversation.num_free_tokens <= 0:
            common.say("the context is full: /save FILE keeps the conversation, /reset starts over")
        elif reason == "length":
            common.say(f"(cut off at --max_new_tokens={self._params.max_new_tokens})")

    def _show_stats(self) -> None:
        conversation = self._conversation
        used, free = conversation.num_tokens, conversation.num_free_tokens
        common.say(
            f"{len(conversation.messages)} messages, {used} tokens of a context of {used + free}"
        )
        if self._took is not None:
            common.say(costs.summary(costs.stats(self._engine, *self._took)))


if __name__ == "__main__":
    common.run(main)
