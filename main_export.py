"""GPTlite as a Hugging Face model folder, and back: the way out to production engines.

Idea: GPTlite is OPT's architecture, so a folder with its weights under OPT's names, a configuration and a
tokenizer of single characters is all that other engines need to serve it. They also want a token that begins,
ends and pads texts: U+2404, which follows the characters and is never chosen.

Exact up to the rounding of one vector (OPT's head has no bias; it moves into the last layer norm); the way
back is exact to the bit. Wins where many are served: engines batch, page the cache, share prefixes and split
the model. Loses where they change the type (vLLM makes bfloat16 of float32 unless told not to, which gives
other texts), and for chats: there is no template, the folder continues texts. An unknown character becomes a
question mark.

Run: python main_export.py FOLDER              writes the folder; without one it only checks
     python main_export.py --read FOLDER --output FILE.pth      makes a checkpoint from such a folder

Source: Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch

from gptlite import GPTlite
from gptlite_opt import architecture, folded_head, gptlite_state_dict, opt_from_gptlite
from inference_utils import load_weights

BIASES = ("ln.bias", "fc_out.bias")  # of GPTlite; OPT holds their sum, as seen by the head
SPECIAL = "\u2404"  # begins, ends and pads a text, and stands for what is unknown
COMMANDS = {  # what loads the folder, and the version that did
    "transformers 5.24": "AutoModelForCausalLM.from_pretrained('{0}'), AutoTokenizer.from_pretrained('{0}')",
    "CTranslate2 4.8.5": "ct2-transformers-converter --model '{0}' --output_dir '{0}-ct2'",
    "vLLM (not run here)": "vllm serve '{0}' --dtype float32",
}


def character_tokenizer(vocabulary):
    """A tokenizer of the `tokenizers` library whose token i is the character vocabulary[i].

    It is byte-pair encoding without any pair to join. Encoding and decoding give back every text of these
    characters; any other character becomes a question mark. The token after them is SPECIAL.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    token_of = {character: token for token, character in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=token_of, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()  # joins the characters without spaces between
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
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
    opt = opt_from_gptlite(model, special=True)
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
            "model_input_names": ["input_ids", "attention_mask"],  # OPT takes no others
            "model_max_length": model.seqlen,
            "padding_side": "left",  # the last column must be each text's last token
        }
        settings |= {f"{role}_token": SPECIAL for role in ("bos", "eos", "unk", "pad")}
        (part / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def written_biases(state, kept, special):
    """Both biases as export_folder wrote them; {} where the weights are no longer those it wrote.

    Args: state: GPTlite's weights, the output bias in the last layer norm; kept: header of the file;
        special: whether the folder has the special token.
    """
    try:
        biases = {n: torch.tensor(json.loads(kept[n]), dtype=torch.float64).to(state[n]) for n in BIASES}
        if any(biases[n].shape != state[n].shape for n in BIASES):
            return {}
        head, norm = state["fc_out.weight"], state["ln.weight"]
        _, folded = folded_head(head, biases["fc_out.bias"], norm, biases["ln.bias"], special)  # [E]
    except (KeyError, TypeError, ValueError, RuntimeError):  # none, or another program's
        return {}
    rounding = 4 * torch.finfo(norm.dtype).eps * folded.abs().max()
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
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    weights = folder / "model.safetensors"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        characters, added = tokenizer["model"]["vocab"], [t["id"] for t in tokenizer["added_tokens"]]
        if not weights.is_file():
            raise FileNotFoundError(2, "No such file or directory", str(weights))
        with safe_open(weights, framework="pt") as file:
            opt = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
            kept = file.metadata() or {}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder} does not hold a whole model folder: {error!r}") from error
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged: {error}") from error
    try:
        n_layers, width, n_heads, seqlen = architecture(config)
    except ValueError as error:
        raise ValueError(f"{folder} is not GPTlite's architecture: {error}") from error
    single = isinstance(characters, dict) and len(characters) > 0
    single = single and all(len(c) == 1 and type(token) is int for c, token in characters.items())
    if not single or [*sorted(characters.values()), *added] != list(range(len(characters) + len(added))):
        raise ValueError(f"{folder}: GPTlite's tokens are single characters, this tokenizer has others")
    vocabulary = "".join(sorted(characters, key=characters.get))
    for name, tensor in opt.items():
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{weights}: {name} is {tensor.dtype}; export the model unquantised")
        if not tensor.isfinite().all():
            raise ValueError(f"{weights} is damaged: {name} holds NaN or infinity")
    try:
        state = gptlite_state_dict(opt, n_layers, width, seqlen, len(vocabulary), len(added))
    except ValueError as error:
        raise ValueError(f"{weights} does not fit its folder: {error}") from error
    model = model_class(len(vocabulary), width, n_heads, width // n_heads, n_layers, 0.0, seqlen)
    load_weights(model.to(state["fc_out.weight"].dtype), state, str(weights))
    model.load_state_dict(written_biases(state, kept, len(added) > 0), strict=False)
    return model.eval(), vocabulary


if __name__ == "__main__":
    import copy

    import inference_report as harness
    import inference_words as words
    from data.shakespeare import VOCABULARY
    from gptlite_kvcache import GPTlite_KVCache
    from gptlite_opt import generate_opt
    from inference_report import Method
    from inference_utils import write_atomically
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    parser = harness.options(__doc__, plot=False, prompt_len=64, n_tokens=192, quick={"n_tokens": 8})
    parser.add_argument("folder", nargs="?", type=Path, help="folder to write; must not exist yet")
    parser.add_argument("--read", metavar="FOLDER", type=Path, help="read this folder instead of writing one")
    parser.add_argument("--output", metavar="FILE.pth", type=Path, help="checkpoint that --read writes")
    with harness.script(parser) as args:
        if args.read and (args.folder or not args.output) or args.output and not args.read:
            raise ValueError("--read FOLDER and --output FILE.pth go together, and with no other folder")
        if args.output:
            harness.check_writable(args.output, (".pth",))
        import safetensors  # noqa: F401 (named first where it is missing)
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        text = harness.load_text(args)
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.read or args.folder or Path(scratch) / "gptlite"
            if not args.read:
                (original,) = harness.load_models(args, GPTlite, packed=False)
                export_folder(original, VOCABULARY, folder)
            back, vocabulary = import_folder(folder, GPTlite_KVCache)
            if vocabulary != VOCABULARY:
                raise ValueError(f"{folder} has other characters than data/shakespeare.py")
            if args.read and "dtype" not in args.given:
                args.dtype = back.ln.bias.dtype
            opt = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        state, V = back.state_dict(), len(vocabulary)
        model = pack_linears(copy.deepcopy(back).to(args.device, args.dtype))
        opt, opt.seqlen = pack_linears(opt.to(args.device).eval()), model.seqlen
        T = min(args.prompt_len, model.seqlen - 1)
        n_tokens = min(args.n_tokens, model.seqlen - T)  # OPT has no positions beyond the context
        prompt = text.prompts(1, T)  # [1, T]
        report = harness.Report(args, "export", model, text=text, prompt_len=T, n_tokens=n_tokens)
        if not args.read:
            same = all(torch.equal(state[name], one.cpu()) for name, one in original.state_dict().items())
            report.check("the folder read back is the same to the bit", same)
        rows = report.compare(
            prompt,
            n_tokens,
            Method("GPTlite", generate_kvcache, model),
            Method("transformers", generate_opt, opt, None),
            label="",
        )
        tokens = report.measured["GPTlite"].output[:, : model.seqlen]  # [1, S]
        with torch.no_grad():
            theirs, ours = opt(tokens).logits[..., :V], model(tokens)[0]  # [1, S, V]
        report.check_close("logits", theirs, ours)
        ids = text.valid[:20_000].tolist()
        same = tokenizer(text.decode(ids)).input_ids == ids and tokenizer.decode(ids) == text.decode(ids)
        report.check("the tokenizer encodes and decodes as GPTlite does", same)
        if args.dtype == torch.float32 and args.device.type != "mps":  # which has no float64
            texts = [text.decode(prompt[0, -n:]) for n in (1, (T + 1) // 2, T)]
            batch = tokenizer(texts, return_tensors="pt", padding=True).to(args.device)
            served = opt.double().generate(**batch, max_new_tokens=n_tokens, do_sample=False)  # [3, T+n]
            alone = [generate_kvcache(model.double(), text.prompt(t), n_tokens, model.seqlen) for t in texts]
            same = all(a[0, -n_tokens:].equal(b[-n_tokens:]) for a, b in zip(alone, served, strict=True))
            report.check("in float64 the same tokens, in a padded batch of three lengths", same)
        if args.output:
            half = {name: tensor.half() for name, tensor in state.items()}  # as checkpoints are, if exact
            exact = all(torch.equal(half[name].to(tensor), tensor) for name, tensor in state.items())
            write_atomically(args.output, lambda path: torch.save(half if exact else state, path))
        for name, command in COMMANDS.items() if args.folder else ():
            print(f"{name}: {command.format(args.folder)}")
        report.why(words.compare(rows["transformers"], rows["GPTlite"]) + words.loss(rows["transformers"]))
        report.finish()
