"""Published `config.json` files: each is read as a plan, and has the published parameters.

A line of `tests/golden/published/OWNER.jsonl` is one repository:

* `repository`: its name on the hub;
* `parameters`: the numbers that its `.safetensors` files hold, as the hub counts them;
* `apart`: of these, what is no part of the model that is served, by what it is. What reads images
  was counted by transformers from the same file;
* `counted`: the repository of the same shape that `parameters` was counted in, where the weights
  of this one are packed, or the hub has no count;
* `where`: the public file that quotes the configuration;
* `config`: keys and values as published.
"""

import json
from pathlib import Path

import pytest

from configs.errors import InputError
from inference.checkpoints import resolve, text_files
from inference.families import missing
from inference.planner import weights

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "published"
PUBLISHED = {
    entry["repository"]: entry
    for path in sorted(FOLDER.glob("*.jsonl"))
    for entry in map(json.loads, path.read_text().splitlines())
}

# What is not read yet, and what it waits for. A repository that is read has no line here, nor has
# one whose architecture is in `missing.PARTS`.
WAITING: dict[str, str] = {
    "nvidia/DeepSeek-V4-Flash-NVFP4": "NVFP4 beside FP8 in blocks",
    "inclusionAI/Ling-lite-1.5": "the family",
}


def read(repository: str, directory: Path):
    """Resolves a directory with nothing but the configuration."""
    (directory / text_files.CONFIG).write_text(json.dumps(PUBLISHED[repository]["config"]))
    return resolve.resolve(str(directory)).config


def architectures(repositories) -> set[str]:
    return {PUBLISHED[name]["config"]["architectures"][0] for name in repositories}


UNREAD = [
    name for name in PUBLISHED if name in WAITING or architectures([name]) & missing.PARTS.keys()
]


def test_enough_is_covered():
    assert WAITING.keys() <= PUBLISHED.keys()
    read_now = PUBLISHED.keys() - set(UNREAD)
    assert len(read_now) >= 90 and len(architectures(read_now)) >= 45


@pytest.mark.parametrize("repository", [name for name in PUBLISHED if name not in UNREAD])
def test_parameters_are_the_published_ones(repository, tmp_path):
    entry = PUBLISHED[repository]
    served = entry["parameters"] - sum(entry.get("apart", {}).values())
    assert weights.num_parameters(read(repository, tmp_path)) == pytest.approx(served, rel=1e-3)


@pytest.mark.parametrize("repository", UNREAD)
def test_what_is_not_read_is_refused_in_one_line(repository, tmp_path):
    with pytest.raises(InputError) as caught:
        read(repository, tmp_path)
        pytest.fail(f"{repository} is read now: remove its line")
    assert "\n" not in str(caught.value)
