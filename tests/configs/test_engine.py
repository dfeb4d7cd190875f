"""Settings of an engine: each has one place, one declaration and one name."""

import dataclasses

import pytest

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.presets import get
from configs.settings.section import Section, declared, paths

BASE = Config(get("smollm2-135m").config)
MOVED = {name: path for name, path in paths(EngineConfig).items() if path.count(".") == 2}


def test_every_setting_is_declared_with_its_meaning():
    for name, setting in declared(EngineConfig).items():
        assert setting.doc.endswith("."), name


def test_names_are_unique():
    groups = [field.default for field in dataclasses.fields(EngineConfig)]
    sections = [EngineConfig(), *(group for group in groups if isinstance(group, Section))]
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", MOVED)
def test_a_setting_outside_its_group_is_refused_with_its_path(name):
    message = f"engine.{name}: is now {MOVED[name]}"
    with pytest.raises(InputError, match=f"^{message}$"):
        overrides.apply(BASE, [f"engine.{name}=1"])
    with pytest.raises(InputError, match=f"^{message}$"):
        EngineConfig(**{name: 1})


def test_settings_are_changed_by_name():
    engine = EngineConfig.of(max_seqs=3, linear="reference", seed=5)
    assert (
        engine
        == overrides.apply(
            BASE, ["engine.max_seqs=3", "engine.kernels.linear=reference", "engine.seed=5"]
        ).engine
    )
    assert BASE.with_engine(seed=1).engine == BASE.engine.replace(seed=1)
    changed = overrides.changed(engine, EngineConfig())
    assert changed == {"max_seqs": 3, "linear": "reference", "seed": 5}
    with pytest.raises(InputError, match="^unknown setting 'lines'; valid: max_seqs, max_context"):
        EngineConfig.of(lines=3)
