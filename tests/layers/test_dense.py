"""Feed-forwards that every token visits, once more in numpy."""

import numpy as np
import pytest

from layers.feed_forwards import dense

pytestmark = pytest.mark.quick_code


def test_xielu_is_a_parabola_above_and_an_integral_of_elu_below():
    """0 stays 0, as rows of padding must: the stored epsilon would make it -1e-6 alpha_n."""
    curve = np.array([0.3, -0.4, 0.5, -1e-6], np.float32)
    x_TF = np.array([[-4.0, -0.7, -1e-7, 0.0, 1e-7, 0.2, 3.0]], np.float32)
    alpha_p, alpha_n = np.log1p(np.exp(curve[:2].astype(np.float64)))
    alpha_n += 0.5
    z_TF = x_TF.astype(np.float64)
    below_TF = (np.expm1(np.minimum(z_TF, curve[3])) - z_TF) * alpha_n + 0.5 * z_TF
    expected = np.where(z_TF < 0, below_TF, alpha_p * z_TF**2 + 0.5 * z_TF)
    result = np.asarray(dense.xielu(x_TF, curve))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-9)
    assert result[0, 3] == 0
