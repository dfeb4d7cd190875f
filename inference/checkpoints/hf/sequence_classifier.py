"""The head of transformers' `ARCHForSequenceClassification`: `score.weight`, [labels, D]."""

import dataclasses

import numpy as np

from configs.errors import InputError, shown
from inference.checkpoints.tensor_source import TensorSource
from inference.classifier import Activation, Classifier
from inference.families.shared.config_keys import Keys

_WEIGHT, _BIAS = "score.weight", "score.bias"
_PROBLEMS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_MODULES: dict[str, Activation] = {  # of torch, as sentence-transformers names them
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}
_MAX_NAME = 512  # characters of a label


def split(
    source: TensorSource, raw: dict[str, object], width: int
) -> tuple[Classifier, TensorSource]:
    """Returns the head of a directory, and the tensors without it.

    Args:
        raw: the directory's `config.json`.
        width: of the hidden states.

    Raises:
        InputError: the head is missing, or `config.json` describes another one.
    """
    num_labels = source.shapes.get(_WEIGHT, (0,))[0]
    source.check_shape(_WEIGHT, (num_labels, width))
    bias_L = np.zeros(num_labels, "<f4")
    if _BIAS in source.shapes:
        source.check_shape(_BIAS, (num_labels,))
        bias_L[:] = source.read(_BIAS, 0, num_labels)
    weight_LD = np.asarray(source.read(_WEIGHT, 0, num_labels), "<f4")
    keys = Keys(raw, f"{source.label}: ")
    problems = {name: name for name in _PROBLEMS}
    activation = _PROBLEMS[keys.choice("problem_type", problems, "single_label_classification")]
    if num_labels == 1 and activation == "softmax":  # which of one logit says nothing
        activation = "sigmoid"
    classifier = Classifier(
        weight_LD.tobytes(), bias_L.tobytes(), _labels(keys, num_labels), activation,
        _score_activation(keys), _pad(keys),
    )  # fmt: skip
    trunk_shapes = {
        name: shape for name, shape in source.shapes.items() if name not in (_WEIGHT, _BIAS)
    }
    return classifier, dataclasses.replace(source, shapes=trunk_shapes)


def _labels(keys: Keys, num_labels: int) -> tuple[str, ...]:
    """Names of the labels, as transformers has them where the file names none."""
    ids = [str(label) for label in range(num_labels)]
    listed = keys.nested("id2label")
    if listed is None:
        return tuple(f"LABEL_{id}" for id in ids)
    names = listed.raw
    if names.keys() != set(ids):
        raise InputError(
            f"{keys.label}id2label names {len(names)} labels; {_WEIGHT} has {num_labels}, which "
            f"are 0 to {num_labels - 1}"
        )
    for name in names.values():
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise InputError(f"{keys.label}id2label: {shown(name)} is no name of a label")
    return tuple(str(names[id]) for id in ids)


def _score_activation(keys: Keys) -> Activation:
    """What sentence-transformers applies to the logit of a pair."""
    nested = keys.nested("sentence_transformers")
    if nested is not None and "activation_fn" in nested.raw:
        keys, name = nested, "activation_fn"
    else:
        name = "sbert_ce_default_activation_function"
    chosen = keys.choice(name, {module: module for module in _MODULES}, next(iter(_MODULES)))
    return _MODULES[chosen]


def _pad(keys: Keys) -> int | None:
    id = keys.raw.get("pad_token_id")
    if id is not None and type(id) is not int:
        raise InputError(f"{keys.label}pad_token_id must be a token id, not {shown(id)}")
    return id
