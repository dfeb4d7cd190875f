"""Talks to a model in the terminal: python -m scripts.chat --model=smollm2-135m."""

from scripts import interrupts

# isort: split
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from absl import flags

from configs.errors import InputError
from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.text.conversation import Conversation
from scripts import common
from scripts.flags import host_flags, sampling_flags
from scripts.reports import costs

if TYPE_CHECKING:
    from inference.engine import Engine

_SYSTEM = flags.DEFINE_string("system", None, "What the model is told first; see /system.")
for _module in (common, sampling_flags):
    flags.adopt_module_key_flags(_module)

UNREAD = ("json", "n", "best_of", "vote", "beam_width")

_HELP = """\
/system TEXT   another instruction for the model; without TEXT none
/reset         forget the conversation, keep the instruction
/stats         the context in use, and what the last answer took
/save FILE     the conversation as a line for generate --input
/help          these lines
/quit          leave, as Ctrl-D and Ctrl-C do
A line that ends in \\ goes on in the next; Ctrl-C there forgets it. A message that begins with /
is typed with //. Ctrl-C ends an answer early."""


def main(_: Sequence[str]) -> None:
    if common.JSON.value:
        raise InputError("chat prints what is said, not JSON: generate takes messages as JSON")
    if sys.stdin is None:
        raise InputError("stdin is closed: there is nobody to talk to")
    if host_flags.place().count > 1:
        raise InputError("a conversation is held on one host: give --hosts=1")
    params = sampling_flags.read()
    if params.num_running > 1:
        raise InputError("a conversation has one answer a turn: leave --n, --best_of, --beam_width")
    resolved, config = common.resolve_config({"max_seqs": 1}, sampling_flags.engine_needs([params]))
    checkpoint = common.open_checkpoint(resolved)
    tokenizer = checkpoint.load_tokenizer()
    tokenizer = tokenizer.with_template(sampling_flags.TEMPLATE.value)
    if tokenizer.template is None:
        names = ", ".join(tokenizer.templates)
        raise InputError(
            f"this checkpoint has no default chat template: choose one of {names} by --template"
            if names
            else "this checkpoint has no chat template: continue texts with generate"
        )
    conversation = Conversation(tokenizer, config.max_context)
    conversation.instruct(_SYSTEM.value or "")
    engine = common.load_engine(checkpoint, config, [1], greedy=params.is_greedy)  # most are short
    talk = _Talk(engine, conversation, params)
    interrupts.end_at_sigterm()  # and not an answer alone
    if sys.stdin.isatty():
        common.say("/help lists what can be done beside talking; Ctrl-C ends an answer early")
    for text in _lines():
        try:
            if text.startswith("/") and not text.startswith("//"):
                command, _, argument = text.partition(" ")
                if command == "/quit":
                    return
                talk.obey(command, argument.strip())
            elif text.strip():
                talk.answer(text.removeprefix("/"))
        except (InputError, RuntimeError) as error:  # JAX's own are RuntimeErrors
            common.say(f"error: {' '.join(str(error).split())[:500]}")


def _lines() -> Iterator[str]:
    """Yields the user's lines, with prompts on a terminal, until their end or Ctrl-C, which only
    discards an unfinished message of several lines.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401  # gives `input` editing and a history of lines
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    typed = ""
    while True:
        try:
            line = input(("... " if typed else "> ") if is_terminal else "")
        except KeyboardInterrupt:
            if is_terminal:
                print()
            if typed and is_terminal:
                typed = ""
                continue
            return
        except EOFError:
            if is_terminal:
                print()
            if typed:
                yield typed
            return
        typed += line
        if line.endswith("\\"):
            typed = typed[:-1] + "\n"
            continue
        text, typed = typed, ""
        yield text


class _Talk:
    """An engine, a conversation, and the costs of the last answer."""

    def __init__(self, engine: "Engine", conversation: Conversation, params: SamplingParams):
        self._engine = engine
        self._conversation = conversation
        self._params = params
        self._took: tuple[Any, ...] | None = None

    def obey(self, command: str, argument: str) -> None:
        """Runs a command, a line that begins with a slash."""
        conversation = self._conversation
        if command == "/help":
            common.say(_HELP)
        elif command == "/stats":
            self._show_stats()
        elif command == "/system":
            conversation.instruct(argument)
            common.say(
                "the model has its instruction" if argument else "the model has no instruction"
            )
        elif command == "/reset" and not argument:
            conversation.reset()
            common.say("the conversation starts over")
        elif command == "/save" and argument:
            conversation.save(argument)
            common.say(f"{len(conversation.messages)} messages are in {argument}")
        else:
            common.say(f"error: {command} {argument}".rstrip() + " is no command: /help lists them")

    def answer(self, text: str) -> None:
        """Streams an answer; Ctrl-C ends it after the next words, or at once when pressed again."""
        with interrupts.Deferred() as interrupt:
            reason, has_said = self._answer(self._conversation.ask(text), interrupt)
        self._say_why(reason, has_said)

    def _answer(self, ids: list[int], interrupt: interrupts.Deferred) -> tuple[str | None, bool]:
        answer, num_tokens, reason = "", 0, None
        try:
            with closing(self._stream(ids)) as outputs:
                for output in outputs:
                    print(output.text, end="", flush=True)
                    answer += output.text
                    num_tokens += len(output.token_ids)
                    reason = output.finish_reason
                    if interrupt.requested and reason is None:
                        reason = "interrupt"
                        break
        except KeyboardInterrupt:  # the second: does not even wait for a long prompt
            reason = "interrupt"
        finally:
            if answer:
                print(flush=True)
            if answer or reason in ("stop", "length"):
                self._conversation.answer(answer, num_tokens)
            else:
                self._conversation.withdraw()
        return reason, bool(answer)

    def _stream(self, ids: list[int]) -> Generator[RequestOutput, None, None]:
        """The engine's outputs of one answer; notes what it costs."""
        engine = self._engine
        engine.records.clear()
        watch = costs.Stopwatch(engine)
        with (
            common.compile_progress(engine) as compiling,
            closing(engine.stream(ids, self._params)) as outputs,
        ):
            for output in outputs:
                compiling.set()
                watch.note(len(output.token_ids))
                self._took = len(ids), watch.figures(is_one=True)
                yield output

    def _say_why(self, reason: str | None, has_said: bool) -> None:
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
    common.run(main, UNREAD)
