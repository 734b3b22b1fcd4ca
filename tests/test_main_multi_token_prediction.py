"""Multi-token prediction: pairs not off by one, drafts of any module, a trunk that stays as it is."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, quick_report, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, StaticKVCache
from inference_training import train_heads
from main_kvcache import generate_kvcache
from main_multi_token_prediction import (
    MTP,
    GPTlite_Trunk,
    MTPDraft,
    generate_speculative,
    head_of,
    logits_by_depth,
    mtp_loss,
    states_of,
)

TARGET, PLAIN, WHOLE = (tiny_model(c) for c in (GPTlite_Trunk, GPTlite_KVCache, GPTlite))


def random_mtp(trunk, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mtp = MTP(trunk)
        for p in mtp.parameters():
            p.data += 0.1 * torch.randn_like(p)
    return mtp.requires_grad_(False).eval()


def test_the_head_of_the_states_is_the_model():
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        assert_close(head_of(WHOLE, states_of(WHOLE, tokens)), WHOLE(tokens))
        TARGET(tokens, StaticKVCache(TARGET, 2))
        assert_close(TARGET.hidden, states_of(WHOLE, tokens))


@given(st.integers(1, 16), st.integers(1, 6), st.integers(0, 99))
def test_tokens_equal_plain_decoding_whatever_the_module(T, draft_len, seed):
    """Any prompt and draft length, up to the last position, with a random module; a draft is used again."""
    draft = MTPDraft(random_mtp(TARGET, seed), TARGET)
    for again in range(2):
        prompt, n_tokens, cache = random_tokens(1, T, seed + again), 17 - T, StaticKVCache(TARGET, 1)
        out = generate_speculative(TARGET, prompt, n_tokens, draft, draft_len, cache)
        assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16)) and cache.length == 16


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 99))
def test_drafts_are_those_of_one_pass_over_true_states(T, n, seed):
    """By definition: true states for the past, the module's own behind; the rejected left no trace."""
    mtp, ids = random_mtp(TARGET, seed), random_tokens(1, T + 3, seed)
    draft, cache = MTPDraft(mtp, TARGET), StaticKVCache(TARGET, 1)
    TARGET(ids[:, :T], cache)
    draft.propose(ids[0, : T + 1].tolist(), n)
    TARGET(torch.cat([ids[:, T : T + 2], ids[:, :1]], dim=1), cache)  # two are accepted, one is not
    cache.advance(-1)
    drafted, q = draft.propose(ids[0].tolist(), n)
    states, new = states_of(WHOLE, ids[:, : T + 2]), ids[:, 1:]
    with torch.no_grad():
        for _ in range(n):
            states = torch.cat([states[:, : T + 2], mtp(new, states, WHOLE)[0][:, T + 1 :]], dim=1)
            new = torch.cat([new, head_of(WHOLE, states[:, -1:]).argmax(-1)], dim=1)
    assert torch.equal(drafted, new[:, T + 2 :]) and q is None


class Built(torch.nn.Module):
    """A module for it: the state of the next token is that token's, wherever that is `shift` places from."""

    def __init__(self, shift=0):
        super().__init__()
        self.shift = shift

    def forward(self, tokens, states, trunk, kv_cache=None):
        return torch.roll(trunk.token_embedding(tokens), self.shift, dims=-1), None


def test_pairs_are_not_off_by_one(monkeypatch):
    """Next = t + 1 mod V: a module that sees the next token is right at every depth, one off never is."""
    import main_multi_token_prediction as module

    trunk = SimpleNamespace(
        token_embedding=torch.nn.Embedding.from_pretrained(torch.eye(8)),
        ln=torch.nn.Identity(),
        fc_out=lambda states: 9 * torch.roll(states, 1, dims=-1),
    )
    monkeypatch.setattr(module, "states_of", lambda trunk, tokens: trunk.token_embedding(tokens))
    tokens = (torch.arange(12) % 8)[None]
    for shift, right in ((0, 1.0), (-1, 0.0)):
        for k, logits in enumerate(logits_by_depth(Built(shift), trunk, tokens, 3), 1):
            assert logits.shape == (1, 12 - k, 8)
            hits = (logits[:, :-1].argmax(-1) == tokens[:, k + 1 :]).float().mean()
            assert hits == right
    assert mtp_loss(Built(), trunk, tokens) < 0.02 < mtp_loss(Built(-1), trunk, tokens)


def test_a_text_of_six_tokens_has_four_and_three_targets():
    tokens = random_tokens(1, 6)
    with torch.no_grad():
        depths = list(logits_by_depth(random_mtp(WHOLE), WHOLE, tokens, 2))
    assert [logits[:, :-1].shape[1] for logits in depths] == [4, 3]
    assert [tokens[:, k + 1 :].shape[1] for k in (1, 2)] == [4, 3]


def test_no_later_token_is_seen():
    """Place t at depth k reads the tokens up to t + k: another one behind changes nothing before."""
    mtp, tokens = random_mtp(WHOLE), random_tokens(1, 9)
    other = tokens.clone()
    other[:, 6] = (other[:, 6] + 1) % 16
    with torch.no_grad():
        pairs = [list(logits_by_depth(mtp, WHOLE, x, 3)) for x in (tokens, other)]
    for k, (a, b) in enumerate(zip(*pairs, strict=True), 1):
        assert_close(a[:, : 6 - k], b[:, : 6 - k])
        assert not torch.allclose(a[:, 6 - k], b[:, 6 - k])


def test_the_loss_by_pytorch():
    """Against the trunk's probabilities behind the next token; gradients in the module alone."""
    trunk, tokens = copy.deepcopy(WHOLE).requires_grad_(False), random_tokens(2, 7)
    mtp = random_mtp(trunk).requires_grad_(True)
    loss = mtp_loss(mtp, trunk, tokens, weight=0.0)
    (logits,) = logits_by_depth(mtp, trunk, tokens, 1)
    log_p, log_q = trunk(tokens)[:, 1:].float().log_softmax(-1), logits.float().log_softmax(-1)
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    assert_close(loss, (expected - (log_p.exp() * log_p).sum()) / 12, 1e-4)
    mtp_loss(mtp, trunk, tokens).backward()
    assert all(p.grad is not None for p in mtp.parameters()) and trunk.fc_out.weight.grad is None


def test_training_changes_the_module_and_not_the_trunk():
    """A few steps on a text that repeats itself: the loss falls, the trunk stays bit for bit."""
    trunk = tiny_model(GPTlite, dtype=torch.float32).requires_grad_(False)
    before, data = copy.deepcopy(trunk.state_dict()), torch.arange(200) % 5
    mtp = MTP(trunk)
    losses = train_heads(mtp, lambda heads, x: mtp_loss(heads, trunk, x), data, 40, 1e-2, 4, 16)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]) and not mtp.training
    assert all(torch.equal(before[name], p) for name, p in trunk.state_dict().items())


def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_multi_token_prediction.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["static", "2 drafts", "untrained"]
    assert report["checks"]["the trunk is unchanged, bit for bit"]
    assert all(row["same_output"] for row in rows.values()) and len(report["why"]) == 4
    static, drafts = rows["static"], rows["2 drafts"]
    layers = 3  # of the distilled model, whose cache the module's one block adds to
    assert drafts["kv_bytes_per_token"] == static["kv_bytes_per_token"] * (layers + 1) / layers
    assert drafts["n_parameters"] > static["n_parameters"] and drafts["forward_tokens"] < 200
    (by_depth,) = (lines for title, lines in report["sweeps"].items() if title.startswith("By depth"))
    assert [line["depth"] for line in by_depth] == [1, 2]


@pytest.mark.parametrize("n_drafts", [1, 3])
def test_every_round_of_a_perfect_module_is_accepted(n_drafts):
    """A trunk that only looks at the last token, and a module that copies what it sees."""
    target = tiny_model(GPTlite_Trunk, n_layers=1)
    with torch.no_grad():  # states are embeddings: blocks and positions add nothing
        target.position_embedding.weight.zero_()
        for p in (*target.blocks[0].mha.out_proj.parameters(), *target.blocks[0].ffwd.net[2].parameters()):
            p.zero_()
    draft, rounds = MTPDraft(Built(), target), []
    cache = StaticKVCache(target, 1)
    generate_speculative(target, random_tokens(1, 3), 13, draft, n_drafts, cache, rounds=rounds)
    assert all(accepted == drafted for drafted, accepted in rounds) and rounds[0] == (n_drafts, n_drafts)
