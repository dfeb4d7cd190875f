"""Fill-in-the-middle: prompts of the texts before and after a gap, which the model fills.

A family of models was trained with marks, which are tokens, around the two texts in one order or
two. With the suffix first, what is typed before the gap comes last in the prompt, so the pages of
the suffix stay cached (Bavarian et al. 2022, section 3).
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from configs.errors import InputError

# Marks in capitals, the texts prefix and suffix in small letters.
_PREFIX_FIRST = "PpSsM"
_SUFFIX_WITHIN = "PSsMp"  # "SPM variant 2": the prefix is not marked off from the middle
_SUFFIX_FIRST = "SsPpM"
MISSING = (
    "the tokenizer has no fill-in-the-middle tokens (<|fim_prefix|> or the like); use a model that "
    "has them, or send the prompt alone"
)
GGUF_NAMES = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
_PROJECT, _FILE, _UNNAMED = "myproject\n", "filename\n", "tmp"  # llama.cpp's


class Vocabulary(Protocol):
    """What a `Tokenizer` knows of its tokens."""

    special_tokens: dict[str, str]

    def token_id(self, content: str) -> int | None: ...


class _Family(NamedTuple):
    """Marks of a family of models, by their contents.

    Attributes:
        prefix, suffix, middle: before the texts, and before the middle; "": it has none.
        orders: in which the family was trained; the usual one first.
        ends: what ends a middle, in addition to the model's end tokens.
        repository, separator: before the name of a project, and before that of a file.
    """

    prefix: str
    suffix: str
    middle: str
    orders: tuple[str, ...] = (_PREFIX_FIRST,)
    ends: tuple[str, ...] = ()
    repository: str = ""
    separator: str = ""


_FAMILIES = (
    _Family(  # Qwen2.5-Coder and later, CodeGemma
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
        repository="<|repo_name|>", separator="<|file_sep|>",
    ),
    _Family(  # StarCoder, Granite Code, Stable Code
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", (_PREFIX_FIRST, _SUFFIX_WITHIN),
        ends=("<fim_pad>", "<file_sep>"),
    ),
    _Family(  # SantaCoder
        "<fim-prefix>", "<fim-suffix>", "<fim-middle>", (_PREFIX_FIRST, _SUFFIX_WITHIN),
        ends=("<fim-pad>",),
    ),
    _Family(  # Code Llama
        "▁<PRE>", "▁<SUF>", "▁<MID>", (_PREFIX_FIRST, _SUFFIX_WITHIN), ends=("▁<EOT>",)
    ),
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, V2, V3
    _Family("[PREFIX]", "[SUFFIX]", "", ("SsPp",)),  # Codestral
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", (_SUFFIX_FIRST,)),  # Seed-Coder
    _Family(  # GLM-4.5; CodeGeeX4 with the suffix first
        "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", (_PREFIX_FIRST, _SUFFIX_FIRST)
    ),
    _Family("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1 Coder
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Gap:
    """The texts around a gap.

    Attributes:
        prefix, suffix: before and after it.
        files: (name, text) of other files, which come first in the prompt; "": without a name.
        suffix_first: whether the suffix precedes the prefix in the prompt; None: as usual for the
            model.
    """

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    suffix_first: bool | None = None

    @property
    def num_chars(self) -> int:
        files = sum(len(name) + len(text) for name, text in self.files)
        return len(self.prefix) + len(self.suffix) + files


@dataclasses.dataclass(frozen=True)
class Layout:
    """A family's marks as one tokenizer has them.

    Attributes:
        marks: ids by the letters of `orders`.
        orders: as `_Family` has them.
        ends: ids that end a middle, in addition to the model's end tokens.
        repository, separator: ids; None: the tokenizer has no such token.
        contents: of all these tokens.
    """

    marks: dict[str, int]
    orders: tuple[str, ...]
    ends: tuple[int, ...]
    repository: int | None
    separator: int | None
    contents: tuple[str, ...]

    def order(self, suffix_first: bool | None) -> str:
        """The order with the suffix first, or last; raises InputError if there is none."""
        for order in self.orders:
            if suffix_first in (None, order.index("s") < order.index("p")):
                return order
        value, valid = (str(flag).lower() for flag in (suffix_first, not suffix_first))
        raise InputError(
            f"suffix_first={value}: this model was trained with the other order; "
            f"leave it out, or send {valid}"
        )


def of_tokenizer(tokenizer: Vocabulary) -> Layout | None:
    """The layout of the first family whose marks a tokenizer has, or that a .gguf file names; None
    if there is neither.
    """
    ids = tokenizer.token_id
    for family in _FAMILIES:
        names = filter(None, (family.prefix, family.suffix, family.middle))
        if all(ids(name) is not None for name in names):
            return _layout(tokenizer, family)
    prefix, suffix, middle, *others = (
        tokenizer.special_tokens.get(f"{name}_token", "") for name in GGUF_NAMES
    )
    if all(name and ids(name) is not None for name in (prefix, suffix, middle)):
        ends = tuple(filter(None, others))
        return _layout(tokenizer, _Family(prefix, suffix, middle, (_PREFIX_FIRST,), ends,
                                          *others[1:]))  # fmt: skip
    return None


def _layout(tokenizer: Vocabulary, family: _Family) -> Layout:
    marks = dict(zip("PSM", (family.prefix, family.suffix, family.middle), strict=True))
    others = family.repository, family.separator, *family.ends
    contents = tuple(dict.fromkeys(filter(None, (*marks.values(), *others))))
    ids = {name: id for name in contents if (id := tokenizer.token_id(name)) is not None}
    return Layout(
        {letter: ids[name] for letter, name in marks.items() if name}, family.orders,
        tuple(ids[name] for name in family.ends if name in ids),
        ids.get(family.repository), ids.get(family.separator), contents,
    )  # fmt: skip


class Infill:
    """Writes prompts of one tokenizer. Control tokens in users' texts stay text."""

    def __init__(
        self,
        layout: Layout,
        encode: Callable[[str], list[int]],
        first_ids: Sequence[int],
        has_dummy_prefix: bool,
    ):
        """`encode`: of a text without control tokens; `first_ids`: that the tokenizer puts before
        a text; `has_dummy_prefix`: it adds a blank before texts, as SentencePiece does.
        """
        self.layout = layout
        self._encode_text = encode
        self._first_ids = list(first_ids)
        self._has_dummy_prefix = has_dummy_prefix
        self._special = {*layout.marks.values(), layout.repository, layout.separator}

    def encode(self, gap: Gap, add_special: bool = True, limit: int | None = None) -> list[int]:
        """Returns the token ids of a prompt, with BOS and the like if `add_special`.

        Args:
            limit: the maximum number of tokens: drops files from the first on, then the ends of
                the two texts that are away from the gap. The prefix keeps at least 3/4 of the room
                where both are long. None: all.

        Raises:
            InputError: a text cannot be encoded, `limit` does not hold the marks, or the model was
                not trained with this order.
        """
        order, marks = self.layout.order(gap.suffix_first), self.layout.marks
        prefix, suffix = self._encode(gap.prefix), self.encode_within(gap.suffix)
        first_ids = self._first_ids if add_special else []
        file_room = None
        if limit is not None:
            room = limit - self.num_marks(gap, add_special)
            if room <= 0:
                raise InputError(f"{limit} tokens do not hold more than the marks around the gap")
            num_suffix = min(len(suffix), max(room - len(prefix), room // 4))
            num_prefix = min(len(prefix), room - num_suffix)
            prefix, suffix = prefix[len(prefix) - num_prefix :], suffix[:num_suffix]
            file_room = room - num_prefix - num_suffix
        ids = first_ids + self._file_ids(gap.files, file_room)
        texts = {"p": prefix, "s": suffix}
        for letter in order:
            ids += texts[letter] if letter in texts else [marks[letter]]
        return ids

    def num_marks(self, gap: Gap, add_special: bool) -> int:
        """Tokens of a prompt that no limit drops."""
        order = self.layout.order(gap.suffix_first)
        first_ids = self._first_ids if add_special else []
        return len(first_ids) + sum(letter in self.layout.marks for letter in order)

    def _file_ids(self, files: Sequence[tuple[str, str]], room: int | None) -> list[int]:
        """Other files, as many of the last ones as there is room for."""
        layout = self.layout
        start: list[int] = []
        end: list[int] = []
        if layout.repository is not None:
            start = [layout.repository, *self._encode(_PROJECT)]
        if layout.separator is not None:
            end = [layout.separator, *self._encode(_FILE)]
        chunks: list[list[int]] = []  # from the last file on
        num_ids = len(start) + len(end)
        for name, text in reversed(files):
            if layout.separator is not None:
                chunk = [layout.separator, *self._encode(f"{name or _UNNAMED}\n{text}")]
            else:
                chunk = self._encode(f"\n\n--- {name or 'snippet'} ---\n\n{text}")
            num_ids += len(chunk)
            if room is not None and num_ids > room:
                break
            chunks.append(chunk)
        ids = list(itertools.chain.from_iterable(reversed(chunks)))
        return [*start, *ids, *end] if ids else []

    def _encode(self, text: str) -> list[int]:
        ids = self._encode_text(text) if text else []
        if not self._special.isdisjoint(ids):  # as words of the vocabulary
            raise InputError("a text holds a mark of gaps that this tokenizer knows as a word")
        return ids

    def encode_within(self, text: str) -> list[int]:
        """Encodes a text that follows others, without the blank before a first one.

        Raises:
            InputError: the text cannot be encoded.
        """
        if not text or not self._has_dummy_prefix:
            return self._encode(text)
        before, ids = self._encode("☺"), self._encode("☺" + text)
        return ids[len(before) :] if ids[: len(before)] == before else self._encode(text)
