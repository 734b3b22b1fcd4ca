"""Medusa: any heads and any tree leave the tokens as they are; trees are the best by their rates."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, StaticKVCache
from gptlite_tree import GPTlite_Tree
from inference_training import train_heads
from main_kvcache import generate_kvcache
from speculative_medusa import GuessTree, MedusaHeads, generate_medusa, hit_rates, medusa_loss

TARGET, PLAIN, WHOLE = (tiny_model(c) for c in (GPTlite_Tree, GPTlite_KVCache, GPTlite))


def random_heads(n_heads, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = MedusaHeads(WHOLE, n_heads)
        for p in heads.parameters():
            p.data += torch.randn_like(p)
    return heads.requires_grad_(False)


@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 12), st.integers(0, 99))
def test_tokens_equal_plain_decoding(T, n_heads, n_nodes, seed):
    """Any prompt, heads and tree, up to the last position of the context."""
    rates = torch.rand(n_heads, 3, generator=torch.Generator().manual_seed(seed))
    prompt, n_tokens, cache, rounds = random_tokens(1, T, seed), 17 - T, StaticKVCache(TARGET, 1), []
    tree = GuessTree(rates, n_nodes)
    out = generate_medusa(TARGET, prompt, n_tokens, random_heads(n_heads, seed), tree, cache, rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16)) and cache.length == 16
    assert sum(accepted + 1 for _, accepted in rounds) == n_tokens - 1
    assert all(accepted <= n_heads for _, accepted in rounds)


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 5])
def test_budgets_are_exact(n_tokens):
    prompt, cache = random_tokens(1, 4), StaticKVCache(TARGET, 1)
    out = generate_medusa(TARGET, prompt, n_tokens, random_heads(3), GuessTree(torch.rand(3, 3), 9), cache)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 10), st.integers(0, 99))
def test_the_tree_has_the_most_probable_ways(n_heads, n_ranks, n_nodes, seed):
    """Against all ways by their products: no other set of nodes with all their parents promises more."""
    rates = torch.rand(n_heads, n_ranks, generator=torch.Generator().manual_seed(seed)).double()
    tree = GuessTree(rates, n_nodes)
    ways = [w for n in range(1, n_heads + 1) for w in itertools.product(range(n_ranks), repeat=n)]
    gains = {w: torch.stack([rates[i, r] for i, r in enumerate(w)]).prod().item() for w in ways}
    best = sorted(gains.values(), reverse=True)[:n_nodes]
    found, way_of = [], {0: ()}
    for i in range(1, len(tree.parents)):
        way_of[i] = (*way_of[tree.parents[i]], tree.rank[i - 1].item())
        assert tree.level[i - 1] == len(way_of[i]) - 1
        found.append(gains[way_of[i]])
    assert len(set(way_of.values())) == len(way_of)
    assert_close(torch.tensor(sorted(found, reverse=True)), torch.tensor(best))


def test_tokens_of_the_nodes():
    """Head 1 guesses 3 before 1, head 2 guesses 0 before 2."""
    logits = torch.tensor([[0.0, 2.0, 0.0, 3.0], [4.0, 0.0, 2.0, 1.0]])
    tree = GuessTree(torch.tensor([[0.6, 0.3], [0.6, 0.4]]), 5)
    assert tree.parents == [0, 0, 1, 0, 1, 3]  # their chances are .6, .36, .3, .24, .18
    assert tree.tokens(9, logits).tolist() == [[9, 3, 0, 1, 2, 0]]


def test_heads_begin_as_the_models_own():
    h = torch.randn(5, 32, dtype=torch.float64)
    for logits in MedusaHeads(WHOLE, 3)(h):
        assert_close(logits, WHOLE.fc_out(h))


def test_head_k_is_taught_what_comes_k_behind_the_next():
    """Loss and rates by PyTorch, place by place; nothing wraps around the end."""
    heads, tokens = random_heads(3), random_tokens(2, 9)
    hidden = []
    handle = WHOLE.fc_out.register_forward_pre_hook(lambda m, x: hidden.append(x[0]))
    with torch.no_grad():
        own = WHOLE(tokens)
    handle.remove()
    losses, rates = [], hit_rates(heads, WHOLE, tokens, 2)
    for k in range(1, 4):
        logits = heads(hidden[0])[k - 1]
        pairs = [(b, t) for b in range(2) for t in range(9 - k)]
        parts = [F.cross_entropy(logits[b, t], own[b, t + k].softmax(-1)) for b, t in pairs]
        losses.append(torch.stack(parts).mean())
        for rank in range(2):
            hits = [logits[b, t].topk(2).indices[rank] == own[b, t + k].argmax() for b, t in pairs]
            assert_close(rates[k - 1, rank], sum(map(float, hits)) / len(hits), 1e-6)
    assert_close(medusa_loss(heads, WHOLE, tokens), torch.stack(losses).mean(), 1e-5)


def test_training_changes_the_heads_and_not_the_trunk():
    trunk = tiny_model(GPTlite, dtype=torch.float32).requires_grad_(False)
    before, data = copy.deepcopy(trunk.state_dict()), torch.arange(200) % 5
    heads = MedusaHeads(trunk, 2)
    losses = train_heads(heads, lambda heads, x: medusa_loss(heads, trunk, x), data, 40, 1e-2, 4, 16)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(torch.equal(before[name], p) for name, p in trunk.state_dict().items())


def test_bad_requests():
    with pytest.raises(ValueError, match="leave the context"):
        heads, cache = random_heads(1), StaticKVCache(TARGET, 1)
        generate_medusa(TARGET, random_tokens(1, 9), 9, heads, GuessTree(torch.rand(1, 2), 2), cache)


def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/speculative_medusa.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["static", "chain of 4", "tree of 3"] and len(report["why"]) == 3
    assert all(row["same_output"] for row in rows.values())
    assert any(name.startswith("a path of a tree as it is alone") for name in report["checks"])
    assert rows["tree of 3"]["n_parameters"] > rows["static"]["n_parameters"]
    assert rows["tree of 3"]["peak_memory_mb"] > rows["static"]["peak_memory_mb"]
    assert rows["tree of 3"]["tokens_per_round"] >= 1


def test_script_refuses_what_leaves_the_context(distilled_checkpoint):
    more = "--quick", "--n-tokens", "300"
    run = run_script("more/speculative_medusa.py", *more, checkpoint=distilled_checkpoint)
    assert run.status == 2 and "leave the context" in run.stderr
