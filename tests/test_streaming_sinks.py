"""A sink token: a vector in front of every text, in one pass and over caches that keep or lose it."""

from functools import partial

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_bounded import RollingCache
from inference_training import train_steps, use_training_attention
from streaming_sinks import GPTlite_Sink, GPTlite_SinkStream


def both(window, n_global, **kwargs):
    """The model in one pass, and the same weights over rings."""
    make = partial(RollingCache, window, n_global)
    model = tiny_model(GPTlite_Sink, **kwargs)
    stream = tiny_model(GPTlite_SinkStream, make_cache=make, **kwargs)
    stream.load_state_dict(model.state_dict())
    return model, stream


def test_the_sink_is_one_more_key_and_says_nothing():
    """By definition: GPTlite's blocks over the vector and the tokens; its own output is dropped."""
    model, plain, tokens = tiny_model(GPTlite_Sink), tiny_model(GPTlite), random_tokens(2, 9)
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if name != "sink"})
    x = plain.token_embedding(tokens) + plain.position_embedding(torch.arange(9))
    x = torch.cat([model.sink.expand(2, 1, -1), x], dim=1)
    for block in plain.blocks:
        x = block(x)
    assert_close(model(tokens), plain.fc_out(plain.ln(x))[:, 1:])
    assert utils.largest_difference(model(tokens), plain(tokens)) > 1e-3
    with pytest.raises(ValueError, match="does not fit the context"):
        model(random_tokens(1, 17))


@given(pieces=st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda p: sum(p) <= 16))
def test_all_keys_over_a_cache_equal_one_pass(pieces):
    model, stream = both(16, 1)
    tokens, cache, logits = random_tokens(2, sum(pieces)), None, []
    for piece in tokens.split(pieces, dim=1):
        out, cache = stream(piece, cache)
        assert out.shape[1] == piece.shape[1]
        logits.append(out)
    assert_close(torch.cat(logits, dim=1), model(tokens))
    assert cache.n_read == sum(pieces) and cache.layers[0].n_read == 1 + sum(pieces)


@pytest.mark.parametrize("window, n_global", [(3, 1), (4, 0)])
def test_a_window_keeps_or_loses_it(window, n_global):
    _, stream = both(window, n_global)
    tokens = random_tokens(2, 14)
    logits, cache = utils.cached_logits(stream, tokens, 5)
    assert_close(logits, stream(tokens)[0])
    held = sorted(cache.layers[0].token_of.tolist())  # token 0 is the sink, token 14 the last of the text
    assert held == ([0, 12, 13, 14] if n_global else [11, 12, 13, 14])


def test_training_moves_the_sink():
    model = use_training_attention(tiny_model(GPTlite_Sink, dtype=torch.float32))
    before = model.sink.detach().clone()
    losses = train_steps(model, torch.arange(400) % 7, 12, 3e-3, 4, 16)
    assert losses[-1] < losses[0] and utils.largest_difference(model.sink, before) > 1e-3


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    run = run_script(
        "more/streaming_sinks.py",
        "--quick",
        *("--json", "-", "--plot", "a.png"),
        cwd=tmp_path,
        checkpoint=distilled_checkpoint,
    )
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    assert len(rows) == 9 and sum(row["baseline"] for row in rows.values()) == 3
    (mass,) = report["sweeps"].values()
    assert len(mass) == 9 and all(0 <= row["first"] <= 1 for row in mass)
