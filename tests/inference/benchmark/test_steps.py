"""Steps on arbitrary pages: who reads and writes which."""

import dataclasses

import pytest

from configs.engine import Config, EngineConfig
from inference.benchmark import steps
from inference.planner.calibration.verify import Point
from inference.scheduling.step_shapes import StepShape
from tests import fakes

_MODEL = fakes.llama(max_context=512)
WINDOWED = dataclasses.replace(
    _MODEL, pattern=(*_MODEL.with_kinds(window=100).pattern, *_MODEL.pattern)
)
CONFIG = Config(WINDOWED, EngineConfig.of(max_context=512, cache_bytes=4 << 20)).for_platform("cpu")


@pytest.mark.parametrize("point", [Point(WINDOWED, 8, 0, 300), Point(WINDOWED, 0, 4, 64)])
def test_every_row_reads_and_writes_pages_of_its_own(point):
    num_tokens, arrays = steps.arrays(point, CONFIG)
    for group, table in zip(WINDOWED.page_groups, arrays.tables, strict=True):
        held = table[table > 0]
        assert len(held) == len(set(held))
        live = point.context - group.spec.live_from(num_tokens[0])
        assert len(held) >= len(table) * live // 16
    assert list(arrays.query_length_Y) == [1 if point.rows else 64] * len(table)


def test_the_chunks_of_a_prompt_share_its_pages():
    num_tokens, arrays = steps.arrays(Point(WINDOWED, 0, 4, 300), CONFIG)
    assert num_tokens[0] == 300 - 256 and list(arrays.query_start_Y) == [0, 64, 128, 192]
    assert (arrays.tables[1] == arrays.tables[1][0]).all()


def test_too_many_pages_are_refused():
    with pytest.raises(ValueError, match="8 rows of 500 tokens: needs more pages"):
        steps.arrays(
            Point(WINDOWED, 8, 0, 500),
            CONFIG.with_engine(cache_bytes=1 << 18),
            shape=StepShape((8, 1), (0, 64)),
        )
