"""Workloads of prefix caches: they fit the context, and share what they should."""

import pytest
import torch
from helpers import random_tokens

from data.workloads import make_workloads
from gptlite_blocks import Sequence
from inference_serving import serve_chats, working_set


def test_workloads_fit_the_context_and_share_what_they_should():
    data = random_tokens(1, 4000, vocab_size=96)[0]
    workloads = make_workloads(data, 8)
    for chats, n_new in workloads.values():
        assert all(sum(len(message) + n_new for message in chat) <= 256 for chat in chats)
    (system, n_new), (chats, _) = workloads["system prompt"], workloads["chats"]
    assert len({tuple(chat[0][:120]) for chat in system}) == 1
    assert len({tuple(chat[0]) for chat in system}) == 8
    assert [len(chat) for chat in chats] == [4] * 4
    assert working_set([Sequence(0, system[0][0], 0), Sequence(0, system[1][0], 0)], 16) == 7 + 2 * 3
    assert make_workloads(data, 8) == workloads != make_workloads(data, 8, seed=1)


def test_what_cannot_be_is_refused():
    data = random_tokens(1, 4000, vocab_size=96)[0]
    with pytest.raises(ValueError, match="at least 1"):
        serve_chats(None, make_workloads(data, 2)["chats"][0], 0)
    with pytest.raises(ValueError, match="too short"):
        make_workloads(data[:256], 8)
    for n_new in (0, 29):
        with pytest.raises(ValueError, match="1 to 28"):
            make_workloads(data, 8, n_new)


def test_more_requests_than_anybody_serves_are_refused_at_once():
    for n in (0, 20_000_000):
        with pytest.raises(ValueError, match="requests"):
            make_workloads(torch.zeros(300, dtype=torch.int64), n)
