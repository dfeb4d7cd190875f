"""Grammars of answers that are messages on channels."""

from collections.abc import Iterable, Mapping

from inference.text import grammar
from inference.text.channels import Channels


def without(
    layout: Channels, specials: Mapping[str, int], words: Iterable[str], has_thoughts: bool
) -> str:
    """Any messages, or all but thoughts, without these words.

    Args:
        specials: ids of special tokens that the marks are, by their text.
    """
    channels = [layout.thought] * has_thoughts + [layout.calls, layout.answer]
    start, channel, constrain, message, closing = (
        grammar.rule_text(mark, specials) for mark in (*layout[:4], layout.closing)
    )
    names = " | ".join(f'"{name}"' for name in channels)
    return grammar.of_lark(
        f"start: message (between message)*\n"
        f'between: {closing} {start} "{layout.role}"\n'
        f"message: to? {channel} ({names}) to? type? {message} TEXT\n"
        f'to: " to=" NAME\ntype: " "? {constrain}? NAME\n'
        f"NAME: /[a-zA-Z0-9_.-]{{1,128}}/\nTEXT: {grammar.terminal_without(words)}"
    )
