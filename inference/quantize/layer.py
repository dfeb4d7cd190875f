"""One layer: what a method makes of its matrices, and how far their results are off."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from configs.kinds.params import ParamInfo
from configs.precision import FORMATS
from configs.recipes.few_bits import LLM_INT8
from inference.checkpoints.native import blocks as stored
from inference.layerwise.input_statistics import InputStatistics
from inference.layerwise.stream import Values
from inference.quantize.folds import Fold
from inference.quantize.methods import llm_int8, rtn
from inference.quantize.plan import Method
from layers import quantized


def balanced(
    method: Method,
    values: Values,
    inputs: dict[str, InputStatistics],
    formats: Mapping[str, str],
    folds: Sequence[Fold],
    dtype: str,
) -> None:
    """Moves a method's factors between a layer's matrices along its folds: changes its values, and
    the statistics of its matrices' inputs. `formats` are those of matrices in few bits, by path;
    `dtype` is that of norms as they are stored.
    """
    for fold in folds if method.factors else ():
        read_inputs = {path: inputs[path] for path in fold.readers if path in inputs}
        if read_inputs and method.factors:
            fold.apply(values, inputs, method.factors(fold, values, read_inputs, formats), dtype)


def rounded(
    method: Method,
    values: Mapping[str, np.ndarray],
    inputs: Mapping[str, InputStatistics],
    formats: Mapping[str, str],
    infos: Mapping[str, ParamInfo],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """A layer as it is stored, and the relative errors of its matrices' results.

    Args:
        method: makes groups.
        values: of the layer.
        inputs: what was seen of its matrices' inputs; what saw nothing, such as an expert that no
            token visits, is rounded to nearest.
        formats: of matrices in few bits, by path.
        infos: of all, those that stay in the type that they are stored in.
    """
    leaves: dict[str, np.ndarray] = {}
    errors: dict[str, float] = {}
    for path, value in values.items():
        if path not in formats:
            leaves[path] = value.astype(jax.numpy.dtype(infos[path].format))
            continue
        statistics = inputs.get(path)
        if formats[path] == LLM_INT8:
            parts = llm_int8.parts(value, statistics)
            leaves |= {f"{path}/{name}": array for name, array in parts.items()}
            rounded_FD = stored.joined(parts, value.shape[1])
            read = functools.partial(llm_int8.as_read, features=parts["features"])
            wrong, right = _off(value, rounded_FD, statistics, read)
        else:
            leaves[path], wrong, right = _stack(method, formats[path], value, statistics)
        if right:
            errors[path] = (wrong / right) ** 0.5
    return leaves, errors


def _stack(
    method: Method, format: str, value: np.ndarray, of_stack: InputStatistics | None
) -> tuple[np.ndarray, float, float]:
    """Blocks of a matrix, or of all of a stack, and their squared error and squared results."""
    blocks, wrong, right = [], 0.0, 0.0
    for nth, matrix_FD in enumerate(value if value.ndim > 2 else value[None]):
        statistics = of_stack.of(nth) if of_stack is not None and value.ndim > 2 else of_stack
        if statistics is None or not statistics.count:
            groups = rtn.groups(format, matrix_FD)
        else:
            groups = method.round(format, matrix_FD, statistics)
        blocks.append(quantized.pack(format, groups))
        read = functools.partial(_as_read, format)
        off, all_of_it = _off(matrix_FD, quantized.numbers(format, groups), statistics, read)
        wrong, right = wrong + off, right + all_of_it
    return np.stack(blocks).reshape(*value.shape[:-1], -1), wrong, right


def _as_read(format: str, rows_RD: np.ndarray) -> np.ndarray:
    """Inputs as a product of that format rounds them."""
    activations = FORMATS[format].activations
    if activations is None:
        return rows_RD
    blocks = quantized.quantize(activations, rows_RD)
    return quantized.dequantize(activations, blocks, rows_RD.shape[1])


def _off(
    matrix_FD: np.ndarray,
    rounded_FD: np.ndarray,
    statistics: InputStatistics | None,
    read: Callable[[np.ndarray], np.ndarray],
) -> tuple[float, float]:
    """Squared error of a matrix's results, of inputs as they are read; and the squared results."""
    if statistics is None:
        return 0.0, 0.0
    results_RF = statistics.rows_RD @ matrix_FD.T
    lost_RF = read(statistics.rows_RD) @ rounded_FD.T - results_RF
    return float(np.square(lost_RF).sum()), float(np.square(results_RF).sum())
