"""The generate functions against each other and against steps by hand; the script as a user runs it."""

import os
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import main_kvcache
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from inference_utils import GPTLITE_CKPT_PATH, StepClock
from main_kvcache import generate, generate_kvcache, generate_static, loss_past_window

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


# Token for token


@given(st.integers(1, 3), st.integers(1, 30), st.data())
def test_all_forms_generate_the_same_up_to_the_window(batch_size, prompt_len, data):
    """In float64, prompts longer than the context included: then the first new token is the same."""
    window = data.draw(st.integers(1, CONTEXT))
    n_tokens = data.draw(st.integers(0, window - min(prompt_len, window) + 1))
    prompt = random_tokens(batch_size, prompt_len, data.draw(st.integers(0, 999)))
    expected = generate(tiny_model(GPTlite), prompt, n_tokens, window)
    assert expected.shape == (batch_size, prompt_len + n_tokens)
    assert torch.equal(expected[:, :prompt_len], prompt)
    cached, static = tiny_model(GPTlite_KVCache), tiny_model(GPTlite_StaticKVCache)
    assert torch.equal(generate_kvcache(cached, prompt, n_tokens, window), expected)
    buffers = StaticKVCache(static, batch_size, window)
    buffers.k.fill_(float("nan"))
    buffers.v.fill_(float("nan"))
    assert torch.equal(generate_static(static, prompt, n_tokens, buffers), expected)
    for refill in {1, window // 2, window - 1} - {0, window}:
        assert torch.equal(generate_kvcache(cached, prompt, n_tokens, window, refill=refill), expected)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
def test_both_caches_generate_the_same_past_the_window(prompt_len, n_tokens, seed):
    prompt = random_tokens(2, prompt_len, seed)
    cached, static = tiny_model(GPTlite_KVCache), tiny_model(GPTlite_StaticKVCache)
    expected = generate_kvcache(cached, prompt, n_tokens, 8)
    buffers = StaticKVCache(static, 2, 8)
    for _ in range(2):  # the second time in used buffers
        assert torch.equal(generate_static(static, prompt, n_tokens, buffers), expected)


def test_past_the_window_outputs_part():
    prompt = random_tokens(4, 12)
    exact = generate(tiny_model(GPTlite), prompt, 30, CONTEXT)
    cached = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, 30, CONTEXT)
    assert torch.equal(exact[:, : CONTEXT + 1], cached[:, : CONTEXT + 1])
    assert not torch.equal(exact, cached)


@pytest.mark.parametrize("n_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt_len", [1, 9, 20])
def test_work(n_tokens, prompt_len):
    """0 tokens run nothing, 1 runs the model once; without a cache the work grows, with one it does not."""
    prompt, read = random_tokens(2, prompt_len), min(prompt_len, CONTEXT)
    model, cached = tiny_model(GPTlite), tiny_model(GPTlite_KVCache)
    static = tiny_model(GPTlite_StaticKVCache)
    buffers = StaticKVCache(static, 2)
    with StepClock(model) as clock:
        output = generate(model, prompt, n_tokens, CONTEXT)
    assert output.shape == (2, prompt_len + n_tokens) and clock.n_steps == n_tokens
    assert clock.forward_tokens == 2 * sum(min(read + i, CONTEXT) for i in range(n_tokens))
    for run, clocked in (
        (lambda: generate_kvcache(cached, prompt, n_tokens, CONTEXT), cached),
        (lambda: generate_static(static, prompt, n_tokens, buffers), static),
    ):
        with StepClock(clocked) as clock:
            output = run()
        assert output.shape == (2, prompt_len + n_tokens) and clock.n_steps == n_tokens
        assert clock.forward_tokens == (2 * (read + n_tokens - 1) if n_tokens else 0)
        if not n_tokens:
            assert torch.equal(output, prompt)


@given(st.integers(1, 10), st.integers(1, 6), st.integers(0, 6))
def test_a_shared_prefix_may_come_as_a_cache(n_prefix, prompt_len, n_tokens):
    cached = tiny_model(GPTlite_KVCache)
    prefix, prompt = random_tokens(1, n_prefix), random_tokens(1, prompt_len, seed=n_prefix)
    _, cache = cached(prefix)
    before = [t.clone() for kv in cache for t in kv]
    expected = generate_kvcache(cached, torch.cat([prefix, prompt], dim=1), n_tokens, CONTEXT)
    for _ in range(2):
        output = generate_kvcache(cached, prompt, n_tokens, CONTEXT, kv_cache=cache)
        assert torch.equal(output, expected[:, n_prefix:])
    assert all(torch.equal(a, b) for a, b in zip([t for kv in cache for t in kv], before, strict=True))


# Refilling


def generate_by_hand(model, tokens, n_tokens, window, refill):
    """The rule without any cache: what is read starts anew with the last `refill` tokens when full."""
    start = max(tokens.shape[1] - window, 0)
    for i in range(n_tokens):
        if i > 0 and tokens.shape[1] - start > window:
            start = tokens.shape[1] - refill
        next_token = model(tokens[:, start:])[:, -1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, next_token], dim=1)
    return tokens


@given(st.integers(2, CONTEXT), st.integers(1, 24), st.integers(0, 40), st.data())
def test_refilling_equals_encoding_anew(window, prompt_len, n_tokens, data):
    refill = data.draw(st.integers(1, window - 1))
    prompt = random_tokens(2, prompt_len, data.draw(st.integers(0, 999)))
    output = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, n_tokens, window, refill=refill)
    assert torch.equal(output, generate_by_hand(tiny_model(GPTlite), prompt, n_tokens, window, refill))


def test_work_of_refilling():
    """W tokens are read for W - refill + 1 new ones, which is what the script's table says."""
    cached = tiny_model(GPTlite_KVCache)
    with StepClock(cached) as clock:
        generate_kvcache(cached, random_tokens(1, 4), 5 * 13, CONTEXT, refill=4)
    assert clock.forward_tokens == 5 * CONTEXT


@pytest.mark.parametrize("refill", [-1, 0, 16, 17])
def test_refill_out_of_range(refill):
    with pytest.raises(ValueError, match=f"refill keeps 1 to 15 tokens, not {refill}"):
        generate_kvcache(tiny_model(GPTlite_KVCache), random_tokens(1, 3), 1, CONTEXT, refill=refill)


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_empty_prompt(n_tokens):
    """SB-3"""
    empty, static = random_tokens(1, 0), tiny_model(GPTlite_StaticKVCache)
    for run in (
        lambda: generate(tiny_model(GPTlite), empty, n_tokens, CONTEXT),
        lambda: generate_kvcache(tiny_model(GPTlite_KVCache), empty, n_tokens, CONTEXT),
        lambda: generate_static(static, empty, n_tokens, StaticKVCache(static, 1)),
    ):
        with pytest.raises(ValueError, match="the prompt is empty"):
            run()


@pytest.mark.parametrize(
    ("n_tokens", "seqlen", "message"),
    [(-1, CONTEXT, "n_tokens is -1"), (3, 0, "seqlen is 0"), (3, -2, "seqlen is -2"), (0, 0, "seqlen is 0")],
)
def test_impossible_numbers(n_tokens, seqlen, message):
    prompt, static = random_tokens(1, 3), tiny_model(GPTlite_StaticKVCache)
    for run in (
        lambda: generate(tiny_model(GPTlite), prompt, n_tokens, seqlen),
        lambda: generate_kvcache(tiny_model(GPTlite_KVCache), prompt, n_tokens, seqlen),
        lambda: generate_static(static, prompt, n_tokens, StaticKVCache(static, 1, max(seqlen, 1))),
    )[: 3 if n_tokens < 0 else 2]:
        with pytest.raises(ValueError, match=message):
            run()


# Ties and batches (SB-4)


def test_greedy_takes_the_lowest_of_tied_tokens():
    models = [tiny_model(c, vocab_size=4) for c in (GPTlite, GPTlite_KVCache, GPTlite_StaticKVCache)]
    for model in models:
        model.fc_out.weight.zero_()
        model.fc_out.bias.copy_(torch.tensor([1.0, 3.0, 3.0, 3.0]))
    prompt = torch.zeros(3, 2, dtype=torch.int64)
    expected = torch.tensor([[0, 0, 1, 1, 1]] * 3)
    assert torch.equal(generate(models[0], prompt, 3, CONTEXT), expected)
    assert torch.equal(generate_kvcache(models[1], prompt, 3, CONTEXT), expected)
    assert torch.equal(generate_static(models[2], prompt, 3, StaticKVCache(models[2], 3)), expected)


@given(st.integers(1, 12), st.integers(0, 99))
def test_a_prompt_alone_and_in_a_batch(prompt_len, seed):
    prompts = random_tokens(4, prompt_len, seed)
    model, cached = tiny_model(GPTlite), tiny_model(GPTlite_KVCache)
    static = tiny_model(GPTlite_StaticKVCache)
    for run in (
        lambda prompt: generate(model, prompt, 8, CONTEXT),
        lambda prompt: generate_kvcache(cached, prompt, 8, CONTEXT),
        lambda prompt: generate_static(static, prompt, 8, StaticKVCache(static, len(prompt))),
    ):
        together = run(prompts)
        assert torch.equal(torch.cat([run(prompt[None]) for prompt in prompts]), together)
        assert torch.equal(run(prompts[:1].expand(4, -1)), together[:1].expand(4, -1))


# Loss past the window


def loss_by_hand(streams, window, rule, stride):
    """Each rule by its own steps: the text is given, each token is predicted from what the rule keeps."""
    model, cached = tiny_model(GPTlite), tiny_model(GPTlite_KVCache)
    cache, start, losses = None, 0, []
    for t in range(1, streams.shape[1]):  # predicts token t
        if rule == "recompute":
            logits = model(streams[:, max(t - window, 0) : t])
        elif rule == "last position":
            logits, cache = cached(streams[:, t - 1 : t], cache, max_seqlen=window)
        else:
            start = t - rule if t - start > window else start
            logits = model(streams[:, start:t])
        if t >= window and (t - window) % stride == 0:
            losses.append(F.cross_entropy(logits[:, -1].float(), streams[:, t]))
    return sum(losses).item() / len(losses)


@given(
    st.integers(2, CONTEXT),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(["recompute", "last position", "refill"]),
    st.data(),
)
def test_loss_past_the_window(window, n_past, stride, rule, data):
    rule = data.draw(st.integers(1, window - 1)) if rule == "refill" else rule
    streams = random_tokens(data.draw(st.integers(1, 3)), window + n_past, data.draw(st.integers(0, 99)))
    loss = loss_past_window(tiny_model(GPTlite_KVCache), streams, window, rule, stride)
    assert_close(loss, loss_by_hand(streams, window, rule, stride), 1e-5)


# The decode step of fixed shapes


def test_compiled_step(monkeypatch):
    """The same tokens from one graph for all steps and runs; traced here, not translated to machine code."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_(f, **how, backend=keep))
    static = tiny_model(GPTlite_StaticKVCache)
    step, buffers = main_kvcache.CompiledStep(static), StaticKVCache(static, 2)
    for seed in (0, 1):
        prompt = random_tokens(2, 10, seed)
        with StepClock(static, step) as clock:
            output = generate_static(static, prompt, 12, buffers, step)
        assert torch.equal(output, generate_kvcache(tiny_model(GPTlite_KVCache), prompt, 12, CONTEXT))
        assert clock.n_steps == 12 and clock.forward_tokens == 2 * (10 + 11)
    assert len(graphs) == 1


@pytest.mark.cuda
def test_cuda_graph():
    """Before, at and past the window, twice; every form on the GPU equals the one on the CPU."""
    model, cached = tiny_model(GPTlite).cuda(), tiny_model(GPTlite_KVCache).cuda()
    static = tiny_model(GPTlite_StaticKVCache).cuda()
    buffers = StaticKVCache(static, 2)
    step = main_kvcache.CudaGraphStep(static, buffers)
    for seed in (0, 1):
        prompt = random_tokens(2, 10, seed)
        expected = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, 20, CONTEXT)
        prompt = prompt.cuda()
        assert torch.equal(generate_static(static, prompt, 20, buffers, step).cpu(), expected)
        assert torch.equal(generate_static(static, prompt, 20, buffers).cpu(), expected)
        assert torch.equal(generate_kvcache(cached, prompt, 20, CONTEXT).cpu(), expected)
        exact = generate(model, prompt, 6, CONTEXT).cpu()
        assert torch.equal(exact, expected[:, :16])


# The script


@pytest.fixture(scope="module")
def quick_run(checkpoint, tmp_path_factory):
    """From another folder, in a locale that knows ASCII only."""
    folder = tmp_path_factory.mktemp("elsewhere")
    args = ("--quick", "--json", "-", "--plot", "figure.png", "--repeats", "1", "--batch-size", "3")
    env = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    run = run_script("main_kvcache.py", *args, cwd=folder, env=env, checkpoint=checkpoint)
    run.files = {path.name: path for path in folder.iterdir()}
    return run


def test_script_checks(quick_run, checkpoint):
    checks = quick_run.json["checks"]
    if checkpoint != GPTLITE_CKPT_PATH:  # untrained: no text is likelier than another under any rule
        checks = {name: passed for name, passed in checks.items() if "refilling loses less" not in name}
    else:
        assert quick_run.status == 0
    assert len(checks) >= 2 * 4 + 1 and all(checks.values()), checks
    assert quick_run.stderr == ""
    assert "FAILED" not in quick_run.stdout or checkpoint != GPTLITE_CKPT_PATH


def test_script_rows(quick_run):
    rows = {row["method"]: row for row in quick_run.json["rows"]}
    config = quick_run.json["config"]
    assert config["quick"] and config["prompt_len"] == 64 and config["batch_size"] == 3
    n = config["n_tokens"]
    for B in (1, 3):
        plain, dynamic, static = (rows[f"{name}, batch {B}"] for name in ("no cache", "dynamic", "static"))
        assert plain["baseline"] and not dynamic["baseline"] and not static["baseline"]
        assert plain["forward_tokens"] == B * sum(range(64, 64 + n))
        assert dynamic["forward_tokens"] == static["forward_tokens"] == B * (64 + n - 1)
        assert plain["kv_bytes_per_token"] is None
        assert dynamic["kv_bytes_per_token"] == static["kv_bytes_per_token"] == 2 * 6 * 384 * 4 == 18432
        for row in (plain, dynamic, static):
            assert row["same_output"] is True and row["first_difference"] is None
            assert row["valid_loss"] == pytest.approx(plain["valid_loss"], abs=1e-4)
            assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0 and row["tokens_per_s"] > 0
            assert row["peak_memory_mb"] > 43  # the weights
        # the cache of the whole context is there from the start
        assert static["peak_memory_mb"] > 43 + B * 256 * 18432 / 1e6


def test_script_past_the_window(quick_run, checkpoint):
    (past,) = quick_run.json["sweeps"].values()
    assert [row["rule"] for row in past][:2] == ["recompute", "last position"]
    recompute, last_position, *refilled = (row["loss of the next token"] for row in past)
    assert len(refilled) == 2
    work = [row["forward tokens a new token"] for row in past]
    assert work == pytest.approx([256, 1, 256 / 129, 256 / 193])
    if checkpoint == GPTLITE_CKPT_PATH:
        assert recompute < last_position and max(refilled) < last_position


def test_script_output(quick_run):
    page = quick_run.stdout.splitlines()[:-1]
    assert "why:" in page and "checks:" in page
    assert page[0] == "main_kvcache.py: KV cache"
    assert 2 <= len(quick_run.json["why"])
    table = page[: page.index("checks:")]
    assert all(len(line) <= 120 for line in table), max(table, key=len)
    assert list(quick_run.files) == ["figure.png"]
    assert quick_run.files["figure.png"].read_bytes().startswith(b"\x89PNG")


def run_here(monkeypatch, capsys, *args):
    """The script's main block in this process, which has its imports already: status, stdout, stderr."""
    script = str(ROOT / "main_kvcache.py")
    monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


BAD_INPUT = {
    "unknown character": (["--prompt", "ROMEO \u2764"], "unknown character '\u2764' (U+2764) at position 6"),
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "missing checkpoint": (
        ["--checkpoint", "absent.pth"],
        "no checkpoint absent.pth: 'python main_training.py",
    ),
    "truncated checkpoint": (["--checkpoint", "cut.pth"], "cut.pth is truncated or no checkpoint"),
    "short text": (["--data", "short.txt"], "the text is too short"),
    "missing text": (["--data", "absent.txt"], "no text file absent.txt"),
    "batch of none": (["--batch-size", "0"], "argument --batch-size: 0 is not a number from 1 up"),
    "folder that is not there": (["--json", "absent/report.json"], "there is no folder"),
    "no CUDA": (["--device", "cuda"], "--device cuda: this machine has none; use --device auto or cpu"),
    "no image": (["--plot", "figure.txt"], "must end in .png"),
    "peer past the context": (
        ["--peer", "--prompt-len", "250", "--n-tokens", "8"],
        "with a prompt of 250 tokens --n-tokens can be 7 at most",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(case, checkpoint, tmp_path, monkeypatch, capsys):
    if case == "no CUDA" and torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    args, message = BAD_INPUT[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.pth").write_bytes(checkpoint.read_bytes()[:100_000])
    (tmp_path / "short.txt").write_text("To be, or not to be\n" * 100)
    if "--checkpoint" not in args:
        args = [*args, "--checkpoint", str(checkpoint)]
    before = sorted(os.listdir(tmp_path))
    status, stdout, stderr = run_here(monkeypatch, capsys, "--quick", *args)
    lines = [line for line in stderr.splitlines() if not line.startswith(("usage:", " "))]
    assert status == 2 and stdout == ""
    assert len(lines) == 1 and lines[0].startswith("main_kvcache.py: ") and message in lines[0], stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("cache_is_slow", [False, True])
def test_the_explanation_looks_at_the_run(checkpoint, monkeypatch, capsys, cache_is_slow):
    """With made-up times: nothing is claimed that they do not show. And a loss that is NaN is no success."""
    import inference_utils as utils

    ms = {"no cache": [7.0, 3.0, 3.0], "dynamic": [7.5, 4.0, 4.0] if cache_is_slow else [7.5, 2.8, 1.0]}
    measure, losses = utils.measure, iter([1.43, float("nan"), 1.43])

    def with_these_times(methods, *args):
        results = measure(methods, *args)
        return {n: m._replace(steps_ms=ms.get(n, m.steps_ms)) for n, m in results.items()}

    monkeypatch.setattr(utils, "measure", with_these_times)
    monkeypatch.setattr(utils, "validation_loss", lambda *_: next(losses))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    args = ["--quick", "--repeats", 1, "--batch-size", 1, "--checkpoint", checkpoint]
    status, stdout, _ = run_here(monkeypatch, capsys, *args, "--prompt-len", 1, "--n-tokens", 3)
    assert status == 1 and "FAILED the same validation loss with caches" in stdout
    why = " ".join(stdout.partition("why:")[2].split())
    assert "TTFT is 7.0 ms without and 7.5 ms with" in why
    if cache_is_slow:
        assert "The cache is not ahead after these 3 tokens: all of them take 15.5 ms against 13.0" in why
    else:
        assert "The cache is ahead from token 3 on: all of them take 11.3 ms against 13.0" in why
    assert "cut into" not in why


def test_one_token_behind_a_prompt_longer_than_the_context(checkpoint, monkeypatch, capsys):
    args = ["--quick", "--repeats", 1, "--batch-size", 1, "--checkpoint", checkpoint]
    status, stdout, stderr = run_here(
        monkeypatch, capsys, *args, "--prompt", "ROMEO:\n" * 60, "--n-tokens", 1
    )
    assert stderr == "" and status in ((0,) if checkpoint == GPTLITE_CKPT_PATH else (0, 1))
    failed = [line for line in stdout.splitlines() if "FAILED" in line]
    assert all("refilling loses less" in line for line in failed)
    plain, dynamic = stdout.partition("---- no cache ----\n")[2].split("---- dynamic ----\n")
    text = plain[:-2]  # the text, then an empty line
    assert dynamic.startswith(text + "\n\n")
    assert len(text) == 257 and text[:256] == ("ROMEO:\n" * 60)[-256:]
