"""GPTlite as a Hugging Face model folder, and back: the way out to production engines.

GPTlite is OPT's architecture, so a folder with its weights under OPT's names, a configuration and a
tokenizer of single characters is all that other engines need to serve it. Exact up to the rounding of
one vector (OPT's head has no bias; it moves into the last layer norm); the way back is exact to the bit.

Run: python main_export.py FOLDER              writes the folder; without one it only checks
     python main_export.py --read FOLDER --output FILE.pth      makes a checkpoint from such a folder

Source: Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022.
"""

import copy
import json
import shutil
import tempfile
from itertools import chain
from pathlib import Path

import torch

from gptlite import GPTlite
from gptlite_opt import BLOCK_NAMES, POSITION_OFFSET, fold_output_bias, opt_from_gptlite
from inference_utils import load_weights

BIASES = ("ln.bias", "fc_out.bias")  # of GPTlite; OPT holds their sum, as seen by the head


def character_tokenizer(vocabulary):
    """A tokenizer of the `tokenizers` library whose token i is the character vocabulary[i].

    It is byte-pair encoding without any pair to join. Encoding and decoding give back every text of these
    characters; any other character becomes a question mark.
    """
    from tokenizers import Tokenizer, decoders, models

    token_of = {character: token for token, character in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=token_of, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()  # joins the characters without spaces between
    return tokenizer


def export_folder(model, vocabulary, folder):
    """Writes a GPTlite as a folder that AutoModelForCausalLM and AutoTokenizer load, without any network.

    Args: model: GPTlite, in the type that the weights shall have; vocabulary: its characters, in order.
    Raises: ValueError where the folder exists and holds something, or the vocabulary has another size;
        OSError where it cannot be written. The folder is whole or not there.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; give a new name")
    if len(vocabulary) != model.token_embedding.num_embeddings:
        n_tokens = model.token_embedding.num_embeddings
        raise ValueError(f"{len(vocabulary)} characters do not name the {n_tokens} tokens of this model")
    opt = opt_from_gptlite(model)
    # a new name beside it, as NAME.part may be someone's; a mistyped path is an error, not a new tree
    part = Path(tempfile.mkdtemp(prefix=folder.name + ".", suffix=".part", dir=folder.parent))
    try:
        part.chmod(0o755)
        opt.config.architectures = ["OPTForCausalLM"]
        opt.config.dtype = opt.dtype
        opt.config.save_pretrained(part)
        opt.generation_config.save_pretrained(part)
        # the two biases in front of their sum, as text in the header: other readers pass over it
        state = model.state_dict()
        biases = {name: json.dumps(state[name].cpu().double().tolist()) for name in BIASES}
        weights = {name: tensor.contiguous().cpu() for name, tensor in opt.state_dict().items()}
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"} | biases)
        (part / "model.safetensors").chmod(0o644)  # as readable as the files beside it
        character_tokenizer(vocabulary).save(str(part / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # it would take the space out of " ,"
            "model_max_length": model.seqlen,
        }
        (part / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def architecture(config):
    """(layers, width, heads, context) of an OPT configuration. Raises ValueError for one GPTlite is not."""
    if not isinstance(config, dict):
        raise ValueError("config.json holds no settings by name")
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    for key in keys:
        if type(config.get(key)) is not int or config[key] < 1:
            raise ValueError(f"{key} is {config.get(key)}, not a number from 1 up")
    n_layers, width, n_heads, seqlen = (config[key] for key in keys)
    if width % n_heads:
        raise ValueError(f"num_attention_heads is {n_heads}, which does not divide the width of {width}")
    wanted = {
        "model_type": "opt",
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
    }
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]}, not {value}")
    return n_layers, width, n_heads, seqlen


def written_biases(state, kept):
    """Both biases as export_folder wrote them; {} where the weights are no longer those it wrote.

    Args: state: GPTlite's weights, the output bias in the last layer norm; kept: header of the file.
    """
    try:
        biases = {n: torch.tensor(json.loads(kept[n]), dtype=torch.float64).to(state[n]) for n in BIASES}
        if any(biases[n].shape != state[n].shape for n in BIASES):
            return {}
        folded = fold_output_bias(state["fc_out.weight"], biases["fc_out.bias"], biases["ln.bias"])  # [E]
    except (KeyError, TypeError, ValueError, RuntimeError):  # none, or another program's
        return {}
    rounding = 4 * torch.finfo(state["ln.bias"].dtype).eps * folded.abs().max()
    return biases if (folded - state["ln.bias"].double()).abs().max() <= rounding else {}


def import_folder(folder, model_class=GPTlite):
    """Reads a GPTlite from a folder with an OPT model of its architecture.

    Args: model_class: GPTlite or a variant with the same weights.
    Returns: (model in evaluation mode, in the folder's type; vocabulary, a string). What export_folder
        wrote comes back to the bit; weights that others have changed come back with the output bias in the
        last layer norm.
    Raises: ValueError for another architecture, a tokenizer of more than characters, weights that do not
        fit these or are damaged; OSError for a missing file.
    """
    from safetensors import safe_open

    folder = Path(folder)
    weights = folder / "model.safetensors"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        characters = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        if not weights.is_file():
            raise FileNotFoundError(2, "No such file or directory", str(weights))
        with safe_open(weights, framework="pt") as file:
            opt = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
            kept = file.metadata() or {}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder} does not hold a whole model folder: {error!r}") from error
    except Exception as error:  # safetensors has an exception of its own for a damaged file
        if isinstance(error, OSError):
            raise
        raise ValueError(f"{weights} is damaged: {error}") from error
    try:
        n_layers, width, n_heads, seqlen = architecture(config)
    except ValueError as error:
        raise ValueError(f"{folder} is not GPTlite's architecture: {error}") from error
    single = isinstance(characters, dict) and len(characters) > 0
    single = single and all(len(c) == 1 and type(token) is int for c, token in characters.items())
    if not single or sorted(characters.values()) != list(range(len(characters))):
        raise ValueError(f"{folder}: GPTlite's tokens are single characters, this tokenizer has others")
    vocabulary = "".join(sorted(characters, key=characters.get))
    for name, tensor in opt.items():
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{weights}: {name} is {tensor.dtype}; export the model unquantised")
        if not tensor.isfinite().all():
            raise ValueError(f"{weights} is damaged: {name} holds NaN or infinity")

    embedding = "model.decoder.embed_tokens.weight"
    if "lm_head.weight" not in opt and embedding in opt:
        opt["lm_head.weight"] = opt[embedding]  # tied
    outer = {
        "token_embedding.weight": embedding,
        "position_embedding.weight": "model.decoder.embed_positions.weight",
        "ln.weight": "model.decoder.final_layer_norm.weight",
        "ln.bias": "model.decoder.final_layer_norm.bias",
        "fc_out.weight": "lm_head.weight",
    }
    inner = (
        (f"blocks.{layer}.{ours}.{kind}", f"model.decoder.layers.{layer}.{theirs}.{kind}")
        for layer in range(n_layers)
        for ours, theirs in BLOCK_NAMES.items()
        for kind in ("weight", "bias")
    )
    state = {}
    for ours, theirs in chain(outer.items(), inner):  # found all before a model of this size is made
        if theirs not in opt:
            raise ValueError(f"{weights} does not fit config.json: it lacks {theirs}")
        state[ours] = opt[theirs]
    if len(opt) > len(state):
        raise ValueError(f"{weights} does not fit config.json: it holds {len(opt)} tensors, not {len(state)}")
    n_positions = seqlen + POSITION_OFFSET
    for name, n in (("token_embedding.weight", len(vocabulary)), ("position_embedding.weight", n_positions)):
        if state[name].shape != (n, width):
            found = list(state[name].shape)
            raise ValueError(f"{weights} does not fit its folder: {outer[name]} is {found}, not {[n, width]}")
    state["position_embedding.weight"] = state["position_embedding.weight"][POSITION_OFFSET:]  # [T, E]
    state["fc_out.bias"] = state["fc_out.weight"].new_zeros(len(vocabulary))  # [V]
    model = model_class(len(vocabulary), width, n_heads, width // n_heads, n_layers, 0.0, seqlen)
    load_weights(model.to(state["fc_out.weight"].dtype), state, str(weights))
    model.load_state_dict(written_biases(state, kept), strict=False)
    return model.eval(), vocabulary


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import VOCABULARY, decode, encode, get_shakespeare_data
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache

    parser = rep.options(__doc__, plot=False)
    parser.add_argument("folder", nargs="?", type=Path, help="folder to write; must not exist yet")
    parser.add_argument("--read", metavar="FOLDER", type=Path, help="read this folder instead of writing one")
    parser.add_argument("--output", metavar="FILE.pth", type=Path, help="checkpoint that --read writes")
    parser.add_argument("--prompt-len", type=rep.positive_int, default=64, help="tokens of the prompt")
    parser.add_argument("--n-tokens", type=rep.positive_int, help="new tokens (default: up to the context)")
    with rep.script(parser) as args:
        if args.read:
            if args.folder or not args.output:
                raise ValueError("--read FOLDER needs --output FILE.pth, and no other folder")
            rep.check_writable(args.output, (".pth",))
        elif args.output:
            raise ValueError("--output FILE.pth goes with --read FOLDER")
        import safetensors  # noqa: F401  (named first where it is missing)
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.read or args.folder or Path(scratch) / "gptlite"
            if not args.read:
                model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint)
                model = model.to(args.device, args.dtype)
                export_folder(model, VOCABULARY, folder)
            back, vocabulary = import_folder(folder, GPTlite_KVCache)
            if vocabulary != VOCABULARY:
                raise ValueError(f"{folder} has other characters than data/shakespeare.py")
            if args.read:
                model = copy.deepcopy(back).to(args.device, args.dtype)  # what is written stays as it was
            offline = {"local_files_only": True}
            opt = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype, **offline)
            opt = opt.to(args.device).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
            n_bytes = sum(path.stat().st_size for path in folder.iterdir())
        W = model.seqlen
        T = min(args.prompt_len, W - 1)
        n_tokens = args.n_tokens or (8 if args.quick or args.read else W - T)
        n_tokens = min(n_tokens, W - T)  # OPT has no positions beyond the context
        prompt = utils.sample_prompts(valid_data, 1, T).to(args.device)  # [1, T]
        report = rep.Report(args, "export", model, batch_size=1, prompt_len=T, n_tokens=n_tokens)

        text = decode(valid_data[: 2_000 if args.quick else 200_000])
        tokens = tokenizer(text).input_ids
        report.check("the tokenizer encodes as GPTlite does", tokens == encode(text))
        report.check("and decodes to the same text", tokenizer.decode(tokens) == text)
        same = all(torch.equal(v, model.state_dict()[k].cpu()) for k, v in back.state_dict().items())
        if not args.read:
            report.check("the folder read back is the same to the bit", same)
        how = {"max_new_tokens": n_tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        if args.device.type != "mps":  # which has no float64
            exact = generate_kvcache(copy.deepcopy(model).double(), prompt, n_tokens, W)  # [1, T+n]
            theirs = copy.deepcopy(opt).double().generate(prompt, **how)  # [1, T+n]
            report.check("in float64 the same tokens", torch.equal(exact, theirs))
        methods = [
            utils.Method("GPTlite", lambda: generate_kvcache(model, prompt, n_tokens, W), [model]),
            utils.Method("folder, transformers", lambda: opt.generate(prompt, **how), [opt]),
        ]
        results = utils.measure(methods, n_tokens, args.repeats)
        with torch.no_grad():
            logits, _ = model(results["GPTlite"].output[:, :W])  # [1, S, V]
            theirs = opt(results["GPTlite"].output[:, :W]).logits  # [1, S, V]
        difference = utils.largest_difference(theirs, logits)
        tolerance = utils.TOLERANCE[args.dtype]
        report.check(f"the same logits, within {tolerance:.0e}", difference <= tolerance)
        loss = utils.validation_loss(model, valid_data, 4 if args.quick or args.read else 128)
        figures = {"GPTlite": {"valid_loss": loss}}
        report.method_rows(methods, results, prompt, logits[:, T - 1 :], figures=figures)
        report.why(
            f"The folder takes {n_bytes / 1e6:.1f} MB: weights under OPT's names, and "
            f"{(n_bytes - utils.weight_bytes(opt)) / 1e3:.0f} kB that describe model and tokenizer. Logits "
            f"differ by {difference:.1e}: the output bias, which OPT has not, lies in the last layer norm."
        )
        ours, peer = (results[m.name].tpot_ms for m in methods)
        if ours and peer:
            report.why(
                f"transformers takes {peer / ours:.2f} of the time a token on the same weights: the same "
                "products, other code around them. The folder is for engines that serve many: they batch, "
                "page the cache, share prefixes and split the model; one text on one machine gains nothing."
            )
        if args.read:
            state = back.state_dict()
            half = {name: tensor.half() for name, tensor in state.items()}  # as checkpoints are, if exact
            exact = all(torch.equal(half[name].to(tensor), tensor) for name, tensor in state.items())
            utils.write_atomically(args.output, lambda path: torch.save(half if exact else state, path))
            report.why(f"The checkpoint is {args.output}; every script takes it with --checkpoint.")
        elif args.folder:
            report.why(f"Serve it with: vllm serve {args.folder}   (or SGLang; neither was run here)")
        report.finish()
