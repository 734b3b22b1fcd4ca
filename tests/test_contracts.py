"""What the post's readers call, called as the post calls it: names, order, types, and what comes out."""

import copy
import inspect
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model

from gptlite import GPTlite

V, SEQLEN = 16, 16  # of the tiny models
N_BLOCKS, N_HEADS, D_HEAD, D_MODEL = 2, 4, 8, 32


def tiny(model_class, seed=0, **more):
    return tiny_model(model_class, n_heads=N_HEADS, d_head=D_HEAD, seed=seed, **more)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# gptlite.py


def test_parameters_unpack_in_the_posts_order():
    from gptlite import get_gptlite_distilled_model_parameters, get_gptlite_model_parameters

    n_layers, d_model, n_heads, d_head, batch_size, lr, seqlen, dropout_p = get_gptlite_model_parameters()
    assert (n_layers, d_model, n_heads, d_head, seqlen) == (6, 384, 6, 64, 256)
    assert batch_size > 0 and 0 < lr < 1 and 0 <= dropout_p < 1
    n_layers, d_model, n_heads, d_head, *_ = get_gptlite_distilled_model_parameters()
    assert (n_layers, d_model, n_heads, d_head) == (3, 192, 3, 64)


def test_gptlite_by_position():
    model = GPTlite(V, D_MODEL, N_HEADS, D_HEAD, N_BLOCKS, 0.0, SEQLEN)
    assert model(random_tokens(2, 5)).shape == (2, 5, V)
    assert len(model.blocks) == N_BLOCKS
    for block in model.blocks:
        mha, net = block.mha, block.ffwd.net
        assert (mha.n_heads, mha.d_head) == (N_HEADS, D_HEAD)
        for name in ("query_proj", "key_proj", "value_proj", "out_proj"):
            projection = getattr(mha, name)
            assert isinstance(projection, nn.Linear) and projection.weight.shape == (D_MODEL, D_MODEL)
            assert projection.bias is not None
        assert isinstance(net[0], nn.Linear) and isinstance(net[1], nn.ReLU) and isinstance(net[2], nn.Linear)
        assert net[0].weight.shape == (4 * D_MODEL, D_MODEL) and net[2].weight.shape == (D_MODEL, 4 * D_MODEL)


def test_weights_load_as_the_post_loads_them(checkpoint):
    from gptlite import get_gptlite_model_parameters
    from inference_utils import GPTLITE_CKPT_PATH, device

    n_layers, d_model, n_heads, d_head, _, _, seqlen, dropout_p = get_gptlite_model_parameters()
    model = GPTlite(96, d_model, n_heads, d_head, n_layers, dropout_p, seqlen).to(device)
    path = GPTLITE_CKPT_PATH if GPTLITE_CKPT_PATH.is_file() else checkpoint
    assert not model.load_state_dict(torch.load(path, map_location=device)).missing_keys


# inference_utils.py


def test_inference_utils():
    from inference_utils import GPTLITE_CKPT_PATH, device, get_batch, train_steps

    assert isinstance(device, torch.device) and GPTLITE_CKPT_PATH.name == "gptlite.pth"
    data = torch.arange(100) % V
    x, y = get_batch(data, batch_size=3, seqlen=5)
    assert x.shape == y.shape == (3, 5) and torch.equal(x[:, 1:], y[:, :-1])
    model = tiny(GPTlite, dtype=torch.float32)
    with torch.enable_grad():
        losses = train_steps(model, data, 20, 1e-2, 4, 8)  # model, train_data, iters, lr, batch_size, seqlen
    assert losses is None or losses[-1] < losses[0]
    names = list(inspect.signature(train_steps).parameters)[:6]
    assert names == ["model", "train_data", "iters", "lr", "batch_size", "seqlen"]


# gptlite_kvcache.py


def test_attention_with_a_kv_cache_shifts_its_mask():
    """KV-1: one query behind three cached keys sees all four; of two queries on five keys 4 and 5."""
    from gptlite_kvcache import scaled_dot_product_attention_kv_cache

    Q, K = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    values = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 1, 5, 4)
    out = scaled_dot_product_attention_kv_cache(Q, K, values, True, None)  # [B, H, Sq, D]
    assert_close(out[0, 0, :, 0], torch.tensor([1.5, 2.0]))  # means of 0..3 and 0..4
    assert_close(scaled_dot_product_attention_kv_cache(Q[:, :, :1], K, values)[0, 0, 0, 0], torch.tensor(2.0))
    seen = scaled_dot_product_attention_kv_cache(Q, K, values, causal_mask=False, dropout=nn.Dropout(0.0))
    assert_close(seen[0, 0, :, 0], torch.tensor([2.0, 2.0]))


def test_attention_module_with_a_cache():
    from gptlite_kvcache import MultiHeadAttention_KVCache

    mha = MultiHeadAttention_KVCache(D_MODEL, N_HEADS, D_HEAD, 0.0).eval()
    x = torch.randn(2, 6, D_MODEL)
    whole, (k, v) = mha(x)
    assert k.shape == v.shape == (2, N_HEADS, 6, D_HEAD)
    first, kv_cache = mha(x[:, :4], None, True)
    second, (k2, v2) = mha(x[:, 4:], kv_cache=kv_cache, causal_mask=True, max_seqlen=None)
    assert_close(torch.cat([first, second], dim=1), whole)
    assert_close((k2, v2), (k, v))
    _, (k3, _) = mha(x, max_seqlen=3)
    assert torch.equal(k3, k[:, :, -3:])


def test_model_with_a_cache():
    from gptlite_kvcache import GPTlite_KVCache

    plain, model, tokens = tiny(GPTlite), tiny(GPTlite_KVCache), random_tokens(2, 9)
    model.load_state_dict(plain.state_dict())
    logits, kv_cache = model(tokens[:, :5])
    before = [(k.clone(), v.clone()) for k, v in kv_cache]
    assert len(kv_cache) == N_BLOCKS and kv_cache[0][0].shape == (2, N_HEADS, 5, D_HEAD)
    more, longer = model(tokens[:, 5:], kv_cache, max_seqlen=SEQLEN)
    assert_close(torch.cat([logits, more], dim=1), plain(tokens))
    for (k, v), (k0, v0) in zip(kv_cache, before, strict=True):  # the given cache is never modified
        assert torch.equal(k, k0) and torch.equal(v, v0) and k.shape[-2] == 5
    assert longer[0][0].shape[-2] == 9
    cache = None
    for token in random_tokens(1, SEQLEN + 4).split(1, dim=1):  # positions are clamped, nothing is raised
        _, cache = model(token, cache, SEQLEN)
    assert cache[0][0].shape[-2] == SEQLEN


# main_kvcache.py, main_prefix_cache.py


def greedy(model, tokens, n_tokens):
    """The text of a model without a cache, the slow and certain way."""
    for _ in range(n_tokens):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokens


def test_generate_kvcache():
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache

    model, prompt = tiny(GPTlite_KVCache), random_tokens(2, 5)
    expected = greedy(tiny(GPTlite), prompt, 6)
    assert torch.equal(generate_kvcache(model, prompt, 6, SEQLEN), expected)
    assert (
        list(inspect.signature(generate_kvcache).parameters)
        == "model prompt n_tokens seqlen kv_cache".split()
    )


def test_prefix_cache():
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache

    model, prefix = tiny(GPTlite_KVCache), random_tokens(1, 6)
    requests, n_tokens, seqlen = list(random_tokens(3, 3, seed=1)), 4, SEQLEN
    _, prefix_cache = model(prefix)
    before = [(k.clone(), v.clone()) for k, v in prefix_cache]
    for request in [*requests, requests[0]]:
        out = generate_kvcache(model, request[None], n_tokens, seqlen, kv_cache=prefix_cache)
        expected = greedy(tiny(GPTlite), torch.cat([prefix, request[None]], dim=1), n_tokens)
        assert torch.equal(out, expected[:, 6:])
    for (k, v), (k0, v0) in zip(prefix_cache, before, strict=True):
        assert torch.equal(k, k0) and torch.equal(v, v0)


# main_semantic_cache.py


def lists_only(texts):
    """An embedder of the post's contract: lists of strings to unit vectors; a string is an error."""
    assert isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    vectors = np.zeros((len(texts), 26), dtype=np.float32)
    for vector, text in zip(vectors, texts, strict=True):
        for letter in text.lower():
            if "a" <= letter <= "z":
                vector[ord(letter) - ord("a")] += 1
        vector /= max(np.linalg.norm(vector), 1e-9)
    return vectors


def test_semantic_cache():
    pytest.importorskip("faiss")
    from main_semantic_cache import SemanticCache

    asked = []

    def generate_fn(query):
        asked.append(query)
        return f"answer to {query}"

    cache = SemanticCache(lists_only, 0.9)
    assert cache.index.ntotal == 0 and cache.index.d == 26  # there from the start
    answer, similarity, hit = cache("who wrote hamlet", generate_fn)
    assert answer == "answer to who wrote hamlet" and not hit and asked == ["who wrote hamlet"]
    answer, similarity, hit = cache("hamlet who wrote", generate_fn)
    assert hit and answer == "answer to who wrote hamlet" and similarity == pytest.approx(1.0, abs=1e-5)
    answer, similarity, hit = cache("zzz", generate_fn)
    assert not hit and answer == "answer to zzz" and similarity < 0.9
    assert cache.index.ntotal == 2 and asked == ["who wrote hamlet", "zzz"]


def test_sentence_transformer_embedder():
    from main_semantic_cache import sentence_transformer_embedder

    assert (
        inspect.signature(sentence_transformer_embedder).parameters["model_name"].default
        == "all-MiniLM-L6-v2"
    )


# main_static_batching.py, main_continuous_batching.py


def test_static_and_continuous_batching():
    from main_continuous_batching import continuous_batching
    from main_static_batching import next_tokens, static_batching

    model = tiny(GPTlite)
    sequences = [random_tokens(1, n, seed=n)[0] for n in (3, 7, 5)]
    expected = [model(sequence[None])[0, -1].argmax().item() for sequence in sequences]
    assert next_tokens(model, sequences, SEQLEN).tolist() == expected
    requests = [(sequence, n) for sequence, n in zip(sequences, (4, 1, 6), strict=True)]
    alone = [greedy(model, prompt[None], n)[0] for prompt, n in requests]
    for batching, steps in ((static_batching, 4 + 6), (continuous_batching, 7)):
        outputs, n_steps = batching(model, requests, 2, SEQLEN)
        assert all(torch.equal(a, b) for a, b in zip(outputs, alone, strict=True))
        assert n_steps == steps  # static: the longest of each batch; continuous: slots are filled at once


# main_flash_attention.py


def test_use_sdpa():
    from main_flash_attention import MultiHeadAttention_SDPA, use_sdpa

    model, tokens = tiny(GPTlite), random_tokens(2, 9)
    expected, before = model(tokens), dict(model.named_parameters())
    same = use_sdpa(model)
    assert same is model and all(type(block.mha) is MultiHeadAttention_SDPA for block in model.blocks)
    assert all(p is before[name] for name, p in model.named_parameters())  # the weights are kept
    assert_close(model(tokens), expected)


# gptlite_gqa.py


def test_gqa_module_and_model():
    from gptlite_gqa import GPTlite_GQA, MultiHeadAttention_GQA

    mha = MultiHeadAttention_GQA(D_MODEL, N_HEADS, D_HEAD, 0.0, 2)
    out, (k, v) = mha(torch.randn(3, 5, D_MODEL))
    assert out.shape == (3, 5, D_MODEL) and k.shape == v.shape == (3, 2, 5, D_HEAD)
    model = GPTlite_GQA(V, D_MODEL, N_HEADS, D_HEAD, N_BLOCKS, 0.0, SEQLEN, 2)
    logits, kv_cache = model(random_tokens(2, 4))
    assert logits.shape == (2, 4, V) and kv_cache[0][0].shape == (2, 2, 4, D_HEAD)


def test_conversion_to_gqa_is_the_mean_of_each_group():
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa

    plain = tiny(GPTlite)
    state = convert_mha_to_gqa(plain.state_dict(), N_HEADS, D_HEAD, 2)
    model = tiny(GPTlite_GQA, n_groups=2, seed=1)
    model.load_state_dict(state)
    for name in ("key_proj", "value_proj"):
        before, after = (getattr(m.blocks[0].mha, name) for m in (plain, model))
        heads = before.weight.view(2, 2, D_HEAD, D_MODEL)  # [G, H/G, D, E]
        assert_close(after.weight.view(2, D_HEAD, D_MODEL), (heads[:, 0] + heads[:, 1]) / 2)
        biases = before.bias.view(2, 2, D_HEAD)
        assert_close(after.bias.view(2, D_HEAD), (biases[:, 0] + biases[:, 1]) / 2)
    assert torch.equal(model.blocks[0].mha.query_proj.weight, plain.blocks[0].mha.query_proj.weight)
    model.load_state_dict(state)
    every = tiny(GPTlite_GQA, n_groups=N_HEADS, seed=1)
    every.load_state_dict(convert_mha_to_gqa(plain.state_dict(), N_HEADS, D_HEAD, N_HEADS))
    tokens = random_tokens(2, 7)
    assert_close(every(tokens)[0], plain(tokens))


def test_uptraining_as_the_post_does():
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
    from inference_utils import train_steps

    model = tiny(GPTlite_GQA, n_groups=2, dtype=torch.float32)
    model.load_state_dict(
        convert_mha_to_gqa(tiny(GPTlite, dtype=torch.float32).state_dict(), N_HEADS, D_HEAD, 2)
    )
    train_data, uptrain_iters, lr, batch_size, seqlen = torch.arange(200) % 7, 20, 1e-2, 4, 8
    x = train_data[None, :9]

    def loss():
        return F.cross_entropy(model(x[:, :-1])[0].transpose(1, 2), x[:, 1:]).item()

    before = loss()
    with torch.enable_grad():
        train_steps(model, train_data, uptrain_iters, lr, batch_size, seqlen)
    assert loss() < before


# main_mla.py


def test_mla_module():
    """Names and biases as in the post, so that its state dictionary loads; one cache of latents."""
    from main_mla import MultiHeadAttention_MLA

    mha = MultiHeadAttention_MLA(D_MODEL, N_HEADS, D_HEAD, 0.0, 12).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in mha.state_dict().items()}
    assert shapes == {
        "query_proj.weight": (D_MODEL, D_MODEL),
        "query_proj.bias": (D_MODEL,),
        "kv_down_proj.weight": (12, D_MODEL),  # no bias
        "key_up_proj.weight": (D_MODEL, 12),
        "key_up_proj.bias": (D_MODEL,),
        "value_up_proj.weight": (D_MODEL, 12),
        "value_up_proj.bias": (D_MODEL,),
        "out_proj.weight": (D_MODEL, D_MODEL),
        "out_proj.bias": (D_MODEL,),
    }
    assert mha.absorb is True
    x = torch.randn(2, 6, D_MODEL)
    absorbed, cache = mha(x)
    latents = [t for t in (cache if isinstance(cache, tuple | list) else [cache]) if t is not None]
    assert all(t.shape == (2, 1, 6, 12) for t in latents)
    assert_close(latents[0][:, 0], mha.kv_down_proj(x))
    mha.absorb = False
    assert_close(mha(x)[0], absorbed, 1e-5)
    first, cache = mha(x[:, :4])
    for absorb in (True, False):
        mha.absorb = absorb
        assert_close(torch.cat([first, mha(x[:, 4:], cache)[0]], dim=1), absorbed, 1e-5)


def test_conversion_to_mla_is_a_truncated_svd():
    from main_mla import convert_mha_to_mla

    plain = tiny(GPTlite)
    before, name = plain.state_dict(), "blocks.1.mha."
    for d_latent in (D_MODEL, 12):
        state = convert_mha_to_mla(before, N_HEADS, D_HEAD, d_latent)
        stacked = torch.cat([before[name + f"{kind}_proj.weight"] for kind in ("key", "value")])  # [2HD, E]
        U, S, Vh = torch.linalg.svd(stacked, full_matrices=False)
        up = torch.cat([state[name + "key_up_proj.weight"], state[name + "value_up_proj.weight"]])  # [2HD, C]
        down = state[name + "kv_down_proj.weight"]  # [C, E]
        assert_close(up @ down, (U[:, :d_latent] * S[:d_latent]) @ Vh[:d_latent], 1e-9)
        # the square roots of the singular values on both sides
        assert_close(down.norm(dim=1), S[:d_latent].sqrt(), 1e-9)
        assert_close(up.norm(dim=0), S[:d_latent].sqrt(), 1e-9)
        assert torch.equal(state[name + "key_up_proj.bias"], before[name + "key_proj.bias"])
        assert torch.equal(state[name + "value_up_proj.bias"], before[name + "value_proj.bias"])


# main_distillation.py


def test_distillation_loss():
    """Mean over tokens of KL(teacher, student) at the temperature, times its square."""
    from main_distillation import distillation_loss

    student, teacher, T = torch.randn(2, 3, 5).double(), torch.randn(2, 3, 5).double(), 2.0
    expected = 0.0
    for s, t in zip(student.view(-1, 5), teacher.view(-1, 5), strict=True):
        p, q = ([math.exp(x / T) for x in logits.tolist()] for logits in (t, s))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        expected += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 6
    assert_close(distillation_loss(student, teacher, T), expected * T**2, 1e-9)
    assert distillation_loss(teacher, teacher, 1.0).item() == pytest.approx(0, abs=1e-12)
    infinite = torch.tensor([[[math.log(3), 0.0, -math.inf]]])
    assert distillation_loss(torch.zeros(1, 1, 3), infinite, 1.0).item() == pytest.approx(0.536277, abs=1e-5)


# main_pruning.py


def test_importance_is_a_list_of_sums_over_batches():
    from inference_utils import get_batch
    from main_pruning import compute_importance

    model, data = tiny(GPTlite), random_tokens(1, 300)[0]
    torch.manual_seed(7)
    heads, neurons = compute_importance(model, data, 3, 2, 8)  # n_batches, batch_size, seqlen
    assert isinstance(heads, list) and isinstance(neurons, list)
    assert [h.shape for h in heads] == [(N_HEADS,)] * N_BLOCKS
    assert [n.shape for n in neurons] == [(4 * D_MODEL,)] * N_BLOCKS
    torch.manual_seed(7)
    seen = {"heads": 0.0, "neurons": 0.0}
    mha, net = model.blocks[0].mha, model.blocks[0].ffwd.net

    def see_heads(_, args):
        seen["heads"] += args[0].unflatten(-1, (N_HEADS, D_HEAD)).norm(dim=-1).sum(dim=(0, 1))

    def see_neurons(_, __, out):
        seen["neurons"] += out.abs().sum(dim=(0, 1))

    hooks = mha.out_proj.register_forward_pre_hook(see_heads), net[1].register_forward_hook(see_neurons)
    for _ in range(3):
        model(get_batch(data, 2, 8)[0])
    for hook in hooks:
        hook.remove()
    # sums or means over tokens are the same up to one factor, which no choice depends on
    for importance, by_hand in ((heads[0], seen["heads"]), (neurons[0], seen["neurons"])):
        assert_close(importance / importance.sum(), by_hand / by_hand.sum(), 1e-9)


def test_prune_keeps_the_most_important_in_their_order():
    from main_pruning import prune

    model = tiny(GPTlite)
    before = copy.deepcopy(model)
    heads = [torch.tensor([1.0, 4.0, 2.0, 3.0]), torch.tensor([4.0, 3.0, 2.0, 1.0])]
    neurons = [torch.arange(128.0), -torch.arange(128.0)]
    assert prune(model, heads, neurons, 2, 100) is model  # in place
    for block, old, kept in zip(model.blocks, before.blocks, ([1, 3], [0, 1]), strict=True):
        rows = torch.cat([torch.arange(h * D_HEAD, (h + 1) * D_HEAD) for h in kept])
        assert block.mha.n_heads == 2 and block.mha.d_head == D_HEAD
        for name in ("query_proj", "key_proj", "value_proj"):
            assert torch.equal(getattr(block.mha, name).weight, getattr(old.mha, name).weight[rows])
            assert torch.equal(getattr(block.mha, name).bias, getattr(old.mha, name).bias[rows])
        assert torch.equal(block.mha.out_proj.weight, old.mha.out_proj.weight[:, rows])
    assert torch.equal(model.blocks[0].ffwd.net[0].weight, before.blocks[0].ffwd.net[0].weight[28:])
    assert torch.equal(model.blocks[1].ffwd.net[2].weight, before.blocks[1].ffwd.net[2].weight[:, :100])
    assert model(random_tokens(2, 5)).shape == (2, 5, V)


def test_the_posts_pruning_experiment():
    from inference_training import distill
    from main_pruning import compute_importance, prune

    train_data, batch_size, seqlen, lr, distill_iters = torch.arange(400) % 7, 2, 8, 1e-3, 4
    teacher, keep_ratios = tiny(GPTlite, dtype=torch.float32), [0.75, 0.5]
    weights = [p.clone() for p in teacher.parameters()]

    def importance(model):
        return compute_importance(model, train_data, 2, batch_size, seqlen)

    def target_size(ratio):
        return int(N_HEADS * ratio), int(4 * D_MODEL * ratio)

    with torch.enable_grad():
        model = prune(copy.deepcopy(teacher), *importance(teacher), *target_size(keep_ratios[-1]))
        distill(model, teacher, train_data, distill_iters, lr, batch_size, seqlen)
        one_shot = model
        model = copy.deepcopy(teacher)
        for ratio in keep_ratios:
            prune(model, *importance(model), *target_size(ratio))
            distill(model, teacher, train_data, distill_iters // len(keep_ratios), lr, batch_size, seqlen)
    for pruned in (one_shot, model):
        assert [block.mha.n_heads for block in pruned.blocks] == [2, 2]
        assert [block.ffwd.net[0].out_features for block in pruned.blocks] == [64, 64]
        assert pruned(random_tokens(1, 5)).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(weights, teacher.parameters(), strict=True))


# Names


FILES = (
    "gptlite gptlite_kvcache gptlite_gqa inference_utils main_kvcache main_prefix_cache main_semantic_cache "
    "main_static_batching main_continuous_batching main_flash_attention main_gqa main_mla main_distillation "
    "main_pruning"
).split()


@pytest.mark.parametrize("name", FILES)
def test_the_files_that_the_post_names_are_there(name):
    __import__(name)
    assert sys.modules[name].__file__.endswith(f"{name}.py")
