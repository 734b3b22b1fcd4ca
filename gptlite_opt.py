"""GPTlite's weights as an OPT model of the transformers library: the same function, other code.

GPTlite and OPT are the same architecture: learned positions, layer norm before each sub-layer, ReLU.
Two details differ. OPT keeps two unused rows in front of its positions, and its head has no bias: the
bias moves into the last layer norm, whose output the head multiplies. Exact up to rounding.

Source: Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022.
"""

import torch
from torch.nn.utils.rnn import pad_sequence

POSITION_OFFSET = 2  # OPT's position p is row p + 2 of its table
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


def opt_state_dict(model):
    """The state dictionary that OPTForCausalLM expects, from a GPTlite."""
    state = {}
    for layer, block in enumerate(model.blocks):
        for ours, theirs in BLOCK_NAMES.items():
            for kind, tensor in block.get_submodule(ours).state_dict().items():
                state[f"model.decoder.layers.{layer}.{theirs}.{kind}"] = tensor
    positions = model.position_embedding.weight  # [T, E]
    unused = positions.new_zeros(POSITION_OFFSET, positions.shape[1])
    state["model.decoder.embed_positions.weight"] = torch.cat([unused, positions])  # [T+2, E]
    state["model.decoder.embed_tokens.weight"] = model.token_embedding.weight  # [V, E]
    state["model.decoder.final_layer_norm.weight"] = model.ln.weight  # [E]
    folded = fold_output_bias(model.fc_out.weight, model.fc_out.bias, model.ln.bias)
    state["model.decoder.final_layer_norm.bias"] = folded.to(model.ln.bias)  # [E]
    state["lm_head.weight"] = model.fc_out.weight  # [V, E]
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def opt_from_gptlite(model):
    """An OPTForCausalLM in evaluation mode that computes what the GPTlite computes, same type, same device.

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
        vocab_size=vocab_size,
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
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    opt = OPTForCausalLM(config).to(model.fc_out.weight)
    opt.load_state_dict(opt_state_dict(model))
    return opt.eval()


def generate_opt(model, prompt, n_tokens, options=None):
    """transformers' greedy generate in the form of this collection: prompt and new tokens [B, T + n_tokens].

    options: further arguments of OPTForCausalLM.generate.
    """
    how = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **how | (options or {}))


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
