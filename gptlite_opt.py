"""GPTlite's weights as an OPT model of the transformers library: the same function, other code.

GPTlite and OPT are the same architecture: learned positions, layer norm before each sub-layer, ReLU.
Two details differ. OPT keeps two unused rows in front of its positions, and its head has no bias: the
bias moves into the last layer norm, whose output the head multiplies. Exact up to rounding. Engines want a
token that begins, ends and pads texts; it gets a row of its own, whose logit is -100 after every text.

Source: Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022.
"""

from itertools import chain

import torch
from torch.nn.utils.rnn import pad_sequence

POSITION_OFFSET = 2  # OPT's position p is row p + 2 of its table
SPECIAL_LOGIT = -100.0  # of the special token: beside any character's, exp(-100) is nothing
OUTER_NAMES = {  # GPTlite's name: OPT's
    "token_embedding.weight": "model.decoder.embed_tokens.weight",
    "position_embedding.weight": "model.decoder.embed_positions.weight",
    "ln.weight": "model.decoder.final_layer_norm.weight",
    "ln.bias": "model.decoder.final_layer_norm.bias",
    "fc_out.weight": "lm_head.weight",
}
BLOCK_NAMES = {  # GPTlite's name: OPT's
    "mha.query_proj": "self_attn.q_proj",
    "mha.key_proj": "self_attn.k_proj",
    "mha.value_proj": "self_attn.v_proj",
    "mha.out_proj": "self_attn.out_proj",
    "ln1": "self_attn_layer_norm",
    "ffwd.net.0": "fc1",
    "ffwd.net.2": "fc2",
    "ln2": "final_layer_norm",
}


def fold_output_bias(head_weight, head_bias, norm_bias):
    """Bias of the last layer norm that makes the head's own bias unnecessary.

    Args: head_weight [V, E], head_bias [V], norm_bias [E].
    Returns: [E], such that head_weight @ result = head_weight @ norm_bias + head_bias, by least squares
        in float64. It exists where V <= E and the rows of head_weight are independent.
    Raises: ValueError where it does not exist.
    """
    weight, bias = head_weight.detach().cpu().double(), head_bias.detach().cpu().double()  # not on mps
    shift = torch.linalg.lstsq(weight, bias[:, None], driver="gelsd").solution[:, 0]  # [E]
    if not torch.allclose(weight @ shift, bias, atol=1e-6):
        raise ValueError(f"no layer norm bias replaces the output bias of a head {list(weight.shape)}")
    return norm_bias.detach().cpu().double() + shift  # [E]


def n_rows(n_tokens):
    """Rows of embedding and head for so many tokens: engines that read OPT expect a multiple of 8."""
    return -(-n_tokens // 8) * 8


def special_row(norm_weight):
    """Head row [E] of a token that no text has: after every text the same logit, which a bias can lower.

    A layer norm gives weight * x + bias, where the entries of x sum to zero: divided by the weight, so does
    the row's product with the first term. Raises ValueError where that overflows the type.
    """
    row = (-SPECIAL_LOGIT / norm_weight.detach().cpu().double()).to(norm_weight.dtype)  # [E]
    if not row.isfinite().all():
        raise ValueError("a weight of the last layer norm is too small for the row of a special token")
    return row.to(norm_weight.device)


def folded_head(head_weight, head_bias, norm_weight, norm_bias, special=False):
    """The head without a bias, and the bias of the norm before it.

    Returns: rows [V, E], with special further ones for the special token, and [E] in float64.
    """
    if special:
        n_more = n_rows(len(head_weight) + 1) - len(head_weight)
        row = special_row(norm_weight)  # [E]
        missing = SPECIAL_LOGIT - row.double() @ norm_bias.to(row).double()
        head_weight = torch.cat([head_weight, row.to(head_weight).expand(n_more, -1)])  # [V+more, E]
        head_bias = torch.cat([head_bias.double(), missing.to(head_bias.device).expand(n_more)])  # [V+more]
    return head_weight, fold_output_bias(head_weight, head_bias, norm_bias)


def opt_state_dict(model, special=False):
    """The state dictionary that OPTForCausalLM expects, from a GPTlite; special: with a token more."""
    state = {}
    for layer, block in enumerate(model.blocks):
        for ours, theirs in BLOCK_NAMES.items():
            for kind, tensor in block.get_submodule(ours).state_dict().items():
                state[f"model.decoder.layers.{layer}.{theirs}.{kind}"] = tensor
    positions, tokens, norm = model.position_embedding.weight, model.token_embedding.weight, model.ln
    unused = positions.new_zeros(POSITION_OFFSET, positions.shape[1])
    state[OUTER_NAMES["position_embedding.weight"]] = torch.cat([unused, positions])  # [T+2, E]
    state[OUTER_NAMES["ln.weight"]] = norm.weight  # [E]
    head = model.fc_out.state_dict()
    head, bias = folded_head(head["weight"], head["bias"], norm.weight, norm.bias, special)
    state[OUTER_NAMES["fc_out.weight"]] = head  # [V, E]
    more = tokens.new_zeros(len(head) - len(tokens), tokens.shape[1])
    state[OUTER_NAMES["token_embedding.weight"]] = torch.cat([tokens, more])  # [V, E]
    state[OUTER_NAMES["ln.bias"]] = bias.to(norm.bias)  # [E]
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def gptlite_state_dict(opt_state, n_layers, d_model, seqlen, vocab_size, n_special=0):
    """The way back: GPTlite's weights from OPT's, without the rows of n_special special tokens.

    The output bias is zero, since OPT has none: it stays in the last norm. Raises ValueError for a tensor
    that is missing, one too many, or embeddings of another size.
    """
    if "lm_head.weight" not in opt_state and OUTER_NAMES["token_embedding.weight"] in opt_state:
        opt_state = opt_state | {"lm_head.weight": opt_state[OUTER_NAMES["token_embedding.weight"]]}  # tied
    inner = (
        (f"blocks.{layer}.{ours}.{kind}", f"model.decoder.layers.{layer}.{theirs}.{kind}")
        for layer in range(n_layers)
        for ours, theirs in BLOCK_NAMES.items()
        for kind in ("weight", "bias")
    )
    state = {}
    for ours, theirs in chain(OUTER_NAMES.items(), inner):  # found all before a model of this size is made
        if theirs not in opt_state:
            raise ValueError(f"it lacks {theirs}")
        state[ours] = opt_state[theirs]
    if len(opt_state) > len(state):
        raise ValueError(f"it holds {len(opt_state)} tensors, not {len(state)}")
    n_tokens, n_positions = vocab_size + n_special, seqlen + POSITION_OFFSET
    rows = dict.fromkeys(("token_embedding.weight", "fc_out.weight"), {n_tokens, n_rows(n_tokens)})
    for name, allowed in (rows | {"position_embedding.weight": {n_positions}}).items():
        shape = list(state[name].shape)
        if shape not in [[n, d_model] for n in allowed]:
            raise ValueError(f"{OUTER_NAMES[name]} is {shape}, not {[max(allowed), d_model]}")
    state["position_embedding.weight"] = state["position_embedding.weight"][POSITION_OFFSET:]  # [T, E]
    for name in ("token_embedding.weight", "fc_out.weight"):
        state[name] = state[name][:vocab_size]  # [V, E]
    state["fc_out.bias"] = state["fc_out.weight"].new_zeros(vocab_size)  # [V]
    return state


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
    wanted = {"model_type": "opt", "do_layer_norm_before": True, "activation_function": "relu"}
    wanted |= {"word_embed_proj_dim": width, "ffn_dim": 4 * width}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]}, not {value}")
    return n_layers, width, n_heads, seqlen


def opt_from_gptlite(model, special=False):
    """An OPTForCausalLM in evaluation mode that computes what the GPTlite computes, same type, same device.

    special: with one more token than GPTlite has, which begins, ends and pads texts and is never chosen.
    Raises: ModuleNotFoundError where transformers is not installed, ValueError for a model with pruned heads,
        neurons of some blocks only, or norms of another kind: OPT has no place for them.
    """
    from transformers import OPTConfig, OPTForCausalLM

    vocab_size, d_model = model.token_embedding.weight.shape
    norms = [model.ln, *(norm for block in model.blocks for norm in (block.ln1, block.ln2))]
    if any(type(norm) is not torch.nn.LayerNorm for norm in norms):
        raise ValueError("OPT has plain layer norms, this model has others")
    if any(block.mha.out_proj.in_features != d_model for block in model.blocks):
        raise ValueError("OPT's heads are as wide as the model, this one has heads pruned")
    if len({block.ffwd.net[0].out_features for block in model.blocks}) > 1:
        raise ValueError("OPT has as many neurons in every block, this model has not")
    config = OPTConfig(
        vocab_size=n_rows(vocab_size + 1) if special else vocab_size,
        hidden_size=d_model,
        word_embed_proj_dim=d_model,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].mha.n_heads,
        ffn_dim=model.blocks[0].ffwd.net[0].out_features,
        max_position_embeddings=model.seqlen,
        do_layer_norm_before=True,
        activation_function="relu",
        dropout=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), vocab_size if special else None),
    )
    opt = OPTForCausalLM(config).to(model.fc_out.weight)
    opt.load_state_dict(opt_state_dict(model, special))
    opt.seqlen = model.seqlen  # the context, under the name that this collection's models have for it
    return opt.eval()


def generate_opt(model, prompt, n_tokens, options=None):
    """transformers' greedy generate in the form of this collection: prompt and new tokens [B, T + n_tokens].

    options: further arguments of OPTForCausalLM.generate.
    """
    settings = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings | (options or {}))


def generate_opt_padded(model, requests, batch_size, seqlen=None):
    """transformers' greedy generate on groups of requests, padded on the left: static batching in other code.

    Its own continuous batching does not run OPT (transformers 5.24). Args: as in static_batching, which see
    for what comes back; seqlen is not used: prompt and answer must fit the context.
    """
    outputs, n_steps = [], 0
    for start in range(0, len(requests), batch_size):
        group = requests[start : start + batch_size]
        n_new, prompts = max(n for _, n in group), [prompt for prompt, _ in group]
        tokens = pad_sequence(prompts, True, 0, "left")  # [B, T]
        seen = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, 0, "left")  # [B, T]
        options = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False, "pad_token_id": 0}
        rows, T = model.generate(tokens, attention_mask=seen, **options), tokens.shape[1]  # [B, T + n]
        outputs += [row[T - len(q) : T + n] for row, (q, n) in zip(rows, group, strict=True)]
        n_steps += n_new
    return outputs, n_steps
