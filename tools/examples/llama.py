"""A Llama with the names of Hugging Face's, as a rank of tensor and pipeline parallelism has it. fp32, any device."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
          "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


class CopyToGroup(torch.autograd.Function):
    """What enters tensor-parallel weights: the same on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverGroup(torch.autograd.Function):
    """What leaves them: a part on each rank; the whole is the sum."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Tensor:
    """The tensor-parallel group: this rank and how many there are."""

    def __init__(self, rank=0, size=1, group=None):
        self.rank, self.size, self.group = rank, size, group

    def enter(self, x):
        return x if self.size == 1 else CopyToGroup.apply(x, self.group)

    def leave(self, x):
        return x if self.size == 1 else SumOverGroup.apply(x, self.group)

    def greatest(self, x):
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, config, tp):
        super().__init__()
        self.tp, hidden = tp, config["hidden_size"]
        self.heads = config["num_attention_heads"] // tp.size
        self.width = hidden // config["num_attention_heads"]
        self.theta = config["rope_theta"]
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, linear(hidden, self.heads * self.width))
        self.o_proj = linear(self.heads * self.width, hidden)

    def rotate(self, x):
        half = self.width // 2
        angle = torch.arange(x.shape[-2])[:, None] * self.theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def forward(self, x):
        x = self.tp.enter(x)
        q, k, v = (part(x).unflatten(-1, (self.heads, self.width)).transpose(-2, -3)
                   for part in (self.q_proj, self.k_proj, self.v_proj))
        score = self.rotate(q) @ self.rotate(k).transpose(-1, -2) / self.width ** 0.5
        later = torch.ones(score.shape[-2:], dtype=torch.bool).triu(1)
        mixed = score.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.tp.leave(self.o_proj(mixed.transpose(-2, -3).flatten(-2)))


class Mlp(nn.Module):
    def __init__(self, config, tp):
        super().__init__()
        self.tp, hidden, inner = tp, config["hidden_size"], config["intermediate_size"] // tp.size
        self.gate_proj, self.up_proj, self.down_proj = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)

    def forward(self, x):
        x = self.tp.enter(x)
        return self.tp.leave(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config, tp):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.self_attn, self.mlp = Attention(config, tp), Mlp(config, tp)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    """Rows of the vocabulary on each rank."""

    def __init__(self, config, tp):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.randn(config["vocab_size"] // tp.size, config["hidden_size"]) * 0.02)

    def forward(self, tokens):
        rows = self.weight.shape[0]
        mine = tokens - self.tp.rank * rows
        here = (mine >= 0) & (mine < rows)
        return self.tp.leave(F.embedding(mine.clamp(0, rows - 1), self.weight) * here[..., None])


class Llama(nn.Module):
    """Layers `begin` to `end`; the first stage has the embedding, the last one the norm and the head."""

    def __init__(self, config=None, tp=None, stage=0, stages=1):
        super().__init__()
        config, self.tp = config or CONFIG, tp or Tensor()
        layers = config["num_hidden_layers"]
        self.first, self.last = stage == 0, stage == stages - 1
        self.model = nn.Module()
        if self.first:
            self.model.embed_tokens = Embedding(config, self.tp)
        here = range(stage * layers // stages, (stage + 1) * layers // stages)
        self.model.layers = nn.ModuleDict({str(number): Layer(config, self.tp) for number in here})
        if self.last:
            self.model.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
            self.lm_head = linear(config["hidden_size"], config["vocab_size"] // self.tp.size)

    def forward(self, x, targets=None):
        """Of tokens or the stage before: what goes to the stage behind, or, on the last stage, the mean loss."""
        if self.first:
            x = self.model.embed_tokens(x)
        for layer in self.model.layers.values():
            x = layer(x)
        return self.loss(self.model.norm(x), targets) if self.last else x

    def loss(self, x, targets):
        """Cross entropy over a vocabulary of which each rank has a part."""
        score = self.lm_head(self.tp.enter(x))
        score = score - self.tp.greatest(score.detach().amax(-1))[..., None]
        total = self.tp.leave(score.exp().sum(-1))
        rows = score.shape[-1]
        mine = targets - self.tp.rank * rows
        here = (mine >= 0) & (mine < rows)
        found = score.gather(-1, mine.clamp(0, rows - 1)[..., None])[..., 0]
        return (total.log() - self.tp.leave(found * here)).mean()
