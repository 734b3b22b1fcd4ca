"""Prefix hits of hybrids: as far as the last snapshot in what is shared, to the bit what is computed else."""

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite_linear import GPTlite_Linear, state_bytes
from linear_prefix import SnapshotCache

TEXT = random_tokens(1, 16)[0].tolist()


def other(n_shared, length=16):
    """A text that shares exactly its first n_shared tokens with TEXT."""
    rest = random_tokens(1, length, seed=1)[0].tolist()[n_shared:]
    rest[:1] = [(TEXT[n_shared] + 1) % 16] * len(rest[:1])
    return TEXT[:n_shared] + rest


def hybrid(full=(1,), **kwargs):
    return tiny_model(GPTlite_Linear, full_layers=full, **kwargs)


def tensors(state):
    return [t for layer in state.layers for t in layer if t is not None]


def same_as_cold(model, cache, ids):
    """Reads ids; fails unless all is to the bit what an empty cache gives. Returns the tokens found."""
    logits, state, n = cache.read(ids)
    cold, expected, none = SnapshotCache(model, cache.block_size, cache.every).read(ids)
    assert none == 0 and state.n_tokens == expected.n_tokens == len(ids)
    assert torch.equal(logits, cold)
    assert all(map(torch.equal, tensors(state), tensors(expected)))
    whole, one_pass = model(torch.tensor([ids]))
    assert_close(logits, whole[:, -logits.shape[1] :])
    assert_close(tensors(state), tensors(one_pass))
    return n


def test_a_hit_needs_the_state_exactly_there():
    """Blocks of 4: 10 tokens, then 3 more find 8; a text that shares 6 finds 4, or nothing with 8 alone."""
    for every, expected in ((1, 4), (2, 0)):
        model = hybrid()
        cache = SnapshotCache(model, 4, every)
        assert same_as_cold(model, cache, TEXT[:10]) == 0
        assert len(cache.kv) == 2 and len(cache.states) == 2 // every
        assert same_as_cold(model, cache.copy(), TEXT[:13]) == 8
        assert same_as_cold(model, cache.copy(), other(6, 13)) == expected


def test_keys_and_values_alone_are_found_to_the_token():
    model = hybrid(full=(0, 1))
    cache = SnapshotCache(model, 1)
    cache.read(TEXT)
    for n in (0, 1, 6, 13):
        assert same_as_cold(model, cache.copy(), other(n)) == n
    assert cache.stored()[1] == 0


@pytest.mark.parametrize("full", [(), (0,), (1,), (0, 1)])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 16)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 16]),
    every=st.integers(1, 3),
)
def test_any_texts_one_after_the_other(full, lengths, block_size, every):
    """Whatever was stored before, also by texts that were found in part; what is stored does not change."""
    model = hybrid(full)
    cache, kept = SnapshotCache(model, block_size, every), []
    for n_shared, length in lengths:
        ids = other(min(n_shared, length), 16)[:length]
        n = same_as_cold(model, cache, ids)
        assert n % (block_size * every) == 0 and n < length
        for tensor, copy in kept:
            assert torch.equal(tensor, copy)
        stored = [*cache.kv.values(), *cache.states.values()]
        kept = [(t, t.clone()) for layers in stored for layer in layers for t in layer if t is not None]


def test_two_requests_on_one_prefix():
    """Both go on from the same snapshot, in pieces shorter than the convolution's kernel."""
    model = hybrid()
    cache = SnapshotCache(model, 4)
    cache.read(TEXT[:5])
    assert same_as_cold(model, cache, other(4, 6)) == 4
    assert same_as_cold(model, cache, TEXT[:7]) == 4


def test_bytes_are_those_of_the_tensors():
    """A snapshot at each boundary; keys and values of a token once."""
    model = hybrid()
    cache = SnapshotCache(model, 4)
    _, state, _ = cache.read(TEXT)
    kv, snapshots = cache.stored()
    assert kv == 8 * 2 * 2 * 16 * 16
    assert snapshots == 4 * (state_bytes(state) - kv) == 4 * 8 * (2 * 16 * 16 + 3 * 3 * 32)


def test_what_does_not_fit_is_refused():
    cache = SnapshotCache(hybrid(), 4)
    for ids in ([], TEXT + TEXT[:1]):
        with pytest.raises(ValueError, match=f"text of {len(ids)} tokens"):
            cache.read(ids)
    assert not cache.kv and cache.match(TEXT) is None


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/linear_prefix.py", tmp_path, distilled_checkpoint)  # --quick
    found, times = report["sweeps"].values()
    softmax, *hybrids = found
    assert softmax["found of shared"] == 1 and softmax["kB of snapshots"] == 0
    for a, b in zip(hybrids, hybrids[1:], strict=False):  # larger blocks find less and store less
        assert (
            a["found of shared"] > b["found of shared"] and a["kB of snapshots"] == 2 * b["kB of snapshots"]
        )
    assert [line["tokens found"] for line in times] == [0, 16, 32, 48] and len(report["why"]) == 3


def test_script_refuses_impossible_sizes(distilled_checkpoint):
    run = run_script("more/linear_prefix.py", "--block-size", "128", checkpoint=distilled_checkpoint)
    assert run.status == 2 and "two blocks of 128" in run.stderr and "Traceback" not in run.stderr
