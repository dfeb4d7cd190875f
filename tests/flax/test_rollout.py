"""Tunix's GRPO learner samples by an engine; `make test-flax` runs this."""

import functools

import jax
import numpy as np
import optax
import pytest

pytest.importorskip("tunix", reason="make test-flax has it")

from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import rl_cluster
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout.base_rollout import RolloutConfig

from configs.errors import InputError
from inference.training.tunix_rollout import EngineRollout
from tests import fakes
from tests.flax import models, packages

_SIZES = dict(max_seqs=8, decode_rows=(8,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20, linear="reference", attention="reference")  # fmt: skip
_NAME = "tunix-qwen3"
_PAD, _BEGIN, _END = range(3)
_STEPS, _ITERATIONS, _PROMPTS, _ANSWERS, _TOKENS = 5, 2, 2, 4, 6


class _Letters:
    """A token for each character of a text."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def bos_id(self):
        return _BEGIN

    def eos_id(self):
        return _END

    def pad_id(self):
        return _PAD


def _engine(name=_NAME):
    return fakes.engine(models.MODELS[name], None, "one", **_SIZES)


def _rollout(module, engine):
    return EngineRollout(module, TokenizerAdapter(_Letters()), engine=engine)


def _module(name=_NAME):
    module = packages.module(name)
    nnx.update(module, packages.drawn(nnx.state(module, nnx.Param)))
    return module


def _check_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_rollout_samples_and_scores_as_tunix_does():
    module, engine = _module(), _engine()
    rollout = _rollout(module, engine)
    config = RolloutConfig(
        max_tokens_to_generate=_TOKENS, temperature=1.0, max_prompt_length=8,
        return_logprobs=True, seed=jax.random.key(8),
    )  # fmt: skip
    output = rollout.generate(["abc", "de", "abc"], config)
    again = rollout.generate(["abc", "de", "abc"], config)
    for one, other in zip(output.tokens, again.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    assert output.tokens[0].tolist() != output.tokens[2].tolist()
    assert [row.tolist() for row in output.left_padded_prompt_tokens] == [
        [_PAD] * 4 + [_BEGIN, *b"abc"],
        [_PAD] * 5 + [_BEGIN, *b"de"],
        [_PAD] * 4 + [_BEGIN, *b"abc"],
    ]
    completions = np.full((3, _TOKENS), _PAD, np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    logprobs = rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions)
    graph, state = nnx.split(module)
    expected = compute_per_token_logps(
        graph, state, jax.numpy.asarray(output.left_padded_prompt_tokens),
        jax.numpy.asarray(completions), _PAD, _END,
    )  # fmt: skip
    is_token = completions != _PAD
    assert is_token.sum() == sum(map(len, output.tokens))
    np.testing.assert_allclose(logprobs[is_token], expected[is_token], rtol=0, atol=1e-5)
    for row, sampled, tokens in zip(logprobs, output.logprobs, output.tokens, strict=True):
        np.testing.assert_allclose(row[: len(tokens)], sampled, rtol=0, atol=1e-5)


def test_an_answer_ends_with_its_end_token():
    module = _module()
    table = module.lm_head.w
    table[...] = table[...] * 0
    rollout = _rollout(module, _engine())
    config = RolloutConfig(max_tokens_to_generate=_TOKENS, temperature=0.0, eos_tokens=[0, 9])
    tokens = rollout.generate(["abc"], config).tokens[0]
    assert tokens.tolist() == [0]  # of equal logits the first


def test_five_steps_of_grpo():
    module, engine = _module(), _engine()
    reference = _module()
    first = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = RolloutConfig(max_tokens_to_generate=_TOKENS, temperature=1.0, max_prompt_length=8)
    cluster = rl_cluster.RLCluster(
        actor=module, reference=reference, tokenizer=_Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in rl_cluster.Role},
            rollout_engine=functools.partial(EngineRollout, engine=engine),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-3), eval_every_n_steps=1000,
                max_steps=_STEPS * _ITERATIONS,
            ),
            rollout_config=config,
        ),
    )  # fmt: skip
    sampled = []

    def reward(prompts, completions, **kwargs):
        sampled.extend(completions)
        return [float(len(set(text))) for text in completions]

    learner = grpo_learner.GRPOLearner(
        cluster,
        # A batch is used twice: the second time its ratios are to the engine's log-probabilities.
        grpo_learner.GRPOConfig(num_generations=_ANSWERS, num_iterations=_ITERATIONS, beta=0.04),
        reward_fns=reward,
    )
    learner.train([{"prompts": np.array(["ab", "cde"])}] * _STEPS)
    assert len(sampled) == _STEPS * _PROMPTS * _ANSWERS
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)
    same = [
        path
        for (path, one), other in zip(
            jax.tree.flatten_with_path(nnx.to_pure_dict(trained))[0], jax.tree.leaves(first),
            strict=True,
        )
        if np.array_equal(one, other)
    ]  # fmt: skip
    assert not same
    _check_same(engine.export_params(like=trained), trained)
    assert engine.score([[1, 97, 98]])[0].params_versions == (1 + _STEPS,)


def test_what_an_engine_cannot_do_is_said_in_one_line():
    module, engine = _module(), _engine()
    rollout = _rollout(module, engine)
    with pytest.raises(InputError, match=r"temperature=0.9: log-probabilities are the model's own"):
        rollout.generate(["a"], RolloutConfig(temperature=0.9, return_logprobs=True))
    with pytest.raises(InputError, match="layers/0/attn/k_norm/w of tunix is missing"):
        rollout.update_params(nnx.state(_module("tunix-llama"), nnx.Param))
    _check_same(
        engine.export_params(like=nnx.state(module, nnx.Param)), nnx.state(module, nnx.Param)
    )
    module.adapter = nnx.LoRAParam(np.zeros(3, np.float32))
    with pytest.raises(InputError, match="the actor has LoRA parameters"):
        _rollout(module, engine)
