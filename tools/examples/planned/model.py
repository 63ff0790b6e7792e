"""A small Llama as techniques are told of a model: tools/planner/library/techniques/trial.py."""
import torch
from torch import nn

HEADS = 4
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "tie_word_embeddings": False}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.input_layernorm = nn.RMSNorm(32)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.self_attn, name, nn.Linear(32, 32, bias=False))
        self.post_attention_layernorm = nn.RMSNorm(32)
        for name, inputs, outputs in (("gate_proj", 32, 64), ("up_proj", 32, 64), ("down_proj", 64, 32)):
            setattr(self.mlp, name, nn.Linear(inputs, outputs, bias=False))

    def forward(self, x):
        y = self.input_layernorm(x)
        q, k, v = (getattr(self.self_attn, n)(y).unflatten(-1, (-1, 8)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj"))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.self_attn.o_proj(y.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(nn.functional.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(64, 32)
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))
        self.model.norm = nn.RMSNorm(32)
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, x):
        for layer in layers(self):
            x = layer(x)
        return x


def layers(model):
    return [model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head]


def model():
    return Model()


def batch(size):
    tokens = torch.randint(64, (size, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def samples(values):
    tokens = torch.tensor([one["tokens"] for one in values])
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)
