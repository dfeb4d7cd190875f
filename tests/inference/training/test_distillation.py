"""A student's loss is its divergence from the teacher, whether that is in memory or in a file."""

import dataclasses
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import InputError
from configs.mesh import Mesh
from configs.recipes.training import DIVERGENCES, Distillation, Recipe
from inference.training import distillation, divergences, loop, losses, start
from inference.training.teacher_file import TeacherFile
from inference.training.windows import Windows
from layers import decoder, ragged
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

TEACHER, STUDENT = fakes.gemma(), fakes.llama(num_layers=1, width=16)
TRAINING = Distillation(steps=4, batch=4, window=16, learning_rate=1e-2, warmup_steps=1)
TOKENS = np.random.default_rng(0).integers(0, 131, 300).astype(np.uint16)
DATA = Windows(TOKENS, 16, 4, seed=0)


def changed(**changes):
    return dataclasses.replace(TRAINING, **changes)


def masters(model, seed=0, mesh=None):
    values = start.masters(Recipe(model, changed(seed=seed), mesh or Mesh()))
    return jax.tree.map(lambda x: 2 * x, values)


def loss_of(training, values, frozen, teacher=TEACHER, student=STUDENT):
    loss = distillation.from_memory(teacher, student, training)
    return compiling.jit(jax.value_and_grad(loss))(values, frozen, DATA.batch(0))


def logprobs(values, model, temperature):
    inputs = DATA.batch(0)["tokens"][:, :-1]
    rows = ragged.contiguous(*inputs.shape)
    hidden, _ = decoder.forward(values, model, inputs.reshape(-1), rows)
    return np.float64(jax.nn.log_softmax(decoder.logits(values, model, hidden) / temperature))


def kl(p, q):
    return (np.exp(p) * (p - q)).sum(1).mean()


def by_hand(name, p, q):
    middle = np.log((np.exp(p) + np.exp(q)) / 2)
    return {
        "forward": kl(p, q),
        "reverse": kl(q, p),
        "jensen_shannon": (kl(p, middle) + kl(q, middle)) / 2,
    }[name]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_loss_is_the_divergence(name, temperature, monkeypatch):
    monkeypatch.setattr(losses, "_BLOCK_ROWS", 16)
    student, teacher = masters(STUDENT, 1), masters(TEACHER)
    loss, slopes = loss_of(changed(divergence=name, temperature=temperature), student, teacher)
    pair = logprobs(teacher, TEACHER, temperature), logprobs(student, STUDENT, temperature)
    np.testing.assert_allclose(loss, temperature**2 * by_hand(name, *pair), rtol=1e-4)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_model_does_not_diverge_from_itself(name):
    values = masters(TEACHER)
    training = changed(divergence=name, hidden_weight=1.0)
    of_model = distillation.masters(values, TEACHER, TEACHER, training)
    loss, slopes = loss_of(training, of_model, values, student=TEACHER)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    chex.assert_trees_all_close(slopes, jax.tree.map(jnp.zeros_like, slopes), atol=1e-5)


def test_few_tokens_diverge_at_most_as_far_as_all():
    drawn = np.random.default_rng(0).standard_normal((2, 20, 50), np.float32)
    teacher, student = 3 * jnp.asarray(drawn)
    for diverge in divergences.BY_NAME.values():
        so_far = np.zeros(20)
        for count in (1, 8, 49):
            ids, of_teacher = divergences.likeliest(teacher, count)
            np.testing.assert_allclose(np.exp(of_teacher).sum(1), 1, rtol=1e-5)
            of_both = of_teacher, divergences.with_others(student, ids)
            assert np.all(diverge(*of_both) >= so_far - 1e-6)
            so_far = diverge(*of_both)
        whole = diverge(*map(jax.nn.log_softmax, (teacher, student)))
        np.testing.assert_allclose(so_far, whole, rtol=1e-4, atol=1e-6)


def test_hidden_states_of_another_width_are_learned_through_a_matrix():
    training = changed(hidden_weight=2.0)
    student, teacher = masters(STUDENT, 1), masters(TEACHER)
    values = distillation.masters(student, STUDENT, TEACHER, training)
    loss, slopes = loss_of(training, values, teacher)
    plain, _ = loss_of(TRAINING, student, teacher)
    assert plain < loss <= plain + 4
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(slopes))
    chex.assert_trees_all_equal(distillation.student_of(values, training), student)


def file(folder, monkeypatch, top_k=130, **changes):
    monkeypatch.setenv("RIDGELINE_CACHE", str(folder))
    training = changed(top_k=top_k, **changes)
    return TeacherFile(DATA, training, {"teacher": "a", "tokens": "b"}), training


def test_from_a_file_it_is_the_same(tmp_path, monkeypatch):
    labels, training = file(tmp_path, monkeypatch, temperature=1.5)
    student, teacher = masters(STUDENT, 1), masters(TEACHER)
    labels.write(TEACHER, lambda: teacher)
    loss = compiling.jit(jax.value_and_grad(distillation.from_file(STUDENT, training)))
    whole = loss_of(changed(temperature=1.5), student, teacher)
    chex.assert_trees_all_close(loss(student, None, labels.batch(0)), whole, rtol=0.01, atol=2e-3)


def test_a_file_is_written_once_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("inference.training.teacher_file._PART", 4)
    labels, _ = file(tmp_path, monkeypatch, top_k=3)
    teacher, loads = masters(TEACHER), []

    def load():
        loads.append(1)
        return teacher

    def interrupt(done, total, label):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        labels.write(TEACHER, load, interrupt)
    for _ in range(2):
        labels.write(TEACHER, load)
    assert len(loads) == 2
    fresh, _ = file(tmp_path / "other", monkeypatch, top_k=3)
    fresh.write(TEACHER, load)
    for step in range(4):
        chex.assert_trees_all_equal(labels.batch(step), fresh.batch(step))
    chex.assert_shape(labels.batch(0)["logprobs"], (4, 16, 4))


def test_another_teacher_has_another_file(tmp_path, monkeypatch):
    labels, training = file(tmp_path, monkeypatch, top_k=3)
    labels.write(TEACHER, lambda: masters(TEACHER))
    other = TeacherFile(DATA, training, {"teacher": "c", "tokens": "b"})
    with pytest.raises((InputError, OSError)):
        other.batch(0)
    shutil.rmtree(tmp_path / "teachers")


@pytest.mark.parametrize("source", ["memory", "file"])
def test_over_chips_it_is_the_same_up_to_rounding(source, tmp_path, monkeypatch):
    labels, training = file(tmp_path, monkeypatch, top_k=20)
    labels.write(TEACHER, lambda: masters(TEACHER))
    if source == "memory":
        training = changed(hidden_weight=0.5)

    def run(mesh):
        student = distillation.masters(masters(STUDENT, 1, mesh), STUDENT, TEACHER, training)
        if source == "file":
            loss = distillation.from_file(STUDENT, training)
            return loop.train(loss, student, labels, training)
        loss = distillation.from_memory(TEACHER, STUDENT, training)
        return loop.train(loss, student, DATA, training, frozen=masters(TEACHER, mesh=mesh))

    one, many = (jax.device_get(run(mesh)) for mesh in (None, Mesh(data=4, model=2)))
    chex.assert_trees_all_close(many, one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("changes", "cause"), [
    ({"divergence": "kl"}, "must be one of forward, reverse, jensen_shannon"),
    ({"temperature": 0.0}, "a finite number above 0"),
    ({"top_k": -1}, "training.top_k is at least 0"),
    ({"hidden_weight": float("nan")}, "must be finite"),
    ({"on_policy": 1.5}, "must be from 0 to 1"),
    ({"hidden_weight": 1.0, "top_k": 4}, "the file has no hidden states"),
    ({"on_policy": 0.5, "top_k": 4}, "the file has nothing of what a student writes"),
])  # fmt: skip
def test_settings_that_mean_nothing(changes, cause):
    with pytest.raises(InputError, match=cause):
        changed(**changes)
