"""What a request may ask."""

import math

import numpy as np
import pytest

from configs.errors import InputError
from inference.request import FIELDS, FORMER_NAMES, SamplingParams

NAN, INF, HUGE = math.nan, math.inf, 10**5000  # which Python refuses to print


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("max_new_tokens", [0, 1, 10**9], [-1, NAN, INF, 1.5, "8", None]),
        ("temperature", [0, 0.7, 100], [-0.1, NAN, INF, 100.1, "1", None]),
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31, 1.0, NAN]),
        ("top_p", [1, 0.5, 1e-9], [0, 0.0, -0.5, 1.1, NAN, INF]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, NAN]),
        ("epsilon_cutoff", [0, 3e-4, 1], [-0.1, 1.1, NAN]),
        ("repetition_penalty", [1, 0.5, 100], [0, -1, 101, NAN, INF]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, NAN, -INF]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, NAN, INF]),
        ("min_tokens", [0, 5], [-1, NAN, 0.5]),
        ("seed", [None, 0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 1.0, NAN, "1"]),
        ("stop", [(), ("a", "\n")], [("",), ("a", ""), "abc", (HUGE,), 3, (b"a",), ("\udcff",)]),
        ("stop", [("a",)], [{"a": 1}]),
        ("stop_token_ids", [(), tuple(range(128))], [tuple(range(129)), 3, "3", (3.0,), (True,)]),
        ("allowed_token_ids", [(), None, (3,)], [3, np.array([3.0]), np.array([True])]),
        (
            "banned_token_ids",
            [(), (3,)],
            [3, ("3",), np.eye(2, dtype=int), {3: 1.0}, b"a", (HUGE, "a")],
        ),
        (
            "logit_bias",
            [(), ((3, -100.0),)],
            [((3, NAN),), ((3, INF),), 3, (3,), {"3": 1.0}, {HUGE: "1"}, {3: True}, {3: 10**400}],
        ),
        ("ignore_eos", [True, False], [1, "true", None]),
        ("best_of", [None, 1], [0, 1.0, True]),
    ],
)
def test_ranges(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InputError) as error:
            SamplingParams(**{name: value})
        text = str(error.value)
        assert "\n" not in text and name.split("_")[0] in text


def test_values_are_kept_as_pythons_own():
    """Whatever holds them: partial results and JSON compare them as written."""
    ids = np.array([5, 7], np.int32)
    given = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.array(0.25), seed=np.uint64(2**63),
        presence_penalty=1, logit_bias={np.int32(5): np.float32(1.5), 6: 1}, allowed_token_ids=ids,
        banned_token_ids=None, stop=["a"], stop_token_ids=list(ids), ignore_eos=np.True_,
    )  # fmt: skip
    expected = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, seed=2**63, presence_penalty=1.0,
        logit_bias=((5, 1.5), (6, 1.0)), allowed_token_ids=(5, 7), stop=("a",),
        stop_token_ids=(5, 7), ignore_eos=True,
    )  # fmt: skip
    assert given == expected and repr(given) == repr(expected)
    empty = SamplingParams(stop=None, stop_token_ids=None, banned_token_ids=None, logit_bias=None)
    assert empty == SamplingParams(
        logit_bias={}, stop=[], stop_token_ids=ids[:0], banned_token_ids=set()
    )


def test_a_stop_that_min_tokens_ignores_to_the_end():
    SamplingParams(stop=("a",), min_tokens=8, max_new_tokens=8)  # as others take it
    with pytest.raises(InputError, match="^stop can never match: min_tokens=9 ignores it beyond"):
        SamplingParams(stop=("a",), min_tokens=9, max_new_tokens=8)


def test_a_declaration_is_whole():
    defaults = SamplingParams()
    for name, field in FIELDS.items():
        assert getattr(defaults, name) == field.default, name
        assert field.doc[0].isupper() and field.doc.endswith((".", ").")), name
        assert field.bodies or not (field.wire or field.wire_kind or field.trace), name
    assert not FORMER_NAMES.keys() & FIELDS.keys()


@pytest.mark.parametrize(
    "asked, is_greedy, needs_counts",
    [
        ({}, True, False),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, True, False),
        ({"stop": ("x",), "stop_token_ids": (1,), "ignore_eos": True}, True, False),
        ({"temperature": 0.1}, False, False),
        ({"logit_bias": ((1, 2.0),)}, False, False),
        ({"allowed_token_ids": (1,)}, False, False),
        ({"allowed_token_ids": ()}, False, False),
        ({"banned_token_ids": (1,)}, False, False),
        ({"min_tokens": 1}, False, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"frequency_penalty": 0.1}, False, True),
    ],
)
def test_what_the_sampler_must_do(asked, is_greedy, needs_counts):
    params = SamplingParams(**asked)
    assert params.is_greedy is is_greedy and params.needs_counts is needs_counts
