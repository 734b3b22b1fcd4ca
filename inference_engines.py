"""GPTlite in other people's engines, as rows beside ours: the same weights, prompts and tokens.

An engine is timed from outside as a whole: tokens/s, and no times of its steps. Optional: `pip install
ctranslate2` adds its rows to --peers.

Source: OpenNMT, CTranslate2 (an engine for transformers in C++), 2019.
"""

import tempfile
from importlib.util import find_spec

import torch
from torch import nn

from gptlite_opt import BLOCK_NAMES, OUTER_NAMES, POSITION_OFFSET, opt_state_dict
from inference_report import Method
from inference_utils import n_parameters


def engine_methods(args, model):
    """A Method for each engine that is installed and runs GPTlite as it is: on the CPU, in float32.

    Args: args: of harness.options; model: GPTlite with ordinary linear layers. What an engine allocates is
        not PyTorch's, and its steps are its own: peak memory and times of tokens are not known.
    """
    if args.device.type != "cpu" or args.dtype != torch.float32 or find_spec("ctranslate2") is None:
        return []
    engine = CTranslate2(model, torch.get_num_threads())
    known = dict.fromkeys(("peak_memory_mb", "ttft_ms", "tpot_ms", "tpot_p99_ms", "forward_tokens"))
    known |= {"n_parameters": n_parameters(model), "peer": True}
    return [Method("CTranslate2", generate_ctranslate2, engine, loss=False, **known)]


def ctranslate2_spec(model):
    """GPTlite's weights as CTranslate2 wants them, with a token more than it has that is never chosen."""
    from ctranslate2.specs import Activation, TransformerDecoderModelSpec

    state = {name: tensor.float().cpu().numpy() for name, tensor in opt_state_dict(model, True).items()}
    n_layers, n_heads = len(model.blocks), model.blocks[0].mha.n_heads
    spec = TransformerDecoderModelSpec.from_config(n_layers, n_heads, True, Activation.RELU)
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = state[OUTER_NAMES["token_embedding.weight"]]  # [V, E]
    positions = state[OUTER_NAMES["position_embedding.weight"]][POSITION_OFFSET:]  # [T, E]
    decoder.position_encodings.encodings = positions
    decoder.layer_norm.gamma, decoder.layer_norm.beta = (
        state[OUTER_NAMES[f"ln.{kind}"]] for kind in ("weight", "bias")
    )
    decoder.projection.weight = state[OUTER_NAMES["fc_out.weight"]]  # [V, E]
    for i, layer in enumerate(decoder.layer):

        def of(ours, kind, i=i):
            return torch.from_numpy(state[f"model.decoder.layers.{i}.{BLOCK_NAMES[ours]}.{kind}"])

        attention, ffn = layer.self_attention, layer.ffn
        for norm, ours in ((attention.layer_norm, "ln1"), (ffn.layer_norm, "ln2")):
            norm.gamma, norm.beta = of(ours, "weight").numpy(), of(ours, "bias").numpy()
        parts = {attention.linear[0]: ["mha.query_proj", "mha.key_proj", "mha.value_proj"]}  # one product
        parts |= {
            attention.linear[1]: ["mha.out_proj"],
            ffn.linear_0: ["ffwd.net.0"],
            ffn.linear_1: ["ffwd.net.2"],
        }
        for linear, names in parts.items():
            linear.weight = torch.cat([of(name, "weight") for name in names]).numpy()
            linear.bias = torch.cat([of(name, "bias") for name in names]).numpy()
    names = [str(token) for token in range(len(decoder.embeddings.weight))]
    spec.register_vocabulary(names)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = names[-1]
    spec.validate()
    spec.optimize()
    return spec


class CTranslate2(nn.Module):
    """GPTlite in CTranslate2, in float32 on the CPU: generate(prompts, n_tokens), greedy.

    forward() computes nothing: the harness's clock begins when it is called. Steps are not told: the engine
    has a callback for each token, but a process in which one was used may end with an abort (4.8.5).
    Args: n_threads: of the engine.
    """

    def __init__(self, model, n_threads):
        super().__init__()
        import ctranslate2

        self.seqlen, self.none = model.seqlen, nn.Parameter(torch.zeros(0), requires_grad=False)
        with tempfile.TemporaryDirectory() as folder:
            ctranslate2_spec(model).save(folder)
            self.engine = ctranslate2.Generator(folder, compute_type="float32", intra_threads=n_threads)

    def forward(self, tokens):
        return tokens

    def generate(self, prompts, n_tokens):
        """Token ids [B, T] -> prompt and new tokens [B, T + n_tokens]."""
        texts = [[str(token) for token in row] for row in prompts.tolist()]
        lengths = {"min_length": n_tokens, "max_length": n_tokens, "max_batch_size": len(prompts)}
        self(prompts)
        results = self.engine.generate_batch(texts, include_prompt_in_result=False, **lengths)
        new = prompts.new_tensor([result.sequences_ids[0] for result in results])  # [B, n]
        return torch.cat([prompts, new], dim=1)


def generate_ctranslate2(engine, prompts, n_tokens, seqlen=None):
    """In the form of this collection's generate functions; prompt and answer must fit the context."""
    return engine.generate(prompts, n_tokens)
