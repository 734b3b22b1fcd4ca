"""GPTlite over a tree of tokens: several continuations of one text are read in one forward.

A node sees the cached text and its own ancestors, not its siblings, and its position is that of its depth.
So its logits are those that it would have if the way from the root to it had been read alone, and
beginnings that continuations share are read once. Nothing is written meanwhile: keys and values of the
nodes are kept aside, and those of the one path that is accepted are copied behind the text, since they lie
apart from each other.

Exact, up to the order of sums. Wins over reading each continuation by itself. Loses where rows cost as much
as steps, since all nodes but those of one path are read for nothing.

Source: Miao et al., SpecInfer: Accelerating Generative LLM Serving with Tree-based Speculative Inference and
Verification, 2023; Cai et al., Medusa, 2024.
"""

import torch

from gptlite_kvcache import GPTlite_StaticKVCache, scaled_dot_product_attention_kv_cache


class Tree:
    """Which node follows which: depth, int64 [N], and sees, bool [N, N]: each node its ancestors and itself.

    Args: parents: of each node the number of its parent, smaller than its own; 0 for the root, node 0.
    Raises ValueError for parents of another form.
    """

    def __init__(self, parents, device="cpu"):
        if not parents or parents[0] != 0 or any(not 0 <= p < i for i, p in enumerate(parents) if i):
            raise ValueError(f"{parents}: node 0 is the root, and parents come before their children")
        self.parents = list(parents)
        up = torch.tensor(parents, dtype=torch.int64, device=device)  # [N]
        self.sees = torch.eye(len(parents), dtype=torch.bool, device=device)  # [N, N]
        while True:
            longer = self.sees | self.sees[up]  # a node sees what its parent sees
            if torch.equal(longer, self.sees):
                break
            self.sees = longer
        self.depth = self.sees.sum(dim=1) - 1  # [N]


class GPTlite_Tree(GPTlite_StaticKVCache):
    """GPTlite_StaticKVCache that also reads a Tree of tokens behind a cached text. For inference only.

    hidden [B, S, E]: what the head read last, behind the last norm.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden = None
        self.fc_out.register_forward_pre_hook(self.keep)

    def keep(self, _, inputs):
        self.hidden = inputs[0]  # [B, S, E]

    @torch.no_grad()
    def forward(self, x, kv_cache=None, tree=None):
        """Without a tree as GPTlite_StaticKVCache. With one: a token of each node, x [1, N], behind the text.

        Returns: logits [1, N, V]; keys and values of the nodes [L, 2, H, N, D], for keep_path. The cache
        stays as it was. Nodes beyond the context get its last position: no text has room for them.
        """
        if tree is None:
            output = super().forward(x, kv_cache)
            self.hidden = None if kv_cache is None else self.hidden  # such a text does not go on
            return output
        kv_cache.check_fits(self, 1)
        n = kv_cache.length
        positions = (n + tree.depth).clamp(max=self.seqlen - 1)  # [N]
        text = torch.ones(x.shape[1], n, dtype=torch.bool, device=x.device)  # [N, n]
        visible = torch.cat([text, tree.sees], dim=1)  # [N, n + N]
        x, kept = self.token_embedding(x) + self.position_embedding(positions), []  # [1, N, E]
        for layer, block in enumerate(self.blocks):
            mha, h = block.mha, block.ln1(x)  # [1, N, E]
            Q, K, V = (mha.split_heads(f(h)) for f in (mha.query_proj, mha.key_proj, mha.value_proj))
            keys = torch.cat([kv_cache.k[layer, :, :, :n], K], dim=2)  # [1, H, n + N, D]
            values = torch.cat([kv_cache.v[layer, :, :, :n], V], dim=2)  # [1, H, n + N, D]
            out = scaled_dot_product_attention_kv_cache(Q, keys, values, visible)  # [1, H, N, D]
            x = x + mha.out_proj(mha.merge_heads(out))  # [1, N, E]
            x = x + block.ffwd(block.ln2(x))  # [1, N, E]
            kept.append(torch.cat([K, V]))  # [2, H, N, D]
        return self.fc_out(self.ln(x)), torch.stack(kept)


def accepted_path(tokens, tree, best, longest):
    """The longest way from the root on which each token is what the model chose behind its parent.

    Args: tokens, best: of each node its token and the model's choice behind it, lists of N; longest: most
        tokens below the root. Of equal siblings the one whose way goes on further counts.
    Returns: node numbers, the root first.
    """
    depth = [0] * len(tokens)  # -1 where the way breaks off
    for i in range(1, len(tokens)):
        parent = tree.parents[i]
        right = depth[parent] >= 0 and tokens[i] == best[parent] and depth[parent] < longest
        depth[i] = depth[parent] + 1 if right else -1
    path = [depth.index(max(depth))]
    while path[0] != 0:
        path.insert(0, tree.parents[path[0]])
    return path


def keep_path(kv_cache, kept, path):
    """Copies keys and values of the nodes on a path [L, 2, H, N, D] together, behind the cached text."""
    stop = kv_cache.length + len(path)
    rows = kept[:, :, :, path]  # [L, 2, H, S, D]
    kv_cache.k[:, 0, :, kv_cache.length : stop] = rows[:, 0]
    kv_cache.v[:, 0, :, kv_cache.length : stop] = rows[:, 1]
    kv_cache.advance(len(path))
