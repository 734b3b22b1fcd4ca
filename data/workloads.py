"""Workloads of prefix caches: ways in which prompts share their beginnings, and how a chat goes on.

A system prompt before every question, examples (few-shot), several questions about a document, chats whose
every turn repeats all that was said; and for the overhead, texts that share nothing. All are cut from the
plays at random, and fit a context of 256.
"""

import torch

from data.shakespeare import check_length


def make_workloads(data, n_requests, n_new=28, seed=0):
    """Ways in which prompts share their beginnings, within a context of 256.

    Args: data: token ids [N]; n_requests: of each workload (chats: conversations of 4 turns, half as many);
        n_new: at most 28 tokens of an answer in a chat; elsewhere at most 8; seed: of what is drawn.
    Returns: {name: (chats, n_new)}: chats is a list of conversations, each a list of messages (lists of
        token ids); n_new is the length of every answer. Shared lengths are no multiples of 16 on purpose.
    Raises ValueError for data shorter than the context, for answers that would leave it, and for no or more
    than 100000 requests.
    """
    if not 1 <= n_new <= 28:
        raise ValueError(f"answers of {n_new} tokens: 1 to 28 fit the context in a chat of four turns")
    if not 1 <= n_requests <= 100_000:
        raise ValueError(f"{n_requests} requests: 1 to 100000")
    check_length(data, 256)
    generator = torch.Generator().manual_seed(seed)

    def texts(n, length):
        starts = torch.randint(len(data) - length, (n,), generator=generator).tolist()
        return [data[start : start + length].tolist() for start in starts]

    (system,), (chat_system,), tasks = texts(1, 120), texts(1, 44), texts(2, 150)
    documents, n_chats = texts(max(n_requests // 4, 1), 180), max(n_requests // 2, 1)
    few_shot = [[tasks[i % 2] + question] for i, question in enumerate(texts(n_requests, 24))]
    about = [[documents[i % len(documents)] + question] for i, question in enumerate(texts(n_requests, 24))]
    chats = [[chat_system + texts(1, 20)[0], *texts(3, 20)] for _ in range(n_chats)]
    return {
        "system prompt": ([[system + question] for question in texts(n_requests, 50)], min(n_new, 8)),
        "few-shot": (few_shot, min(n_new, 8)),
        "documents": (about, min(n_new, 8)),
        "chats": (chats, n_new),
        "no sharing": ([[text] for text in texts(n_requests, 170)], min(n_new, 8)),
    }
