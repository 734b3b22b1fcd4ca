"""The generate functions against each other and against steps by hand; the script as a user runs it."""

import os
import runpy
import sys

import pytest
import torch
from helpers import ROOT, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from inference_utils import StepClock
from main_kvcache import generate, generate_kvcache, generate_static

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


@pytest.mark.cuda
def test_all_forms_on_cuda():
    """Before, at and past the window: every form on the GPU equals the one on the CPU."""
    model, cached = tiny_model(GPTlite).cuda(), tiny_model(GPTlite_KVCache).cuda()
    static = tiny_model(GPTlite_StaticKVCache).cuda()
    buffers, prompt = StaticKVCache(static, 2), random_tokens(2, 10)
    expected = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, 20, CONTEXT)
    assert torch.equal(generate_static(static, prompt.cuda(), 20, buffers).cpu(), expected)
    assert torch.equal(generate_kvcache(cached, prompt.cuda(), 20, CONTEXT).cpu(), expected)
    assert torch.equal(generate(model, prompt.cuda(), 6, CONTEXT).cpu(), expected[:, :16])


# The script


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """From another folder, in a locale that knows ASCII only."""
    folder = tmp_path_factory.mktemp("elsewhere")
    args = ("--quick", "--json", "-", "--plot", "figure.png", "--batch-size", "3", "--peers")
    run = run_script("main_kvcache.py", *args, cwd=folder, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    run.files = {path.name: path for path in folder.iterdir()}
    return run


def test_script_checks(quick_run):
    checks = quick_run.json["checks"]
    assert quick_run.status == 0 and quick_run.stderr == ""
    assert len(checks) == 2 * 4 + 2 and all(checks.values()), checks


def test_script_rows(quick_run):
    rows = {row["method"]: row for row in quick_run.json["rows"]}
    config = quick_run.json["config"]
    assert config["quick"] and config["prompt_len"] == 64 and config["batch_size"] == 3
    n, kv_bytes = config["n_tokens"], 2 * 3 * 192 * 4
    for B in (1, 3):
        names = ("no cache", "dynamic", "static", "transformers")
        plain, dynamic, static, peer = (rows[f"{name}, batch {B}"] for name in names)
        assert plain["baseline"] and not any(row["baseline"] for row in (dynamic, static, peer))
        assert plain["forward_tokens"] == B * sum(range(64, 64 + n))
        assert dynamic["forward_tokens"] == static["forward_tokens"] == B * (64 + n - 1)
        assert plain["kv_bytes_per_token"] is None and peer["valid_loss"] is None
        assert dynamic["kv_bytes_per_token"] == static["kv_bytes_per_token"] == kv_bytes
        for row in (plain, dynamic, static):
            assert row["same_output"] is True and row["first_difference"] is None
            assert row["valid_loss"] == pytest.approx(plain["valid_loss"], abs=1e-4)
            assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0 and row["tokens_per_s"] > 0
            assert row["peak_memory_mb"] > 5.6  # the weights
        # the cache of the whole context is there from the start
        assert static["peak_memory_mb"] > 5.6 + B * 256 * kv_bytes / 1e6


def test_script_output(quick_run):
    page = quick_run.stdout.splitlines()[:-1]
    assert "why:" in page and "checks:" in page
    assert page[0] == "main_kvcache.py: KV cache"
    assert 2 <= len(quick_run.json["why"]) <= 4
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
        ["--peers", "--prompt-len", "250", "--n-tokens", "8"],
        "--peers: OPT ends at the context, so --n-tokens 7 at most",
    ),
    "batch beyond the memory": (["--batch-size", "99999999"], "try a smaller batch or shorter prompts"),
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


def test_one_token_behind_a_prompt_longer_than_the_context(monkeypatch, capsys):
    args = ["--quick", "--batch-size", 1, "--prompt", "ROMEO:\n" * 60, "--n-tokens", 1]
    status, stdout, stderr = run_here(monkeypatch, capsys, *args)
    assert stderr == "" and status == 0
    plain, dynamic = stdout.partition("---- no cache ----\n")[2].split("---- dynamic ----\n")
    text = plain[:-2]  # the text, then an empty line
    assert dynamic.startswith(text + "\n\n")
    assert len(text) == 257 and text[:256] == ("ROMEO:\n" * 60)[-256:]
