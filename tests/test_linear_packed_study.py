"""The study of products: the layers it multiplies, and the script."""

import pytest
import torch
from helpers import assert_close, run_script, tiny_model

from gptlite import GPTlite
from linear_packed import can_pack
from linear_packed_study import inputs_of, linear_layers, multiply


def test_every_linear_layer_is_multiplied():
    model = tiny_model(GPTlite, dtype=torch.float32)
    layers = linear_layers(model)
    assert len(layers) == 2 * 6 + 1 and layers[-1] is model.fc_out
    inputs = inputs_of(layers, 3)
    assert all(torch.equal(a, b) for a, b in zip(inputs, inputs_of(layers, 3), strict=True))
    for layer, x, out in zip(layers, inputs, multiply(layers, inputs), strict=True):
        assert_close(out, x @ layer.weight.T + layer.bias)


@pytest.mark.slow
def test_script():
    run = run_script("more/linear_packed_study.py", "--quick", "--json", "-")
    if not can_pack(torch.zeros(2, 2)):
        assert run.status == 2 and "cannot pack" in run.stderr
        return
    assert run.status == 0 and all(run.json["checks"].values()), run.stderr
    (rows,) = run.json["sweeps"].values()
    assert [row["rows"] for row in rows] == [1, 8]
    assert 0 < rows[0]["at least"] <= rows[1]["at least"]
