"""Few shapes, and one for every step that the scheduler can schedule."""

import dataclasses
import itertools

import pytest

from configs.engine import EngineConfig
from configs.errors import InputError
from inference.scheduling.step_shapes import StepShape, choose, enumerate_shapes, expected

ENGINES = [
    EngineConfig.of(max_seqs=max_seqs, num_drafts=num_drafts, **sizes)
    for max_seqs, num_drafts, sizes in itertools.product(
        (1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 64),
        (0, 1, 5),
        ({}, {"decode_rows": (4,)}, {"prefill_chunks": (2,)}, {"prefill_chunks": (4, 1, 4)}),
    )
]
ENGINES += [
    engine.replace(**change)
    for engine in ENGINES
    for change in ({"chunked_prefill": False}, {"free_padding": True})
]


def test_the_default_engine():
    shapes = enumerate_shapes(EngineConfig())
    assert len(shapes) <= 32
    steady = [s.decode[0] for s in shapes if not s.prefill[0]]
    assert steady == [2, 8, 16, 32]
    alone = enumerate_shapes(EngineConfig.of(chunked_prefill=False))
    assert set(alone) == {shape for shape in shapes if not (shape.decode[0] and shape.prefill[0])}


def test_where_padding_is_free_prompts_have_no_steps_of_their_own():
    engine = EngineConfig.of(free_padding=True)
    shapes = enumerate_shapes(engine)
    assert [(s.decode[0], s.prefill[0]) for s in shapes if not s.scored] == [
        (2, 0), (8, 0), (16, 0), (32, 0), (8, 1), (32, 1), (32, 2), (32, 4), (32, 8)
    ]  # fmt: skip
    assert [(s.decode[0], s.prefill[0]) for s in shapes if s.scored] == [(32, 8)]
    alone = engine.replace(chunked_prefill=False)  # nothing rides on prompts
    assert enumerate_shapes(alone) == enumerate_shapes(EngineConfig.of(chunked_prefill=False))


@pytest.mark.parametrize("engine", ENGINES)
def test_few_shapes_cover_every_need(engine):
    shapes = enumerate_shapes(engine)
    assert len(shapes) <= 32 and len(set(shapes)) == len(shapes)
    assert {shape.decode[1] for shape in shapes} == {1, 1 + engine.drafts.num_drafts}
    assert {shape.prefill[1] for shape in shapes} == {engine.shapes.chunk_tokens}
    largest_chunks = max(engine.shapes.prefill_chunks)
    for rows, chunks, scored in itertools.product(
        range(engine.max_seqs + 1), range(largest_chunks + 1), (False, True)
    ):
        if not rows + chunks or (scored and not chunks):
            continue
        if rows and chunks and not engine.scheduling.chunked_prefill:
            continue
        shape = choose(shapes, rows, chunks, scored)
        assert shape.decode[0] >= rows and shape.prefill[0] >= chunks
        assert shape.scored >= scored
        if not chunks:
            assert not shape.prefill[0]  # steady decoding computes no prompt
    top = (engine.max_seqs, largest_chunks)
    assert shapes == tuple(sorted(shapes, key=lambda shape: shape.num_tokens))
    assert all(s.decode[0] <= max(8, *top) for s in shapes)


def test_too_many_sizes_are_refused():
    chunks = tuple(range(1, 40))
    with pytest.raises(
        InputError, match="make 123 step shapes, at most 32 .* fewer sizes"
    ) as error:
        enumerate_shapes(EngineConfig.of(prefill_chunks=chunks))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="step shapes"):
        enumerate_shapes(EngineConfig.of(decode_rows=tuple(range(1, 33))))


def test_counts():
    shape = StepShape((3, 2), (4, 16))
    assert (shape.num_rows, shape.num_tokens, shape.num_logits) == (7, 70, 10)


def test_the_cheapest_cover_is_chosen():
    shapes = enumerate_shapes(
        EngineConfig.of(decode_rows=(2, 8), prefill_chunks=(1, 4), max_seqs=8)
    )
    assert choose(shapes, 2, 0, False) == StepShape((2, 1), (0, 64))
    assert choose(shapes, 3, 0, False) == StepShape((8, 1), (0, 64))
    assert choose(shapes, 0, 1, False) == StepShape((0, 1), (1, 64))
    assert choose(shapes, 1, 2, False) == StepShape((8, 1), (4, 64))
    assert choose(shapes, 0, 1, True) == StepShape((0, 1), (4, 64), scored=True)


def test_a_prompt_alone_then_decoding_are_expected():
    one = EngineConfig(max_seqs=1)
    assert expected(one, [37], 1) == (StepShape((0, 1), (1, 64)), StepShape((1, 1), (0, 64)))
    assert (
        expected(one, [65], 1)[0].prefill == (2, 64) and expected(one, [9000], 1)[0].prefill[0] == 8
    )
    several = expected(EngineConfig(max_seqs=3), [10, 70], 3)
    assert [(s.decode[0], s.prefill[0]) for s in several] == [(0, 4), (3, 0)]


@pytest.mark.parametrize("num_seqs, rows", [(1, 2), (3, 8), (64, 64), (100, 64)])
def test_what_comes_first(num_seqs, rows):
    engine = EngineConfig(max_seqs=64)
    prefill, decode = expected(engine, [5] * num_seqs, num_seqs)
    assert decode == StepShape((rows, 1), (0, engine.shapes.chunk_tokens))
    assert prefill.decode[0] == 0 and prefill.prefill[0] >= min(num_seqs, 2)


def test_shards_take_equal_parts_of_what_comes_first():
    engine = EngineConfig.of(max_seqs=8, decode_rows=(1, 2, 3, 5), prefill_chunks=(1, 2, 3, 5))
    for num_shards, size in ((1, 5), (2, 3), (3, 2), (5, 1)):
        prefill, decode = expected(engine, [64] * 5, 5, num_shards=num_shards)
        assert (prefill.prefill[0], decode.decode[0]) == (size, size)


def test_drafts_that_adapt_decode_with_half_of_them_and_ride_on_prompts_without():
    engine = EngineConfig.of(
        proposer="ngram", num_drafts=5, adapt_drafts=True, max_seqs=8, prefill_chunks=(1, 2)
    )
    shapes = enumerate_shapes(engine)
    alone = {shape.decode[1] for shape in shapes if not shape.prefill[0]}
    riding = {shape.decode for shape in shapes if all((shape.decode[0], shape.prefill[0]))}
    assert alone == {1, 3, 6} and riding == {(8, 1), (8, 6)}
    assert [shape.decode[1] for shape in expected(engine, [9], 1)] == [6, 1, 3, 6]
    assert {width for _, width in (s.decode for s in enumerate_shapes(
        engine.replace(greedy_steps=True)
    ))} == {1, 6}  # fmt: skip


def test_greedy_steps_are_there_twice():
    """With decode rows; a step that is not greedy serves such requests too."""
    engine = EngineConfig.of(greedy_steps=True)
    plain, shapes = enumerate_shapes(EngineConfig()), enumerate_shapes(engine)
    assert len(shapes) <= 32 and set(plain) == {shape for shape in shapes if not shape.greedy}
    twins = {dataclasses.replace(shape, greedy=False) for shape in shapes if shape.greedy}
    assert twins == {shape for shape in plain if shape.decode[0] and not shape.scored}
    for rows, chunks in ((3, 0), (1, 2)):
        drawn, greedy = (choose(shapes, rows, chunks, False, is_greedy) for is_greedy in (0, 1))
        assert greedy == dataclasses.replace(drawn, greedy=True)
    assert not choose(shapes, 0, 2, False, True).greedy
    assert not choose(shapes, 1, 1, True, True).greedy
    assert [shape.greedy for shape in expected(engine, [9], 1, True)] == [False, True]
    assert not any(shape.greedy for shape in expected(engine, [9], 1))
    with pytest.raises(
        InputError, match="list fewer sizes, or set engine.shapes.greedy_steps=false"
    ):
        enumerate_shapes(engine.replace(prefill_chunks=(1, 2, 3, 4, 8)))
