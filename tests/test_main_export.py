"""The folder against transformers, which reads it without our code, and the way back to the bit."""

import copy
import json

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.shakespeare import VOCABULARY, encode
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_opt import SPECIAL_LOGIT, generate_opt, opt_from_gptlite
from inference_utils import load_checkpoint
from linear_packed import pack_linears
from main_export import SPECIAL, character_tokenizer, export_folder, import_folder
from main_kvcache import generate_kvcache
from main_pruning import prune, prune_linear
from pruning_parts import prune_channels

V = len(VOCABULARY)
TINY = {"vocab_size": 12, "n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model of all 96 characters, which needs a width of at least as many."""
    path = tmp_path_factory.mktemp("export") / "a folder"
    export_folder(tiny_model(GPTlite, vocab_size=V, d_model=128, n_heads=8), VOCABULARY, path)
    return path


@given(st.text(alphabet=VOCABULARY, max_size=200))
def test_tokenizer_is_exact_for_every_text(text):
    tokenizer = character_tokenizer(VOCABULARY)
    assert tokenizer.encode(text).ids == encode(text)
    assert tokenizer.decode(encode(text)) == text


def test_loaded_tokenizer_is_exact_and_shows_unknown_characters(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in (VOCABULARY, "  To be , or not\n\n\n to be ; n't 's . ? ! ", " ", "", "a" * 3000):
        tokens = tokenizer(text).input_ids
        assert tokens == encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer("caf\u00e9").input_ids) == "caf?"
    assert len(tokenizer) == V + 1


def test_the_special_token_is_outside_the_vocabulary(folder):
    """Engines ask for a beginning, an end, a padding and an unknown; none of them is a character."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert SPECIAL == "\u2404" and SPECIAL not in VOCABULARY
    for role in ("bos", "eos", "unk", "pad"):
        assert getattr(tokenizer, f"{role}_token") == SPECIAL and getattr(tokenizer, f"{role}_token_id") == V
    assert tokenizer.padding_side == "left"
    assert tokenizer("ab" + SPECIAL).input_ids == [*encode("ab"), V]  # typed into a text
    assert tokenizer.decode([5, V, 6], skip_special_tokens=True) == VOCABULARY[5] + VOCABULARY[6]
    settings = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in settings] == [(V, SPECIAL, True)]
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 104 and config["pad_token_id"] == config["eos_token_id"] == V


def test_a_padded_batch_gives_each_text_its_own_tokens(folder):
    """Also behind the special character, which someone may type."""
    model = tiny_model(GPTlite_KVCache, vocab_size=V, d_model=128, n_heads=8)
    opt = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = ["a", "be, or not", "To", "O Romeo", "?"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    served = opt.generate(**batch, max_new_tokens=6, do_sample=False)
    for text, output in zip(texts, served, strict=True):
        alone = generate_kvcache(model, torch.tensor([encode(text)]), 6, 16)
        assert torch.equal(output[-6:], alone[0, -6:])
    batch = tokenizer([SPECIAL + "a"], return_tensors="pt")
    assert opt.generate(**batch, max_new_tokens=3, do_sample=False).max() <= V


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_special_token_is_never_chosen(dtype, trained):
    """Its logit is the same after every text, also for new weights, whose biases are all zero."""
    model = tiny_model(GPTlite, n_layers=1, vocab_size=12)
    if not trained:
        with torch.random.fork_rng():
            model = GPTlite(12, 32, 2, 16, 1, 0.0, 16).eval()
    model = model.to(dtype)
    opt = opt_from_gptlite(model, special=True)
    tokens = random_tokens(4, 16, vocab_size=12)
    with torch.no_grad():
        logits, expected = opt(tokens).logits, model(tokens)
    special = logits[..., 12:].double()  # and rows that fill up a multiple of 8
    assert logits.shape[-1] == 16
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 30.0)
    assert (special - SPECIAL_LOGIT).abs().max() <= tolerance
    assert (special.amax(dim=-1) < logits[..., :12].double().amin(dim=-1) - 20).all()
    if dtype.itemsize >= 4:
        assert_close(logits[..., :12], expected)


def test_a_norm_that_hides_a_channel_has_no_room_for_a_special_token():
    model = tiny_model(GPTlite)
    with torch.no_grad():
        model.ln.weight[3] = 0.0
    with pytest.raises(ValueError, match="too small for the row of a special token"):
        opt_from_gptlite(model, special=True)
    assert opt_from_gptlite(model).seqlen == model.seqlen


def test_a_folder_without_a_special_token_is_read_as_well(tmp_path):
    """As engines' own tools write them, or an older version of this script."""
    model = tiny_model(GPTlite, **TINY)
    export_folder(model, VOCABULARY[:12], tmp_path / "f")
    opt_from_gptlite(model).save_pretrained(tmp_path / "plain")
    tokenizer = json.loads((tmp_path / "f" / "tokenizer.json").read_text())
    (tmp_path / "plain" / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": []}))
    back, characters = import_folder(tmp_path / "plain")
    assert characters == VOCABULARY[:12] and back.fc_out.bias.abs().max() == 0
    tokens = random_tokens(1, 16, vocab_size=12)
    with torch.no_grad():
        assert_close(back(tokens), model(tokens), 1e-9)


def test_packed_weights_are_exported_as_ordinary_ones(tmp_path):
    model = tiny_model(GPTlite, dtype=torch.float32, **TINY)
    export_folder(pack_linears(copy.deepcopy(model)), VOCABULARY[:12], tmp_path / "f")
    back, _ = import_folder(tmp_path / "f")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


def test_auto_model_computes_and_generates_the_same(folder):
    model = tiny_model(GPTlite_KVCache, vocab_size=V, d_model=128, n_heads=8)
    opt = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert opt.dtype == torch.float64
    tokens = random_tokens(2, 16, vocab_size=V)
    with torch.no_grad():
        assert_close(opt(tokens).logits[..., :V], model(tokens)[0], 1e-9)
    prompt = tokens[:1, :5]
    expected = generate_kvcache(model, prompt, 11, 16)
    assert torch.equal(opt.generate(prompt, max_new_tokens=11, do_sample=False), expected)
    assert torch.equal(generate_opt(opt, prompt, 11), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{}, {"n_heads": 1, "d_head": 16}, {"n_layers": 1, "vocab_size": 1}, {"seqlen": 1}]
)
def test_comes_back_to_the_bit(tmp_path, dtype, sizes):
    sizes = TINY | sizes
    model = tiny_model(GPTlite, dtype=dtype, **sizes)
    if dtype == torch.bfloat16:
        model = model.float().to(dtype)
    vocabulary = VOCABULARY[40 : 40 + sizes["vocab_size"]]
    export_folder(model, vocabulary, tmp_path / "f")
    back, characters = import_folder(tmp_path / "f")
    assert characters == vocabulary
    assert back.seqlen == model.seqlen
    assert back.blocks[0].mha.n_heads == sizes["n_heads"]
    for (name, a), b in zip(model.state_dict().items(), back.state_dict().values(), strict=True):
        assert a.dtype == b.dtype == dtype
        assert torch.equal(a, b), name


def test_folder_that_others_saved_keeps_its_function(folder, tmp_path):
    opt = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        for p in opt.parameters():
            p.mul_(1.01)
    opt.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(tmp_path)
    back, _ = import_folder(tmp_path)
    assert back.fc_out.bias.abs().max() == 0
    tokens = random_tokens(1, 16, vocab_size=V)
    with torch.no_grad():
        assert_close(back(tokens), opt(tokens).logits[..., :V], 1e-9)


def test_stale_biases_in_the_header_are_not_used(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    export_folder(tiny_model(GPTlite, **TINY), VOCABULARY[:12], tmp_path / "f")
    file = tmp_path / "f" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        header = opened.metadata()
    name = "model.decoder.final_layer_norm.bias"
    weights[name] = weights[name] + 1.0
    save_file(weights, file, metadata=header)
    back, _ = import_folder(tmp_path / "f")
    assert torch.equal(back.ln.bias, weights[name])
    assert back.fc_out.bias.abs().max() == 0


def spoil_config(folder, **changes):
    """A value of None takes the setting out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def spoil_vocabulary(folder, change):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = change(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))


def spoil_weights(folder, change):
    """change(weights) works in place and may return another header."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        header = opened.metadata()
    header = change(weights) or header
    save_file(weights, file, metadata=header)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda f: spoil_config(f, model_type="gpt2"), "model_type"),
        (lambda f: spoil_config(f, activation_function="gelu"), "activation_function"),
        (lambda f: spoil_config(f, do_layer_norm_before=False), "do_layer_norm_before"),
        (lambda f: spoil_config(f, ffn_dim=17), "ffn_dim"),
        *(
            (lambda f, n=n: spoil_config(f, num_attention_heads=n), "heads")
            for n in (None, 0, 3, -2, "2", [])
        ),
        *(
            (lambda f, n=n: spoil_config(f, num_hidden_layers=n), "hidden_layers")
            for n in (None, 0, True, 1.5)
        ),
        *((lambda f, n=n: spoil_config(f, num_hidden_layers=n), "lacks .*layers.2") for n in (3, 10**12)),
        (lambda f: spoil_config(f, num_hidden_layers=1), "holds 37 tensors, not 21"),
        *(
            (lambda f, n=n: spoil_config(f, max_position_embeddings=n), "embed_positions")
            for n in (8, 10**12)
        ),
        (lambda f: spoil_config(f, max_position_embeddings=None), "max_position_embeddings is None"),
        (lambda f: spoil_config(f, hidden_size=None), "hidden_size is None"),
        (lambda f: spoil_config(f, hidden_size=8, word_embed_proj_dim=8, ffn_dim=32), "embed_tokens"),
        *((lambda f, s=s: (f / "config.json").write_text(s), "no settings") for s in ("[]", "3", "null")),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "whole model folder"),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), "whole model folder"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "whole model folder"),
        *(
            (lambda f, change=change: spoil_vocabulary(f, change), "single characters")
            for change in (
                list,
                lambda v: {},
                lambda v: v | {"ab": len(v)},
                lambda v: {"" if i == 3 else c * (1 + (i == 4)): i for c, i in v.items()},
                lambda v: {c: str(i) for c, i in v.items()},
                lambda v: {c: i + 1 for c, i in v.items()},
            )
        ),
        (lambda f: spoil_vocabulary(f, lambda v: dict([*v.items()][:-1])), "single characters"),
        (lambda f: spoil_vocabulary(f, lambda v: v | {"\u2764": len(v)}), "single characters"),
        (lambda f: spoil_weights(f, lambda w: w["lm_head.weight"][0].fill_(float("nan")) is None), "NaN"),
        (lambda f: spoil_weights(f, lambda w: w.update(more=torch.zeros(2))), "holds 38 tensors, not 37"),
        (
            lambda f: spoil_weights(f, lambda w: w.update({"lm_head.weight": torch.zeros(12, 16).char()})),
            "torch.int8",
        ),
        *(
            (
                lambda f, s=s: spoil_weights(f, lambda w: w.update({"lm_head.weight": torch.zeros(s)})),
                "lm_head.weight",
            )
            for s in ((12, 8), (12,), ())
        ),
        (lambda f: (f / "config.json").write_text("{"), "whole model folder"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 50), "damaged"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "damaged",
        ),
    ],
)
def test_spoilt_folder_is_one_line(tmp_path, spoil, words):
    export_folder(tiny_model(GPTlite, **TINY), VOCABULARY[:12], tmp_path / "f")
    spoil(tmp_path / "f")
    with pytest.raises((ValueError, OSError), match=words):
        import_folder(tmp_path / "f")


@pytest.mark.parametrize("value", ["", "{", "[1.0]", "7", '["a"]', json.dumps([0.0] * 16 + [1.0])])
def test_a_header_of_others_is_passed_over(tmp_path, value):
    export_folder(tiny_model(GPTlite, **TINY), VOCABULARY[:12], tmp_path / "f")
    expected = []

    def change(weights):
        expected.append(weights["model.decoder.final_layer_norm.bias"])
        return {"format": "pt", "ln.bias": value, "fc_out.bias": value}

    spoil_weights(tmp_path / "f", change)
    back, _ = import_folder(tmp_path / "f")
    assert torch.equal(back.ln.bias, expected[0]) and back.fc_out.bias.abs().max() == 0


def test_folder_is_whole_or_not_there(tmp_path, monkeypatch):
    model = tiny_model(GPTlite, **TINY)
    with pytest.raises(ValueError, match="11 characters"):
        export_folder(model, VOCABULARY[:11], tmp_path / "f")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        export_folder(model, VOCABULARY[:12], tmp_path / "full")
    with pytest.raises(OSError, match="nowhere"):
        export_folder(model, VOCABULARY[:12], tmp_path / "nowhere" / "f")

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    (tmp_path / "f.part").mkdir()
    (tmp_path / "f.part" / "mine.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("safetensors.torch.save_file", full_disk)
        export_folder(model, VOCABULARY[:12], tmp_path / "f")
    assert sorted(tmp_path.rglob("*")) == before
    export_folder(model, VOCABULARY[:12], tmp_path / "f")  # and beside it, with success
    assert set(before) < set(tmp_path.rglob("*")) and len([*tmp_path.iterdir()]) == 3
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o755


def test_script_writes_and_reads(checkpoint, tmp_path):
    run = run_script(
        "main_export.py", "out folder", "--quick", "--json", "-", cwd=tmp_path, checkpoint=checkpoint
    )
    assert run.status == 0, run.stderr
    assert run.stderr == ""
    assert all(run.json["checks"].values()) and len(run.json["checks"]) == 6
    ours, theirs = run.json["rows"]
    assert ours["baseline"] and theirs["same_output"] is True
    assert theirs["valid_loss"] == pytest.approx(ours["valid_loss"], abs=1e-4)  # its own, measured
    assert "vllm serve 'out folder' --dtype float32" in run.stdout
    # the type is that of the comparison, the checkpoint keeps the folder's
    args = ("--read", "out folder", "--output", "back.pth", "--quick", "--dtype", "bfloat16")
    run = run_script("main_export.py", *args, cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    written, original = load_checkpoint(tmp_path / "back.pth"), load_checkpoint(checkpoint)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name].float()) for name in written)


def test_ctranslate2_gives_the_same_tokens(tmp_path):
    """Other people's engine, from the folder as it is."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    model = tiny_model(GPTlite_KVCache, vocab_size=V, d_model=128, n_heads=8, dtype=torch.float32)
    export_folder(model, VOCABULARY, tmp_path / "f")
    ctranslate2.converters.TransformersConverter(str(tmp_path / "f")).convert(str(tmp_path / "engine"))
    engine = ctranslate2.Generator(str(tmp_path / "engine"), device="cpu", compute_type="float32")
    for text in ("a", "be, or not"):
        (result,) = engine.generate_batch(
            [list(text)], max_length=6, sampling_topk=1, include_prompt_in_result=False
        )
        alone = generate_kvcache(model, torch.tensor([encode(text)]), 6, 16)
        assert result.sequences_ids[0] == alone[0, -6:].tolist()


@pytest.mark.parametrize("package", ["safetensors", "transformers"])
def test_missing_package_is_one_line(checkpoint, tmp_path, package):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    run = run_script("main_export.py", "f", "--quick", cwd=tmp_path, env=env, checkpoint=checkpoint)
    assert run.status == 2
    assert run.stderr == f"main_export.py: No module named '{package}'\n"
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("args", [["--read", "missing", "--output", "b.pth"], ["--read", "missing"], ["."]])
def test_bad_options_are_one_line(tmp_path, args):
    (tmp_path / "something").write_text("x")
    run = run_script("main_export.py", *args, "--quick", cwd=tmp_path)
    assert run.status == 2
    assert run.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_models_that_opt_cannot_be_are_refused():
    heads = prune(tiny_model(GPTlite), [torch.rand(2)] * 2, [torch.rand(128)] * 2, 1, 128)
    channels = prune_channels(tiny_model(GPTlite), torch.rand(32), 16)
    neurons = tiny_model(GPTlite)
    net = neurons.blocks[0].ffwd.net
    net[0], net[2] = prune_linear(net[0], rows=range(5)), prune_linear(net[2], columns=range(5))
    for model, word in ((heads, "heads pruned"), (channels, "plain layer norms"), (neurons, "every block")):
        with pytest.raises(ValueError, match=word):
            opt_from_gptlite(model)
