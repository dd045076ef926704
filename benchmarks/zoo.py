"""The models of docs/coverage.md: small ones of the kinds that people train, with random weights and without dropout.

Each comes with inputs, and with the loss of any of its samples: the loss of a batch is the sum over its samples,
divided by the batch, so that what one sample adds to the gradient is defined without any of gradwire's code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, CLASSES = 4, 7, 23, 5
Loss = Callable[[nn.Module, slice], Tensor]


@dataclass(frozen=True)
class Kind:
    """A model, its batch, and the sum of the losses of some of its samples; options: of gradwire.attach.

    interacting: samples meet in a batch norm that trains, and contributions go by activation index.
    """

    name: str
    net: nn.Module
    loss: Loss
    batch: int = BATCH
    options: dict[str, Any] = field(default_factory=dict)
    interacting: bool = False


def like(net: nn.Module, x: Tensor) -> Tensor:
    """The inputs in the model's dtype."""
    return x.to(next(net.parameters()).dtype)


def text(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def by_token(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over samples of the mean over tokens."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / labels.shape[-1]


# ---- images


def load_torchvision() -> Any:
    """torchvision, also where its operators do not load: PyPI's is built for CUDA, and beside a CPU's torch the names
    that it declares in C++ are missing. They are boxes' operators, which no model here uses.
    """
    sys.path.append(str(Path(sys.prefix) / "models"))  # where `make` puts it: transformers would import it and fail
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise ImportError(
            "the coverage table needs torchvision and timm: `make coverage`, or the extra gradwire[models]"
        )
    library = Path(found.origin).with_name("_C.so")
    try:
        torch.ops.load_library(str(library))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    return importlib.import_module("torchvision")


def classified(size: int = 32, batch: int = BATCH) -> Loss:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, CLASSES, (batch,))

    def loss(net: nn.Module, rows: slice) -> Tensor:
        return F.cross_entropy(net(like(net, images[rows])), labels[rows], reduction="sum")

    return loss


def images() -> Iterator[Kind]:
    models = load_torchvision().models
    from timm.models import VisionTransformer
    from torchvision.models.convnext import CNBlockConfig
    from torchvision.models.mobilenetv3 import InvertedResidualConfig
    from torchvision.models.swin_transformer import SwinTransformer

    def mobilenet() -> nn.Module:
        rows = [
            (16, 3, 16, 16, True, "RE", 2, 1),
            (16, 3, 32, 24, False, "HS", 2, 1),
            (24, 5, 48, 24, True, "HS", 1, 1),
        ]
        return models.MobileNetV3([InvertedResidualConfig(*row, 1.0) for row in rows], 32, CLASSES, dropout=0.0)

    def efficientnet() -> nn.Module:
        from torchvision.models.efficientnet import EfficientNet, MBConvConfig

        rows = [(1, 3, 1, 32, 16, 1), (4, 3, 2, 16, 24, 2), (4, 5, 2, 24, 32, 1)]
        blocks = [MBConvConfig(*row, 1.0, 1.0) for row in rows]
        return EfficientNet(blocks, 0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=64)

    # 64 pixels are 2 x 2 behind a resnet's last stage: of 1 x 1 the variance would be that of four numbers
    normalized = {
        "torchvision resnet18": lambda: models.resnet18(num_classes=CLASSES),
        "torchvision mobilenet_v3": mobilenet,
        "torchvision efficientnet": efficientnet,
    }
    for name, make in normalized.items():
        yield Kind(f"{name}, training", make().train(), classified(64, 8), 8, interacting=True)
        yield Kind(f"{name}, statistics frozen", settled(make()), classified(64, 8), 8)
    stages = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 1)]
    convnext = models.ConvNeXt(stages, stochastic_depth_prob=0.0, layer_scale=0.1, num_classes=CLASSES)
    yield Kind("torchvision convnext", convnext, classified())
    swin = SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES)
    yield Kind("torchvision swin", swin, classified())
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    yield Kind("timm ViT", VisionTransformer(**sizes, init_values=0.1), classified())


def settled(net: nn.Module) -> nn.Module:
    """With the statistics of a batch, and frozen."""
    net.train()
    with torch.no_grad():
        for _ in range(10):
            net(torch.randn(8, 3, 64, 64))
    return net.eval()


# ---- text and sound, from transformers


def transformers() -> Iterator[Kind]:
    import transformers as tr

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    bert = tr.BertForSequenceClassification(tr.BertConfig(**small, **words, **still, num_labels=CLASSES))
    ids, labels = text(), torch.randint(0, CLASSES, (BATCH,))

    def label(net: nn.Module, rows: slice) -> Tensor:
        return F.cross_entropy(net(input_ids=ids[rows]).logits, labels[rows], reduction="sum")

    yield Kind("BERT", bert, label)
    words_end = {"bos_token_id": None, "eos_token_id": None}
    silent = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    gpt2 = tr.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16, **silent, **words_end)
    yield Kind("GPT-2", tr.GPT2LMHeadModel(gpt2), next_token(text()))
    yield Kind("Llama", tr.LlamaForCausalLM(tr.LlamaConfig(**small, **words)), next_token(text()))
    mixtral = tr.MixtralConfig(**small, **words, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2)
    mixtral._experts_implementation = "eager"  # the others have no float64, which the truth is in
    yield Kind("Mixtral", tr.MixtralForCausalLM(mixtral), next_token(text()))
    yield Kind("T5", t5(tr), translated(BATCH))
    yield Kind(f"T5, batch = length = {LENGTH}", t5(tr), translated(LENGTH), batch=LENGTH)
    yield Kind("Whisper", *whisper(tr))


def next_token(ids: Tensor) -> Loss:
    def loss(net: nn.Module, rows: slice) -> Tensor:
        return by_token(net(input_ids=ids[rows]).logits[:, :-1], ids[rows, 1:])

    return loss


def t5(tr: Any) -> nn.Module:
    config = tr.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8,
    )  # fmt: skip
    return tr.T5ForConditionalGeneration(config)


def translated(batch: int) -> Loss:
    source, target = text(batch), text(batch)

    def loss(net: nn.Module, rows: slice) -> Tensor:
        return by_token(net(input_ids=source[rows], labels=target[rows]).logits, target[rows])

    return loss


def whisper(tr: Any) -> tuple[nn.Module, Loss]:
    config = tr.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=4, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, max_source_positions=8,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    sound, target = torch.randn(BATCH, 4, 16), text()

    def loss(net: nn.Module, rows: slice) -> Tensor:
        logits = net(input_features=like(net, sound[rows]), decoder_input_ids=target[rows]).logits
        return by_token(logits[:, :-1], target[rows, 1:])

    return tr.WhisperForConditionalGeneration(config), loss


# ---- plain torch


class NanoBlock(nn.Module):
    """Attention and a perceptron, each after a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """nanoGPT: positions are given to `wpe` as ids [T], and its output layer is tied to `wte`."""

    def __init__(self, block: int, width: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(block, width)
        self.h = nn.ModuleList(NanoBlock(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Any:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        return Logits(self.lm_head(self.ln_f(x)))


@dataclass
class Logits:
    """As the models of `transformers` answer."""

    logits: Tensor


class Recurrent(nn.Module):
    """A language model on an LSTM."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 12, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0])


def recurrent(ids: Tensor, batch_first: bool) -> Loss:
    def loss(net: nn.Module, rows: slice) -> Tensor:
        some = ids[rows]
        logits = net(some) if batch_first else net(some.T).transpose(0, 1)
        return by_token(logits[:, :-1], some[:, 1:])

    return loss


class TimeFirst(nn.Module):
    """Takes [B, T, F] and works on [T, B, F]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x.transpose(0, 1)).tanh())).transpose(0, 1)


def series(batch: int, length: int) -> Loss:
    x, labels = torch.randn(batch, length, 6), torch.randint(0, CLASSES, (batch, length))
    return lambda net, rows: by_token(net(like(net, x[rows])), labels[rows])


def siamese() -> Loss:
    """Contrastive: two forwards of one net, and one backward through both."""
    left, right, same = torch.randn(BATCH, 6), torch.randn(BATCH, 6), torch.tensor([1.0, 0.0, 1.0, 0.0])

    def loss(net: nn.Module, rows: slice) -> Tensor:
        apart = (net(like(net, left[rows])) - net(like(net, right[rows]))).square().sum(1)
        near = like(net, same[rows])
        return (near * apart + (1 - near) * (3 - (apart + 1e-3).sqrt()).clamp(min=0).square()).sum()

    return loss


class Experts(nn.Module):
    """A mixture of experts: a token goes to the expert that its id names, weighed by a gate."""

    def __init__(self, width: int = 8, count: int = 3) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(VOCABULARY, width), nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Any:
        tokens, route = self.table(input_ids).flatten(0, 1), input_ids.flatten() % len(self.experts)
        share = self.gate(tokens).softmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (route == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, mine, expert(tokens[mine]) * share[mine, number, None])
        return Logits(self.head(tokens + mixed).unflatten(0, input_ids.shape))


def routed(to_second: int) -> Tensor:
    """Ids [B, T] of which that many, those in front, go to expert 1; the others to 0 and 2."""
    count = BATCH * LENGTH
    ids = 3 * torch.randint(1, VOCABULARY // 3, (count,)) + 2 * torch.randint(0, 2, (count,))
    ids[:to_second] = 4
    return ids.view(BATCH, LENGTH)


def plain() -> Iterator[Kind]:
    yield Kind("nanoGPT", NanoGPT(LENGTH), next_token(text()))
    yield Kind(f"nanoGPT, batch = block = {LENGTH}", NanoGPT(LENGTH), next_token(text(LENGTH)), batch=LENGTH)
    yield Kind("LSTM language model, batch_first", Recurrent(True), recurrent(text(), True))
    told = {"batch_dim": 1}
    yield Kind("LSTM language model, [T, B] and batch_dim=1", Recurrent(False), recurrent(text(), False), options=told)
    yield Kind("time-first layers", TimeFirst(), series(BATCH, LENGTH))
    yield Kind("time-first layers, batch = time", TimeFirst(), series(LENGTH, LENGTH), batch=LENGTH)
    twins = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
    yield Kind("Siamese, two forwards and one backward", twins, siamese())
    yield Kind("MoE", Experts(), next_token(routed(9)))
    yield Kind("MoE, an expert gets as many tokens as the batch", Experts(), next_token(routed(BATCH)))


def kinds() -> Iterator[Kind]:
    """All of them, each time with the same weights and the same inputs."""
    torch.manual_seed(0)
    for family in (images, transformers, plain):
        yield from family()
