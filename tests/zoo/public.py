"""Public modules rewritten as their authors write them, tiny, with their names of attributes.

None of them was made for `lightning_hybrid`. Each class says whose it is and what is peculiar about it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch.demos import Transformer
from lightning.pytorch.demos.lstm import SimpleLSTM
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.basic import Example

VOCABULARY = 19
CLASSES = 5


# -- data --------------------------------------------------------------------------------------------------------------


class Text(Example):
    """Tokens, and the tokens one further."""

    length = 6

    def sample(self, index: int, generator: torch.Generator) -> Any:
        tokens = torch.randint(1, VOCABULARY, (self.length + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


class Images(Example):
    """Small images with labels."""

    size = 16
    channels = 3

    def sample(self, index: int, generator: torch.Generator) -> Any:
        shape = (self.channels, self.size, self.size)
        image = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return image, int(torch.randint(CLASSES, [], generator=generator))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)


class WithoutAdam(Example):
    """SGD: Adam makes a step of what rounding leaves of zero.

    Biases before a normalisation have no influence, nor have those of an attention's keys. Batches of 12, in
    microbatches of 6: with few samples a normalisation is nearly a sign, and multiplies rounding.
    """

    batch_per_step = 12

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


# -- language models ---------------------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, bias: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, n_embd: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int, bias: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, bias=bias)
        self.attn = CausalSelfAttention(n_embd, n_head, bias)
        self.ln_2 = nn.LayerNorm(n_embd, bias=bias)
        self.mlp = MLP(n_embd, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, n_layer: int = 4, n_head: int = 2, n_embd: int = 8, block_size: int = 8) -> None:
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([GPTBlock(n_embd, n_head, bias=False) for _ in range(n_layer)]),
                "ln_f": nn.LayerNorm(n_embd, bias=False),
            }
        )
        self.lm_head = nn.Linear(n_embd, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.block_size
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.Optimizer:
        param_dict = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in param_dict.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in param_dict.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


class NanoGPT(Text):
    """nanoGPT: everything in one `ModuleDict`, a tied head, groups of parameters by their dimensions."""

    def build(self) -> None:
        self.model = GPT()

    def loss(self, batch: Any) -> Tensor:
        return self.model(*batch)[1]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return self.model(batch[0])[0]

    def configure_optimizers(self) -> Any:
        return self.model.configure_optimizers(0.1, 1e-2)


class TransformerLM(WithoutAdam, Text):
    """Lightning's demo: torch's own `nn.Transformer`, and tables that are made at the first call."""

    def build(self) -> None:
        self.model = Transformer(vocab_size=VOCABULARY, ninp=8, nhead=2, nhid=8, nlayers=3, dropout=0.0)

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self.model(inputs, target), target.reshape(-1))


class LSTMLM(Text):
    """Lightning's demo: one `nn.LSTM` of several layers, and no list of layers."""

    def build(self) -> None:
        self.model = SimpleLSTM(vocab_size=VOCABULARY, ninp=8, nhid=8, nlayers=4, dropout=0.0)

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        hidden = (inputs.new_zeros(4, len(inputs), 8, dtype=self.dtype),) * 2
        output, _ = self.model(inputs, hidden)
        return F.nll_loss(output, target.reshape(-1))


def clones(module: nn.Module, count: int) -> nn.ModuleList:
    return nn.ModuleList([copy.deepcopy(module) for _ in range(count)])


class SublayerConnection(nn.Module):
    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class MultiHeadedAttention(nn.Module):
    def __init__(self, h: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn: Tensor | None = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        self.attn = self.dropout(scores.softmax(dim=-1))
        x = torch.matmul(self.attn, value)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k))


def feed_forward(d_model: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * d_model, d_model)
    )


class EncoderLayer(nn.Module):
    def __init__(self, size: int, self_attn: nn.Module, feed_forward: nn.Module, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, size: int, attn: nn.Module, feed_forward: nn.Module, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.src_attn, self.feed_forward = attn, copy.deepcopy(attn), feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)

    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Coder(nn.Module):
    """The annotated Transformer's `Encoder` and `Decoder`, which differ in what they hand on."""

    def __init__(self, layer: nn.Module, count: int, size: int) -> None:
        super().__init__()
        self.layers = clones(layer, count)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(VOCABULARY, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    pe: Tensor

    def __init__(self, d_model: int, dropout: float, max_len: int = 20) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.size(1)].requires_grad_(False))


class Seq2Seq(WithoutAdam, Text):
    """The annotated Transformer: an encoder and a decoder, padding masks of the batch, label smoothing of its own."""

    def build(self) -> None:
        d_model, dropout, count = 8, 0.1, 3
        attn, ff = MultiHeadedAttention(2, d_model, dropout), feed_forward(d_model, dropout)
        c = copy.deepcopy
        self.encoder = Coder(EncoderLayer(d_model, c(attn), c(ff), dropout), count, d_model)
        self.decoder = Coder(DecoderLayer(d_model, c(attn), c(ff), dropout), count, d_model)
        self.src_embed = nn.Sequential(Embeddings(d_model), PositionalEncoding(d_model, dropout))
        self.tgt_embed = nn.Sequential(Embeddings(d_model), PositionalEncoding(d_model, dropout))
        self.generator = nn.Linear(d_model, VOCABULARY)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def encode(self, src: Tensor, src_mask: Tensor) -> Tensor:
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory: Tensor, src_mask: Tensor, tgt: Tensor, tgt_mask: Tensor) -> Tensor:
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)

    def loss(self, batch: Any) -> Tensor:
        src, tgt, tgt_y = batch
        src_mask = (src != 0).unsqueeze(-2)
        tgt_mask = (tgt != 0).unsqueeze(-2) & torch.ones(tgt.size(-1), tgt.size(-1)).tril().bool()
        x = self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)
        x = F.log_softmax(self.generator(x), dim=-1).reshape(-1, VOCABULARY)
        true_dist = torch.full_like(x.data, 0.1 / (VOCABULARY - 2))
        true_dist.scatter_(1, tgt_y.reshape(-1, 1), 0.9)
        true_dist[:, 0] = 0
        return F.kl_div(x, true_dist, reduction="sum") / len(src)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        src, tgt = (torch.randint(1, VOCABULARY, (self.length + 1,), generator=generator) for _ in range(2))
        src[self.length - index % 3 :] = 0
        return src[:-1], tgt[:-1], tgt[1:]


class GRUSeq2Seq(WithoutAdam, Text):
    """torch's tutorial of translation: a decoder that runs token by token through `nn.GRU`, with attention."""

    def build(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.GRU(8, 8, 2, batch_first=True)
        self.attention = nn.Linear(16, self.length)
        self.gru = nn.GRU(16, 8, 2, batch_first=True)
        self.out = nn.Linear(8, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        src, tgt = batch
        outputs, hidden = self.encoder(self.embedding(src))
        token, logits = torch.zeros_like(src[:, :1]), []
        for step in range(tgt.size(1)):
            embedded = self.embedding(token)
            weights = self.attention(torch.cat([embedded[:, 0], hidden[-1]], 1)).softmax(-1)
            context = torch.bmm(weights.unsqueeze(1), outputs)
            output, hidden = self.gru(torch.cat([embedded, context], -1), hidden)
            logits.append(self.out(output))
            token = tgt[:, step : step + 1]
        return F.cross_entropy(torch.cat(logits, 1).flatten(0, 1), tgt.reshape(-1))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoeLayer(nn.Module):
    def __init__(self, experts: list[nn.Module], gate: nn.Module, num_experts_per_tok: int) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(experts), gate
        self.num_experts_per_tok = num_experts_per_tok

    def forward(self, inputs: Tensor) -> Tensor:
        gate_logits = self.gate(inputs)
        weights, selected_experts = torch.topk(gate_logits, self.num_experts_per_tok)
        weights = F.softmax(weights, dim=1, dtype=weights.dtype).to(inputs.dtype)
        results = torch.zeros_like(inputs)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected_experts == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(inputs[batch_idx])
        return results


class MixtralBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(dim, 2, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = MoeLayer([FeedForward(dim) for _ in range(4)], nn.Linear(dim, 4, bias=False), 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        normed = self.ffn_norm(h)
        return h + self.feed_forward(normed.flatten(0, 1)).view_as(h)


class MixtralModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleDict({str(i): MixtralBlock(8) for i in range(4)})
        self.norm = nn.RMSNorm(8, eps=1e-5)
        self.output = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.tok_embeddings(input_ids)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class Mixtral(Text):
    """Mistral's own Mixtral: layers in a `ModuleDict` of numbers, in each a `ModuleList` of experts by data."""

    def build(self) -> None:
        self.model = MixtralModel()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


class SwitchBlock(GPTBlock):
    aux_loss: Tensor

    def __init__(self, n_embd: int, n_head: int, bias: bool) -> None:
        super().__init__(n_embd, n_head, bias)
        self.router = nn.Linear(n_embd, 4, bias=False)
        self.experts = nn.ModuleList([MLP(n_embd, bias) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        logits = self.router(x)
        self.aux_loss = logits.logsumexp(-1).square().mean()
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (outputs * logits.softmax(-1).unsqueeze(-2)).sum(-1)


class KeptLosses(NanoGPT):
    """A router's loss that every block keeps in an attribute, added up behind the loop (Switch, many others)."""

    def build(self) -> None:
        super().build()
        self.model.transformer.h = nn.ModuleList([SwitchBlock(8, 2, bias=False) for _ in range(4)])

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(block.aux_loss for block in self.model.transformer.h)


class DeepSupervision(WithoutAdam, Text):
    """The outputs of all layers, each with a head and a loss of its own; a later one weighs more."""

    def build(self) -> None:
        self.embeddings = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(8, VOCABULARY) for _ in range(4)])

    def forward(self, input_ids: Tensor, output_hidden_states: bool = False) -> dict[str, Any]:
        hidden_states = self.embeddings(input_ids)
        all_hidden_states: tuple[Tensor, ...] | None = () if output_hidden_states else None
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states)
            if output_hidden_states:
                all_hidden_states = (*all_hidden_states, hidden_states)
        return {"last_hidden_state": hidden_states, "hidden_states": all_hidden_states}

    def loss(self, batch: Any) -> Tensor:
        output = self(batch[0], output_hidden_states=True)
        total = output["last_hidden_state"].new_zeros(())
        for i, (head, hidden) in enumerate(zip(self.heads, output["hidden_states"], strict=True)):
            total = total + (i + 1) / 4 * F.cross_entropy(head(hidden).transpose(1, 2), batch[1])
        return total


class MultiTask(Example):
    """Heads in a `ModuleDict`, and losses weighted by parameters (Kendall's uncertainty)."""

    def build(self) -> None:
        self.backbone = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(5)])
        self.heads = nn.ModuleDict(
            {"depth": nn.Linear(6, 6), "segmentation": nn.Linear(6, 6), "edges": nn.Linear(6, 1)}
        )
        self.log_vars = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.backbone:
            x = x + layer(x)
        return {name: head(x) for name, head in self.heads.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        outputs = self(x)
        losses = {
            "depth": F.mse_loss(outputs["depth"], y),
            "segmentation": F.cross_entropy(outputs["segmentation"], y.argmax(-1)),
            "edges": F.binary_cross_entropy_with_logits(outputs["edges"][:, 0], (y[:, 0] > 0).to(y.dtype)),
        }
        self.log_dict({f"train/{name}": value for name, value in losses.items()}, on_epoch=True, sync_dist=True)
        return sum(value * torch.exp(-self.log_vars[name]) + self.log_vars[name] for name, value in losses.items())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val", F.mse_loss(self(x)["depth"], y), sync_dist=True)


#: The layers of a WaveNet in the order in which they are called.
WAVENET_BODY = [f"{name}_convs.{index}" for index in range(4) for name in ("filter", "gate", "skip", "residual")]


class WaveNet(Text):
    """A WaveNet: four lists side by side, walked by one index; sums of skips."""

    def build(self) -> None:
        self.start_conv = nn.Conv1d(VOCABULARY, 6, 1)
        self.filter_convs, self.gate_convs = nn.ModuleList(), nn.ModuleList()
        self.residual_convs, self.skip_convs = nn.ModuleList(), nn.ModuleList()
        for i in range(4):
            self.filter_convs.append(nn.Conv1d(6, 6, 2, dilation=2 ** (i % 2)))
            self.gate_convs.append(nn.Conv1d(6, 6, 2, dilation=2 ** (i % 2)))
            self.residual_convs.append(nn.Conv1d(6, 6, 1))
            self.skip_convs.append(nn.Conv1d(6, 8, 1))
        self.end_conv = nn.Conv1d(8, VOCABULARY, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.start_conv(F.one_hot(tokens, VOCABULARY).to(self.dtype).transpose(1, 2))
        skip: Any = 0
        for i in range(4):
            residual = x
            padded = F.pad(residual, (2 ** (i % 2), 0))
            x = torch.tanh(self.filter_convs[i](padded)) * torch.sigmoid(self.gate_convs[i](padded))
            skip = self.skip_convs[i](x) + skip
            x = self.residual_convs[i](x) + residual
        return self.end_conv(F.relu(skip))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class GIN(Example):
    """A network on graphs in the style of OGB: lists of convolutions and of norms side by side, all layers joined."""

    def build(self) -> None:
        self.node_encoder = nn.Linear(4, 6)
        self.convs = nn.ModuleList([nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(6) for _ in range(4)])
        self.eps = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(4)])
        self.graph_pred_linear = nn.Linear(5 * 6, 1)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        h_list = [self.node_encoder(x)]
        for conv, norm, eps in zip(self.convs, self.norms, self.eps, strict=True):
            h = conv((1 + eps) * h_list[-1] + torch.bmm(adj, h_list[-1]))
            h_list.append(F.relu(norm(h)) + h_list[-1])
        return self.graph_pred_linear(torch.cat(h_list, dim=-1).sum(dim=1)).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        x, adj, y = batch
        return F.l1_loss(self(x, adj), y)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(self.dtype)
        adj = (torch.rand(5, 5, generator=generator) < 0.4).to(x.dtype)
        return x, adj, x.sum()


class DLRM(Example):
    """Facebook's DLRM: a `ModuleList` of tables of different sizes, two `nn.Sequential`s, and their interactions."""

    def build(self) -> None:
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, 4, mode="sum") for n in (11, 7, 5)])
        self.bot_l = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def apply_emb(self, lS_i: Tensor) -> list[Tensor]:
        return [emb(lS_i[:, k]) for k, emb in enumerate(self.emb_l)]

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        T = torch.cat([x, *ly], dim=1).view((x.shape[0], -1, x.shape[1]))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        li = torch.tensor([i for i in range(4) for j in range(i)])
        lj = torch.tensor([j for i in range(4) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def loss(self, batch: Any) -> Tensor:
        dense_x, lS_i, y = batch
        p = self.top_l(self.interact_features(self.bot_l(dense_x), self.apply_emb(lS_i)))
        return F.binary_cross_entropy(p, y)

    def sample(self, index: int, generator: torch.Generator) -> Any:
        x, _ = super().sample(index, generator)
        indices = torch.stack([torch.randint(n, (2,), generator=generator) for n in (11, 7, 5)])
        return x, indices, (x.sum() > 0).to(x.dtype).view(1)


class SharedStem(WithoutAdam):
    """Batch norm before the layers, whose result is used again behind each of them: the least of many U-Nets."""

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x1 = self.norm(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x1
        return x


# -- images ------------------------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
        if keep_prob > 0.0 and self.scale_by_keep:
            random_tensor.div_(keep_prob)
        return x * random_tensor


class LayerScale(nn.Module):
    def __init__(self, dim: int, init_values: float = 0.1, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.drop1(self.act(self.fc1(x)))))


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class ViTBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.ls1, self.drop_path1 = LayerScale(dim), DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        self.ls2, self.drop_path2 = LayerScale(dim), DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PatchEmbed(nn.Module):
    def __init__(self, img_size: int, patch_size: int, embed_dim: int, flatten: bool = True) -> None:
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.flatten = flatten
        self.proj = nn.Conv2d(3, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1)


class ViT(WithoutAdam, Images):
    """timm's ViT: `blocks` is an `nn.Sequential`, with stochastic depth that grows with the depth; a class token."""

    def build(self) -> None:
        dim, depth = 8, 5
        self.patch_embed = PatchEmbed(16, 4, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, dim) * 0.02)
        self.pos_drop = nn.Dropout(0.1)
        self.norm_pre = nn.Identity()
        dpr = torch.linspace(0, 0.3, depth).tolist()
        self.blocks = nn.Sequential(*[ViTBlock(dim, 2, drop_path=dpr[i]) for i in range(depth)])
        self.norm, self.fc_norm = nn.LayerNorm(dim), nn.Identity()
        self.head_drop, self.head = nn.Dropout(0.1), nn.Linear(dim, CLASSES)

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.pos_drop(x + self.pos_embed)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.norm_pre(self._pos_embed(self.patch_embed(x)))
        return self.norm(self.blocks(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.fc_norm(x[:, 0]))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class PairsTransformer(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            feedforward = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
            self.layers.append(nn.ModuleList([Attention(dim, 2), feedforward]))

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


class PairsViT(WithoutAdam, Images):
    """vit-pytorch's ViT: each member of the list is itself a list of two, unpacked in the loop."""

    def build(self) -> None:
        self.to_patch_embedding = PatchEmbed(16, 4, 8)
        self.transformer = PairsTransformer(8, 4)
        self.mlp_head = nn.Linear(8, CLASSES)

    def forward(self, img: Tensor) -> Tensor:
        return self.mlp_head(self.transformer(self.to_patch_embedding(img)).mean(dim=1))


def window_partition(x: Tensor, window: int) -> Tensor:
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, C)


def window_reverse(windows: Tensor, window: int, H: int, W: int) -> Tensor:
    x = windows.view(-1, H // window, W // window, window, window, windows.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, H, W, windows.shape[-1])


class WindowAttention(nn.Module):
    relative_position_index: Tensor

    def __init__(self, dim: int, num_heads: int, window: int) -> None:
        super().__init__()
        self.num_heads, self.window_area = num_heads, window**2
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, num_heads) * 0.02)
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        index = relative[..., 0] * (2 * window - 1) + relative[..., 1]
        self.register_buffer("relative_position_index", index, persistent=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = q * (C // self.num_heads) ** -0.5 @ k.transpose(-2, -1) + bias.permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            num_win = mask.shape[0]
            attn = attn.view(-1, num_win, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B_, N, C))


class SwinBlock(nn.Module):
    attn_mask: Tensor | None

    def __init__(self, dim: int, resolution: int, num_heads: int, window: int, shift: int, drop_path: float) -> None:
        super().__init__()
        self.window_size, self.shift_size = window, shift if resolution > window else 0
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, num_heads, window)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.register_buffer("attn_mask", self.get_attn_mask(resolution) if self.shift_size else None, persistent=False)

    def get_attn_mask(self, resolution: int) -> Tensor:
        img_mask = torch.zeros((1, resolution, resolution, 1))
        slices = (0, -self.window_size), (-self.window_size, -self.shift_size), (-self.shift_size, None)
        for cnt, (h, w) in enumerate((h, w) for h in slices for w in slices):
            img_mask[:, h[0] : h[1], w[0] : w[1], :] = cnt
        windows = window_partition(img_mask, self.window_size).view(-1, self.window_size**2)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)

    def _attn(self, x: Tensor) -> Tensor:
        _, H, W, C = x.shape
        has_shift = self.shift_size > 0
        shifted_x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2)) if has_shift else x
        windows = window_partition(shifted_x, self.window_size).view(-1, self.window_size**2, C)
        windows = self.attn(windows, mask=self.attn_mask).view(-1, self.window_size, self.window_size, C)
        shifted_x = window_reverse(windows, self.window_size, H, W)
        return torch.roll(shifted_x, shifts=(self.shift_size, self.shift_size), dims=(1, 2)) if has_shift else shifted_x

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        x = x.reshape(B, -1, C)
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x.reshape(B, H, W, C)


class PatchMerging(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        x = x.reshape(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class SwinTransformerStage(nn.Module):
    def __init__(self, dim: int, resolution: int, num_heads: int, downsample: bool, drop_path: list[float]) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = PatchMerging(dim // 2) if downsample else nn.Identity()
        self.blocks = nn.Sequential(
            *[SwinBlock(dim, resolution, num_heads, 2, 0 if i % 2 == 0 else 1, drop_path[i]) for i in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class SwinTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Sequential(PatchEmbed(16, 1, 4, flatten=False), nn.LayerNorm(4))
        dpr = [x.tolist() for x in torch.linspace(0, 0.2, 8).split(2)]
        self.layers = nn.Sequential(
            *[SwinTransformerStage(4 * 2**i, 16 // 2**i, 2**i, i > 0, drop_path=dpr[i]) for i in range(4)]
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers(self.patch_embed(x)))
        return self.head(x.mean(dim=(1, 2)))


class Swin(WithoutAdam, Images):
    """timm's Swin: an `nn.Sequential` of four stages, each twice as wide as the last one; windows that are shifted."""

    def build(self) -> None:
        self.model = SwinTransformer()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def conv3x3(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int,
        downsample: nn.Module | None,
        norm_layer: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inplanes, planes, stride), norm_layer(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv3x3(planes, planes), norm_layer(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes: int = CLASSES, norm_layer: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self._norm_layer = norm_layer
        self.inplanes = 4
        self.conv1 = nn.Conv2d(3, 4, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(4)
        self.layer2 = self._make_layer(4, stride=2)
        self.layer3 = self._make_layer(8, stride=2)
        self.layer4 = self._make_layer(8, stride=1)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, num_classes)

    def _make_layer(self, planes: int, stride: int = 1) -> nn.Sequential:
        norm_layer, downsample = self._norm_layer, None
        if stride != 1 or self.inplanes != planes:
            conv1x1 = nn.Conv2d(self.inplanes, planes, kernel_size=1, stride=stride, bias=False)
            downsample = nn.Sequential(conv1x1, norm_layer(planes))
        layers = [BasicBlock(self.inplanes, planes, stride, downsample, norm_layer)]
        self.inplanes = planes
        layers.append(BasicBlock(planes, planes, 1, None, norm_layer))
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ResNet18(WithoutAdam, Images):
    """torchvision's ResNet: four stacks of blocks in a row, batch norm in and before them, writing in place."""

    size = 32

    def build(self) -> None:
        self.model = ResNet()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class GroupNormResNet(ResNet18):
    """The same with group norm, which knows no other samples."""

    def build(self) -> None:
        self.model = ResNet(norm_layer=partial(nn.GroupNorm, 2))


class _DenseLayer(nn.Module):
    def __init__(self, num_input_features: int, growth_rate: int, bn_size: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(num_input_features), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(num_input_features, bn_size * growth_rate, kernel_size=1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(bn_size * growth_rate), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bn_size * growth_rate, growth_rate, kernel_size=3, padding=1, bias=False)

    def forward(self, input: Tensor | list[Tensor]) -> Tensor:
        prev_features = [input] if isinstance(input, Tensor) else input
        bottleneck = self.conv1(self.relu1(self.norm1(torch.cat(prev_features, 1))))
        return self.conv2(self.relu2(self.norm2(bottleneck)))


class _DenseBlock(nn.ModuleDict):
    def __init__(self, num_layers: int, num_input_features: int, bn_size: int, growth_rate: int) -> None:
        super().__init__()
        for i in range(num_layers):
            layer = _DenseLayer(num_input_features + i * growth_rate, growth_rate, bn_size)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, init_features: Tensor) -> Tensor:
        features = [init_features]
        for _name, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class _Transition(nn.Sequential):
    def __init__(self, num_input_features: int, num_output_features: int) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(num_input_features), nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(num_input_features, num_output_features, kernel_size=1, bias=False)
        self.pool = nn.AvgPool2d(kernel_size=2, stride=2)


class DenseNet(WithoutAdam, Images):
    """torchvision's DenseNet: one `features` of everything, in it blocks that are `ModuleDict`s with a `forward`."""

    def build(self) -> None:
        growth_rate, bn_size, num_features = 3, 2, 6
        self.features = nn.Sequential(
            OrderedDict(
                [
                    ("conv0", nn.Conv2d(3, num_features, kernel_size=7, stride=2, padding=3, bias=False)),
                    ("norm0", nn.BatchNorm2d(num_features)),
                    ("relu0", nn.ReLU(inplace=True)),
                    ("pool0", nn.MaxPool2d(kernel_size=3, stride=1, padding=1)),
                ]
            )
        )
        for i, num_layers in enumerate((2, 3, 2)):
            self.features.add_module(f"denseblock{i + 1}", _DenseBlock(num_layers, num_features, bn_size, growth_rate))
            num_features += num_layers * growth_rate
            if i < 2:
                self.features.add_module(f"transition{i + 1}", _Transition(num_features, num_features // 2))
                num_features //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(num_features))
        self.classifier = nn.Linear(num_features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        out = F.relu(features, inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))


class DoubleConv(nn.Module):
    def __init__(self, in_ch: int, out_ch: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_ch, out_ch, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_ch),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_ch, out_ch, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_ch),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Down(nn.Module):
    def __init__(self, in_ch: int, out_ch: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.MaxPool2d(kernel_size=2, stride=2), DoubleConv(in_ch, out_ch))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Up(nn.Module):
    def __init__(self, in_ch: int, out_ch: int, bilinear: bool = False) -> None:
        super().__init__()
        self.upsample: nn.Module
        if bilinear:
            self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        else:
            self.upsample = nn.ConvTranspose2d(in_ch, in_ch // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_ch, out_ch)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.upsample(x1)
        diff_h, diff_w = x2.shape[2] - x1.shape[2], x2.shape[3] - x1.shape[3]
        x1 = F.pad(x1, [diff_w // 2, diff_w - diff_w // 2, diff_h // 2, diff_h - diff_h // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNetModel(nn.Module):
    def __init__(self, num_classes: int, num_layers: int, features_start: int) -> None:
        super().__init__()
        self.num_layers, features = num_layers, features_start
        layers: list[nn.Module] = [DoubleConv(3, features)]
        for _ in range(num_layers - 1):
            layers.append(Down(features, features * 2))
            features *= 2
        for _ in range(num_layers - 1):
            layers.append(Up(features, features // 2))
            features //= 2
        layers.append(nn.Conv2d(features, num_classes, kernel_size=1))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        xi = [self.layers[0](x)]
        for layer in self.layers[1 : self.num_layers]:
            xi.append(layer(xi[-1]))
        for i, layer in enumerate(self.layers[self.num_layers : -1]):
            xi[-1] = layer(xi[-1], xi[-2 - i])
        return self.layers[-1](xi[-1])


class UNet(WithoutAdam, Images):
    """bolts' U-Net: one `ModuleList` for all, skips kept in a list and written back into it."""

    size = 12

    def build(self) -> None:
        self.net = UNetModel(CLASSES, num_layers=3, features_start=4)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        return F.cross_entropy(self.net(x), (x.sum(1) > 0).long())


class PlainDown(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(in_channels, out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool_conv(x)


class NamedUNet(WithoutAdam, Images):
    """milesial's U-Net: `inc`, `down1`, `up1`, ... are attributes, and there is no list of them."""

    size = 12

    def build(self) -> None:
        self.inc = DoubleConv(3, 4)
        self.down1, self.down2 = PlainDown(4, 8), PlainDown(8, 16)
        self.up1, self.up2 = Up(16, 8), Up(8, 4)
        self.outc = nn.Conv2d(4, CLASSES, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        return F.cross_entropy(self(x), (x.sum(1) > 0).long())


# -- generative models -------------------------------------------------------------------------------------------------


class VAE(WithoutAdam, Images):
    """PyTorch-VAE's VanillaVAE: encoder and decoder are `nn.Sequential`s, noise is drawn between them."""

    def build(self) -> None:
        self.latent_dim = 4
        hidden_dims = [4, 6, 8]
        modules: list[nn.Module] = []
        in_channels = 3
        for h_dim in hidden_dims:
            conv = nn.Conv2d(in_channels, h_dim, kernel_size=3, stride=2, padding=1)
            modules.append(nn.Sequential(conv, nn.BatchNorm2d(h_dim), nn.LeakyReLU()))
            in_channels = h_dim
        self.encoder = nn.Sequential(*modules)
        self.fc_mu = nn.Linear(hidden_dims[-1] * 4, self.latent_dim)
        self.fc_var = nn.Linear(hidden_dims[-1] * 4, self.latent_dim)
        modules = []
        self.decoder_input = nn.Linear(self.latent_dim, hidden_dims[-1] * 4)
        hidden_dims.reverse()
        for i in range(len(hidden_dims) - 1):
            conv = nn.ConvTranspose2d(hidden_dims[i], hidden_dims[i + 1], 3, stride=2, padding=1, output_padding=1)
            modules.append(nn.Sequential(conv, nn.BatchNorm2d(hidden_dims[i + 1]), nn.LeakyReLU()))
        self.decoder = nn.Sequential(*modules)
        last = hidden_dims[-1]
        self.final_layer = nn.Sequential(
            nn.ConvTranspose2d(last, last, kernel_size=3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(last),
            nn.LeakyReLU(),
            nn.Conv2d(last, out_channels=3, kernel_size=3, padding=1),
            nn.Tanh(),
        )

    def encode(self, input: Tensor) -> list[Tensor]:
        result = torch.flatten(self.encoder(input), start_dim=1)
        return [self.fc_mu(result), self.fc_var(result)]

    def decode(self, z: Tensor) -> Tensor:
        result = self.decoder_input(z).view(-1, 8, 2, 2)
        return self.final_layer(self.decoder(result))

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return eps * std + mu

    def forward(self, input: Tensor) -> list[Tensor]:
        mu, log_var = self.encode(input)
        return [self.decode(self.reparameterize(mu, log_var)), input, mu, log_var]

    def loss(self, batch: Any) -> Tensor:
        recons, input, mu, log_var = self(batch[0])
        recons_loss = F.mse_loss(recons, input)
        kld_loss = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
        return recons_loss + 0.1 * kld_loss


class Dequantization(nn.Module):
    def __init__(self, alpha: float = 1e-5, quants: int = 256) -> None:
        super().__init__()
        self.alpha, self.quants = alpha, quants

    def forward(self, z: Tensor, ldj: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        assert not reverse
        z, ldj = self.dequant(z, ldj)
        return self.sigmoid(z, ldj, reverse=True)

    def sigmoid(self, z: Tensor, ldj: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        assert reverse
        z = z * (1 - self.alpha) + 0.5 * self.alpha
        ldj += np.log(1 - self.alpha) * np.prod(z.shape[1:])
        ldj += (-torch.log(z) - torch.log(1 - z)).sum(dim=[1, 2, 3])
        return torch.log(z) - torch.log(1 - z), ldj

    def dequant(self, z: Tensor, ldj: Tensor) -> tuple[Tensor, Tensor]:
        z = z.to(ldj.dtype)
        z = (z + torch.rand_like(z).detach()) / self.quants
        ldj -= np.log(self.quants) * np.prod(z.shape[1:])
        return z, ldj


class CouplingLayer(nn.Module):
    mask: Tensor

    def __init__(self, network: nn.Module, mask: Tensor, c_in: int) -> None:
        super().__init__()
        self.network = network
        self.scaling_factor = nn.Parameter(torch.zeros(c_in))
        self.register_buffer("mask", mask)

    def forward(
        self, z: Tensor, ldj: Tensor, reverse: bool = False, orig_img: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        s, t = self.network(z * self.mask).chunk(2, dim=1)
        s_fac = self.scaling_factor.exp().view(1, -1, 1, 1)
        s = torch.tanh(s / s_fac) * s_fac
        s, t = s * (1 - self.mask), t * (1 - self.mask)
        if reverse:
            return (z * torch.exp(-s)) - t, ldj - s.sum(dim=[1, 2, 3])
        z = (z + t) * torch.exp(s)
        ldj += s.sum(dim=[1, 2, 3])
        return z, ldj


class ImageFlow(Images):
    """UvA's flow: two streams, one of them written in place by every layer; noise in the first layer; a `Normal`."""

    channels, size = 1, 6

    def build(self) -> None:
        flows: list[nn.Module] = [Dequantization()]
        for i in range(5):
            network = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ELU(), nn.Conv2d(3, 2, 3, padding=1))
            mask = (torch.arange(6)[:, None] + torch.arange(6)[None, :] + i) % 2
            flows.append(CouplingLayer(network, mask.float().view(1, 1, 6, 6), 1))
        self.flows = nn.ModuleList(flows)
        self.prior = torch.distributions.normal.Normal(loc=0.0, scale=1.0)

    def encode(self, imgs: Tensor) -> tuple[Tensor, Tensor]:
        z, ldj = imgs, torch.zeros(imgs.shape[0], device=self.device, dtype=self.dtype)
        for flow in self.flows:
            z, ldj = flow(z, ldj, reverse=False)
        return z, ldj

    def loss(self, batch: Any) -> Tensor:
        z, ldj = self.encode(batch[0])
        log_pz = self.prior.log_prob(z).sum(dim=[1, 2, 3])
        nll = -(ldj + log_pz)
        return (nll * np.log2(np.exp(1)) / np.prod(batch[0].shape[1:])).mean()

    def sample(self, index: int, generator: torch.Generator) -> Any:
        return (torch.randint(256, (1, 6, 6), generator=generator),)


class ResnetBlock(nn.Module):
    def __init__(self, dim: int, dim_out: int, time_emb_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.block1 = nn.Sequential(nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(2, dim_out))
        self.block2 = nn.Sequential(nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(2, dim_out), nn.SiLU())
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, time_emb: Tensor) -> Tensor:
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.block1(x) * (scale + 1) + shift)
        return self.block2(h) + self.res_conv(x)


class SinusoidalPosEmb(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        emb = torch.exp(torch.arange(4, device=x.device) * -(math.log(10000) / 3))
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class DiffusionUNet(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.init_conv = nn.Conv2d(3, dim, 7, padding=3)
        dims = [dim, dim, 2 * dim]
        in_out = list(pairwise(dims))
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.downs, self.ups = nn.ModuleList([]), nn.ModuleList([])
        for dim_in, dim_out in in_out:
            down = nn.Conv2d(dim_in, dim_out, 4, 2, 1)
            self.downs.append(nn.ModuleList([ResnetBlock(dim_in, dim_in, 8), ResnetBlock(dim_in, dim_in, 8), down]))
        self.mid_block1, self.mid_block2 = ResnetBlock(dims[-1], dims[-1], 8), ResnetBlock(dims[-1], dims[-1], 8)
        for dim_in, dim_out in reversed(in_out):
            up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(dim_out, dim_in, 3, padding=1))
            blocks = [ResnetBlock(2 * dim_in, dim_in, 8), ResnetBlock(2 * dim_in, dim_in, 8)]
            self.ups.append(nn.ModuleList([up, *blocks]))
        self.final_res_block = ResnetBlock(dim * 2, dim, 8)
        self.final_conv = nn.Conv2d(dim, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.init_conv(x)
        r = x.clone()
        t = self.time_mlp(time.to(x.dtype))
        h = []
        for block1, block2, downsample in self.downs:
            x = block1(x, t)
            h.append(x)
            x = block2(x, t)
            h.append(x)
            x = downsample(x)
        x = self.mid_block2(self.mid_block1(x, t), t)
        for upsample, block1, block2 in self.ups:
            x = upsample(x)
            x = block1(torch.cat((x, h.pop()), dim=1), t)
            x = block2(torch.cat((x, h.pop()), dim=1), t)
        return self.final_conv(self.final_res_block(torch.cat((x, r), dim=1), t))


def extract(a: Tensor, t: Tensor, x_shape: torch.Size) -> Tensor:
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class Diffusion(WithoutAdam, Images):
    """lucidrains' DDPM: lists of lists, skips, times and noise that are drawn before the model and used after it."""

    size = 8
    sqrt_alphas_cumprod: Tensor
    sqrt_one_minus_alphas_cumprod: Tensor

    def build(self) -> None:
        self.model = DiffusionUNet()
        alphas_cumprod = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, 50), dim=0)
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        self.register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))

    def loss(self, batch: Any) -> Tensor:
        img = batch[0]
        t = torch.randint(0, 50, (len(img),), device=img.device).long()
        noise = torch.randn_like(img)
        x = extract(self.sqrt_alphas_cumprod, t, img.shape) * img
        x = x + extract(self.sqrt_one_minus_alphas_cumprod, t, img.shape) * noise
        loss = F.mse_loss(self.model(x, t), noise, reduction="none")
        return loss.flatten(1).mean(dim=1).mean()


class MaskedConvolution(nn.Module):
    mask: Tensor

    def __init__(self, c_in: int, c_out: int, mask: Tensor, **kwargs: Any) -> None:
        super().__init__()
        padding = tuple((size - 1) // 2 for size in mask.shape)
        self.conv = nn.Conv2d(c_in, c_out, tuple(mask.shape), padding=padding, **kwargs)
        self.register_buffer("mask", mask[None, None])

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.data *= self.mask
        return self.conv(x)


class VerticalStackConvolution(MaskedConvolution):
    def __init__(self, c_in: int, c_out: int, mask_center: bool = False) -> None:
        mask = torch.ones(3, 3)
        mask[2:, :] = 0
        if mask_center:
            mask[1, :] = 0
        super().__init__(c_in, c_out, mask)


class HorizontalStackConvolution(MaskedConvolution):
    def __init__(self, c_in: int, c_out: int, mask_center: bool = False) -> None:
        mask = torch.ones(1, 3)
        mask[0, 2:] = 0
        if mask_center:
            mask[0, 1] = 0
        super().__init__(c_in, c_out, mask)


class GatedMaskedConv(nn.Module):
    def __init__(self, c_in: int) -> None:
        super().__init__()
        self.conv_vert = VerticalStackConvolution(c_in, 2 * c_in)
        self.conv_horiz = HorizontalStackConvolution(c_in, 2 * c_in)
        self.conv_vert_to_horiz = nn.Conv2d(2 * c_in, 2 * c_in, kernel_size=1)
        self.conv_horiz_1x1 = nn.Conv2d(c_in, c_in, kernel_size=1)

    def forward(self, v_stack: Tensor, h_stack: Tensor) -> tuple[Tensor, Tensor]:
        v_stack_feat = self.conv_vert(v_stack)
        v_val, v_gate = v_stack_feat.chunk(2, dim=1)
        v_stack_out = torch.tanh(v_val) * torch.sigmoid(v_gate)
        h_stack_feat = self.conv_horiz(h_stack) + self.conv_vert_to_horiz(v_stack_feat)
        h_val, h_gate = h_stack_feat.chunk(2, dim=1)
        h_stack_out = self.conv_horiz_1x1(torch.tanh(h_val) * torch.sigmoid(h_gate)) + h_stack
        return v_stack_out, h_stack_out


class PixelCNN(Images):
    """UvA's PixelCNN: two streams; masked weights are written through `.data` at each call, around the layers too."""

    channels, size = 1, 6

    def build(self) -> None:
        self.conv_vstack = VerticalStackConvolution(1, 4, mask_center=True)
        self.conv_hstack = HorizontalStackConvolution(1, 4, mask_center=True)
        self.conv_layers = nn.ModuleList([GatedMaskedConv(4) for _ in range(4)])
        self.conv_out = nn.Conv2d(4, 8, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.to(self.dtype) / 7.0) * 2 - 1
        v_stack, h_stack = self.conv_vstack(x), self.conv_hstack(x)
        for layer in self.conv_layers:
            v_stack, h_stack = layer(v_stack, h_stack)
        out = self.conv_out(F.elu(h_stack))
        return out.reshape(out.shape[0], 8, out.shape[1] // 8, out.shape[2], out.shape[3])

    def loss(self, batch: Any) -> Tensor:
        nll = F.cross_entropy(self(batch[0]), batch[0], reduction="none")
        return (nll.mean(dim=[1, 2, 3]) * np.log2(np.exp(1))).mean()

    def sample(self, index: int, generator: torch.Generator) -> Any:
        return (torch.randint(8, (1, 6, 6), generator=generator),)


class GAN(Images):
    """Lightning's GAN: two optimizers, and so manual optimization."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 3 * 16 * 16))
        self.discriminator = nn.Sequential(nn.Linear(3 * 16 * 16, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        imgs = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], 4).type_as(imgs)
        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = F.binary_cross_entropy(self.discriminator(self.generator(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real_loss = F.binary_cross_entropy(self.discriminator(imgs), valid)
        fake_loss = F.binary_cross_entropy(self.discriminator(self.generator(z).detach()), torch.zeros_like(valid))
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return None

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-4)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4)
        return [opt_g, opt_d], []


class MAE(WithoutAdam, Images):
    """Facebook's MAE: patches are masked by sorting noise, two stacks of blocks, mask tokens, a frozen embedding."""

    def build(self) -> None:
        dim, decoder_dim = 8, 8
        self.patch_embed = PatchEmbed(16, 4, dim)
        num_patches = self.patch_embed.num_patches
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, num_patches + 1, dim), requires_grad=False)
        self.blocks = nn.ModuleList([ViTBlock(dim, 2) for _ in range(4)])
        self.norm = nn.LayerNorm(dim)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.randn(1, 1, decoder_dim) * 0.02)
        self.decoder_pos_embed = nn.Parameter(torch.randn(1, num_patches + 1, decoder_dim), requires_grad=False)
        self.decoder_blocks = nn.ModuleList([ViTBlock(decoder_dim, 2) for _ in range(2)])
        self.decoder_norm = nn.LayerNorm(decoder_dim)
        self.decoder_pred = nn.Linear(decoder_dim, 4**2 * 3)

    def patchify(self, imgs: Tensor) -> Tensor:
        p, h = 4, imgs.shape[2] // 4
        x = imgs.reshape(imgs.shape[0], 3, h, p, h, p)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(imgs.shape[0], h * h, p**2 * 3)

    def random_masking(self, x: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        N, L, D = x.shape
        len_keep = int(L * (1 - mask_ratio))
        noise = torch.rand(N, L, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x_masked = torch.gather(x, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, dim=1, index=ids_restore), ids_restore

    def forward_encoder(self, x: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        x = self.patch_embed(x)
        x = x + self.pos_embed[:, 1:, :]
        x, mask, ids_restore = self.random_masking(x, mask_ratio)
        cls_tokens = (self.cls_token + self.pos_embed[:, :1, :]).expand(x.shape[0], -1, -1)
        x = torch.cat((cls_tokens, x), dim=1)
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x), mask, ids_restore

    def forward_decoder(self, x: Tensor, ids_restore: Tensor) -> Tensor:
        x = self.decoder_embed(x)
        mask_tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.cat([x[:, 1:, :], mask_tokens], dim=1)
        x_ = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1, :], x_], dim=1) + self.decoder_pos_embed
        for blk in self.decoder_blocks:
            x = blk(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:, :]

    def loss(self, batch: Any) -> Tensor:
        imgs, _ = batch
        latent, mask, ids_restore = self.forward_encoder(imgs, 0.75)
        loss = (self.forward_decoder(latent, ids_restore) - self.patchify(imgs)) ** 2
        return (loss.mean(dim=-1) * mask).sum() / mask.sum()


# -- several views -----------------------------------------------------------------------------------------------------


class Views(WithoutAdam, Images):
    """Two views of each image."""

    size = 32

    def sample(self, index: int, generator: torch.Generator) -> Any:
        image, _ = super().sample(index, generator)
        noise = 0.3 * torch.randn(image.shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return image, image.flip(-1) + noise


def small_resnet() -> nn.Sequential:
    """What lightly's examples do with torchvision's: everything but the last layer."""
    return nn.Sequential(*list(ResNet().children())[:-1])


class ProjectionHead(nn.Module):
    def __init__(self, blocks: list[tuple[int, int, nn.Module | None, nn.Module | None]]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for input_dim, output_dim, batch_norm, non_linearity in blocks:
            layers.append(nn.Linear(input_dim, output_dim, bias=not bool(batch_norm)))
            layers += [layer for layer in (batch_norm, non_linearity) if layer]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def head(*widths: int) -> ProjectionHead:
    *inner, last = itertools.pairwise(widths)
    return ProjectionHead([*((i, o, nn.BatchNorm1d(o), nn.ReLU()) for i, o in inner), (*last, None, None)])


def negative_cosine_similarity(x0: Tensor, x1: Tensor) -> Tensor:
    return -F.cosine_similarity(x0, x1, 1, 1e-8).mean()


class SimSiam(Views):
    """lightly's SimSiam: one network for two views, a predictor, and a gradient that stops."""

    def build(self) -> None:
        self.backbone = small_resnet()
        self.projection_head = head(8, 8, 8)
        self.prediction_head = head(8, 4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.backbone(x).flatten(start_dim=1)
        z = self.projection_head(f)
        p = self.prediction_head(z)
        return z.detach(), p

    def loss(self, batch: Any) -> Tensor:
        x0, x1 = batch
        z0, p0 = self.forward(x0)
        z1, p1 = self.forward(x1)
        return 0.5 * (negative_cosine_similarity(z0, p1) + negative_cosine_similarity(z1, p0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.002, momentum=0.9)


class SimCLR(Views):
    """UvA's SimCLR: both views in one batch, and a loss of all samples together."""

    def build(self) -> None:
        self.convnet = ResNet(num_classes=8)
        self.convnet.fc = nn.Sequential(self.convnet.fc, nn.ReLU(inplace=True), nn.Linear(8, 4))

    def info_nce_loss(self, batch: Any, mode: str) -> Tensor:
        feats = self.convnet(torch.cat(batch, dim=0))
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim.masked_fill_(self_mask, -9e15)
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        cos_sim = cos_sim / 0.5
        nll = (-cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)).mean()
        self.log(mode + "_loss", nll, sync_dist=True)
        comb_sim = torch.cat([cos_sim[pos_mask][:, None], cos_sim.masked_fill(pos_mask, -9e15)], dim=-1)
        sim_argsort = comb_sim.argsort(dim=-1, descending=True).argmin(dim=-1)
        self.log(mode + "_acc_top1", (sim_argsort == 0).double().mean(), sync_dist=True)
        self.log(mode + "_acc_mean_pos", 1 + sim_argsort.double().mean(), sync_dist=True)
        return nll

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.info_nce_loss(batch, mode="train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.info_nce_loss(batch, mode="val")


def encoder_blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList([ViTBlock(8, 2) for _ in range(count)])


class Encoder(nn.Module):
    """A ViT without a head: what a teacher is a copy of."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(32, 8, 8)
        self.blocks = encoder_blocks(depth)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x).mean(1)


@torch.no_grad()
def update_momentum(model: nn.Module, model_ema: nn.Module, m: float) -> None:
    for model_ema_param, model_param in zip(model_ema.parameters(), model.parameters(), strict=True):
        model_ema_param.data = model_ema_param.data * m + model_param.data * (1.0 - m)


def deactivate_requires_grad(model: nn.Module) -> None:
    for param in model.parameters():
        param.requires_grad = False


class MeanTeacher(Views):
    """A teacher that is a moving average of the student, updated in a hook after each batch (MoCo v3, bolts' BYOL)."""

    def build(self) -> None:
        self.student = Encoder()
        self.predictor = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8))
        self.teacher = copy.deepcopy(self.student)
        deactivate_requires_grad(self.teacher)

    def loss(self, batch: Any) -> Tensor:
        x0, x1 = batch
        with torch.no_grad():
            z0, z1 = self.teacher(x0), self.teacher(x1)
        p0, p1 = self.predictor(self.student(x0)), self.predictor(self.student(x1))
        return 0.5 * (negative_cosine_similarity(p0, z1) + negative_cosine_similarity(p1, z0))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        update_momentum(self.student, self.teacher, 0.9)


class BufferTeacher(MeanTeacher):
    """The same by `lerp_` on a list of the parameters, as `torch.optim.swa_utils` does it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for averaged, current in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                averaged.lerp_(current, 0.1)


class BYOL(MeanTeacher):
    """lightly's BYOL and DINO: the teacher is updated at the beginning of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        update_momentum(self.student, self.teacher, m=0.9)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass
