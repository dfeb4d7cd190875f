"""Where thoughts are in the answers of a model: between marks, or on a channel."""

import functools

from inference.text import thoughts
from inference.text.channels import Channels
from inference.text.thoughts import Marks

Layout = Marks | Channels

CHANNELS = Channels()


@functools.lru_cache(maxsize=8)
def of_template(template: str | None) -> Layout | None:
    """Returns the layout that a chat template knows; None: it knows no thoughts."""
    source = template or ""
    if CHANNELS.channel in source and CHANNELS.message in source:
        return CHANNELS
    marks = (m for m in thoughts.MARKS if m.opening in source or m.closing in source)
    return next(marks, None)
