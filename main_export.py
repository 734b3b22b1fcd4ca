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
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from gptlite import GPTlite
from gptlite_opt import BLOCK_NAMES, POSITION_OFFSET, fold_output_bias, opt_from_gptlite

BIASES = ("ln.bias", "fc_out.bias")  # of GPTlite; OPT holds their sum, as seen by the head


def character_tokenizer(vocabulary):
    """A tokenizer of the `tokenizers` library whose token i is the character vocabulary[i].

    It is byte-pair encoding without any pair to join. Encoding and decoding give back every text of these
    characters; any other character becomes a question mark.
    """
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
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; give a new name")
    if len(vocabulary) != model.token_embedding.num_embeddings:
        n_tokens = model.token_embedding.num_embeddings
        raise ValueError(f"{len(vocabulary)} characters do not name the {n_tokens} tokens of this model")
    opt = opt_from_gptlite(model)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()  # one level only: a mistyped path is an error, not a new tree
    try:
        opt.config.architectures = ["OPTForCausalLM"]
        opt.config.dtype = opt.dtype
        opt.config.save_pretrained(part)
        opt.generation_config.save_pretrained(part)
        # the two biases in front of their sum, as text in the header: other readers pass over it
        state = model.state_dict()
        biases = {name: json.dumps(state[name].double().tolist()) for name in BIASES}
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


def import_folder(folder, model_class=GPTlite):
    """Reads a GPTlite from a folder with an OPT model of its architecture.

    Args: model_class: GPTlite or a variant with the same weights.
    Returns: (model in evaluation mode, in the folder's type; vocabulary, a string). What export_folder
        wrote comes back to the bit; weights that others have changed come back with the output bias in the
        last layer norm.
    Raises: ValueError for another architecture or a tokenizer of more than characters; OSError for a
        missing or damaged file.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        characters = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise FileNotFoundError(2, "No such file or directory", str(weights))
        with safe_open(weights, framework="pt") as file:
            opt = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
            kept = file.metadata() or {}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not hold a whole model folder: {error!r}") from error
    except Exception as error:  # safetensors has an exception of its own for a damaged file
        if isinstance(error, OSError):
            raise
        raise ValueError(f"{weights} is damaged: {error}") from error
    width = config.get("hidden_size")
    wanted = {
        "model_type": "opt",
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width if width else None,
    }
    for key, value in wanted.items():
        if config.get(key, value) != value or value is None:
            raise ValueError(
                f"{folder} is not GPTlite's architecture: {key} is {config.get(key)}, not {value}"
            )
    vocabulary = "".join(sorted(characters, key=characters.get))
    if sorted(characters.values()) != list(range(len(vocabulary))):
        raise ValueError(f"{folder}: GPTlite's tokens are single characters, this tokenizer has others")
    n_heads, seqlen = config["num_attention_heads"], config["max_position_embeddings"]
    n_layers, d_head = config["num_hidden_layers"], width // n_heads
    model = model_class(len(vocabulary), width, n_heads, d_head, n_layers, 0.0, seqlen)
    prefix = "model.decoder."
    state = {
        "token_embedding.weight": opt[prefix + "embed_tokens.weight"],
        "position_embedding.weight": opt[prefix + "embed_positions.weight"][POSITION_OFFSET:],
        "ln.weight": opt[prefix + "final_layer_norm.weight"],
        "ln.bias": opt[prefix + "final_layer_norm.bias"],
        "fc_out.weight": opt.get("lm_head.weight", opt[prefix + "embed_tokens.weight"]),
    }
    state["fc_out.bias"] = torch.zeros_like(state["fc_out.weight"][:, 0])
    for layer in range(n_layers):
        for ours, theirs in BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                state[f"blocks.{layer}.{ours}.{kind}"] = opt[f"{prefix}layers.{layer}.{theirs}.{kind}"]
    if all(name in kept for name in BIASES):
        biases = {
            name: torch.tensor(json.loads(kept[name]), dtype=torch.float64).to(state[name]) for name in BIASES
        }
        folded = fold_output_bias(state["fc_out.weight"], biases["fc_out.bias"], biases["ln.bias"])  # [E]
        rounding = 4 * torch.finfo(state["ln.bias"].dtype).eps * folded.abs().max()
        if (folded - state["ln.bias"].double()).abs().max() <= rounding:  # still the weights as written
            state |= biases
    model.to(state["fc_out.weight"].dtype).load_state_dict(state)
    return model.eval(), vocabulary


if __name__ == "__main__":
    import tempfile

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import VOCABULARY, decode, encode, get_shakespeare_data
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache

    parser = rep.options(__doc__)
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
                model = back.to(args.device, args.dtype)
            offline = {"local_files_only": True}
            opt = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype, **offline)
            opt = opt.to(args.device).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
            n_bytes = sum(path.stat().st_size for path in folder.iterdir())
        W = model.seqlen
        T = min(args.prompt_len, W - 1)
        n_tokens = args.n_tokens or (8 if args.quick else W - T)
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
        loss = utils.validation_loss(model, valid_data, 4 if args.quick else 128)
        figures = {"GPTlite": {"valid_loss": loss}}
        report.method_rows(methods, results, prompt, logits[:, T - 1 :], figures=figures)
        report.why(
            f"The folder takes {n_bytes / 1e6:.1f} MB: {utils.weight_bytes(opt) / 1e6:.1f} MB of weights "
            "under OPT's names, its configuration and a tokenizer of characters. Logits differ by "
            f"{difference:.1e}: the output bias, which OPT has not, lies in the last layer norm."
        )
        ours, peer = (results[m.name].tpot_ms for m in methods)
        if ours and peer:
            report.why(
                f"transformers takes {peer / ours:.2f} of the time a token on the same weights: the same "
                "products, other code around them. The folder is for engines that serve many: they batch, "
                "page the cache, share prefixes and split the model; one text on one machine gains nothing."
            )
        if args.read:
            utils.write_atomically(args.output, lambda path: torch.save(back.state_dict(), path))
            report.why(f"The checkpoint is {args.output}; every script takes it with --checkpoint.")
        elif args.folder:
            report.why(f"Serve it with: vllm serve {args.folder}   (or SGLang; neither was run here)")
        report.finish()
