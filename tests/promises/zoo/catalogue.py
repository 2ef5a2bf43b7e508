"""The zoo as data: a model, a batch, a loss, and the expected row of ``summary()`` for each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from promises.zoo import models
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """One architecture.

    ``rows`` maps a module's name, or a pattern of names, to its row of the summary for locoprop-m: the
    transfer; ``S: reason`` if there is no transfer and locoprop-s is used; ``fallback: reason``; or
    ``frozen``.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss
    rows: Mapping[str, str]
    loss_fn: Callable[..., Tensor] | None = F.cross_entropy  # the optimizer's loss_fn=
    silent: tuple[str, ...] = ()  # layers that take no part in the loss


sigmoid = F.binary_cross_entropy_with_logits
NO_KIND = "fallback: no local problem for this kind of module"
PARAMETRIZED = "fallback: its weight is computed (parametrized), not a parameter"
UNCALLED = "fallback: nn.MultiheadAttention does not call its projections"
ADD, HEADS = "S: followed by Add", "S: followed by Transpose"
ATTENTION = {
    "*query": HEADS,
    "*key": HEADS,
    "*value": HEADS,
    "*attention.out": ADD,
    "*cross.out": ADD,
    "*norm*": NO_KIND,
    "*up": "relu",
    "*down": ADD,
    "head": "softmax",
}


def images() -> Batch:
    """Return sixteen images of a bar, horizontal or vertical, in one of two halves: four classes."""
    x, labels = 0.1 * torch.randn(16, 1, 8, 8), torch.arange(16) % 4
    for image, label in zip(x[:, 0], labels.tolist(), strict=True):
        half = slice(0, 4) if label % 2 else slice(4, 8)
        image[(half, slice(None)) if label < 2 else (slice(None), half)] += 1.0
    return x, labels


def videos() -> Batch:
    x, labels = images()
    return x.unsqueeze(2) * torch.linspace(0, 1, 4).reshape(4, 1, 1), labels


def vectors() -> Batch:
    x, labels = images()
    return F.avg_pool2d(x, 2).flatten(1), labels


def greys() -> Batch:
    return (torch.sigmoid(4 * vectors()[0]),)


def masks() -> Batch:
    x, _ = images()
    return x, (x > 0.5).to(x)


def sentences() -> Batch:
    """Return sequences that count up from any token: each token determines the next."""
    tokens = (torch.arange(7) + torch.arange(8)[:, None]) % 12
    return tokens[:, :-1], tokens[:, 1:]


def tagged() -> Batch:
    tokens, _ = sentences()
    return tokens, tokens % 5


def labelled() -> Batch:
    tokens, _ = sentences()
    return tokens, tokens[:, 0] % 4


def classify(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, labels = batch
    logits = model(*inputs)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def segment(model: nn.Module, batch: Batch) -> Tensor:
    return sigmoid(model(batch[0]), batch[1])


def reconstruct(model: nn.Module, batch: Batch) -> Tensor:
    return sigmoid(model(batch[0]), batch[0])


def translate(model: nn.Module, batch: Batch) -> Tensor:
    return classify(model, (batch[0], *batch))


def evidence(model: nn.Module, batch: Batch) -> Tensor:
    logits, mean, scale = model(batch[0])
    divergence = 0.5 * (mean.square() + scale.square() - 1) - scale.log()
    return sigmoid(logits, batch[0]) + 0.01 * divergence.mean()


def two_heads(model: nn.Module, batch: Batch) -> Tensor:
    one, two = model(batch[0])
    return F.cross_entropy(one, batch[1]) + F.cross_entropy(two, batch[1] % 2)


def noise() -> Batch:
    return (torch.randn(8, 4),)


def real_and_fake() -> Batch:
    return images()[0], torch.rand(16, 1, 8, 8)


@cache
def critic() -> nn.Module:
    """Return a discriminator that does not train, with confident outputs, for the generator's loss."""
    discriminator = models.Discriminator().double().eval().requires_grad_(False)
    discriminator.head.weight *= 10
    return discriminator


def fool(model: nn.Module, batch: Batch) -> Tensor:
    verdict = critic()(model(batch[0]))
    return sigmoid(verdict, torch.ones_like(verdict))


def tell_apart(model: nn.Module, batch: Batch) -> Tensor:
    real, fake = model(batch[0]), model(batch[1])
    return sigmoid(real, torch.ones_like(real)) + sigmoid(fake, torch.zeros_like(fake))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 9), nn.Dropout(0.1), nn.Tanh(), nn.Linear(9, 4)
    )  # fmt: skip


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 4), nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 16)
    )  # fmt: skip


NORMED = "S: followed by NativeBatchNorm"
LATER = "?: no backward pass has reached it yet"

ZOO: dict[str, Case] = {
    "MLP": Case(mlp, vectors, classify, {"0": "relu", "2": "S: followed by Mul", "5": "softmax"}),
    "autoencoder": Case(
        autoencoder,
        greys,
        reconstruct,
        {"0": "tanh", "2": "linear", "3": "tanh", "5": "sigmoid"},
        sigmoid,
    ),
    "LeNet": Case(
        models.LeNet,
        images,
        classify,
        {"one": "tanh", "two": "tanh", "hidden": "tanh", "head": "softmax"},
    ),
    "ResNet": Case(
        models.ResNet,
        images,
        classify,
        {
            "stem": "relu",
            "blocks.*.conv?": NORMED,
            "blocks.1.shortcut": ADD,
            "*norm?": NO_KIND,
            "head": "softmax",
        },
    ),
    "U-Net": Case(
        models.UNet,
        masks,
        segment,
        {
            "down?": "relu",
            "bottom": "elu",
            "up2": "S: followed by Cat",
            "up1": "relu",
            "head": "sigmoid",
        },
        sigmoid,
    ),
    "MobileNet": Case(
        models.MobileNet,
        images,
        classify,
        {
            "stem": "S: hardswish is not monotone: it has no matching loss",
            "block.expand": "relu6",
            "block.depthwise": "relu6",
            "block.project": "S: followed by NativeGroupNorm",
            "block.norm": NO_KIND,
            "head": "softmax",
        },
    ),
    "Conv3d": Case(
        models.Video, videos, classify, {"one": "leaky_relu", "two": "softplus", "head": "softmax"}
    ),
    "MLP-Mixer": Case(
        models.Mixer,
        images,
        classify,
        {
            "patches": HEADS,
            "block.tokens1": "S: gelu is not monotone: it has no matching loss",
            "block.tokens2": HEADS,
            "block.channels1": "relu",
            "block.channels2": ADD,
            "*norm?": NO_KIND,
            "head": "softmax",
        },
    ),
    "ViT": Case(models.ViT, images, classify, {**ATTENTION, "patches": HEADS, "(model)": NO_KIND}),
    "GPT": Case(
        models.GPT, sentences, classify, {**ATTENTION, "tokens": NO_KIND, "places": NO_KIND}
    ),
    "tied embeddings": Case(
        lambda: models.GPT(tied=True),
        sentences,
        classify,
        {
            **ATTENTION,
            "tokens": NO_KIND,
            "places": NO_KIND,
            "head": "fallback: tied: a parameter is shared by 'tokens', 'head'",
        },
    ),
    "encoder-decoder": Case(
        models.EncoderDecoder,
        sentences,
        translate,
        {**ATTENTION, "source": NO_KIND, "target": NO_KIND},
    ),
    "nn.Transformer": Case(
        models.TorchTransformer,
        sentences,
        translate,
        {
            "*.linear1": "relu",
            "*.linear2": ADD,
            "*.out_proj": UNCALLED,
            "*_attn": UNCALLED,
            "*norm*": NO_KIND,
            "tokens": NO_KIND,
            "head": "softmax",
        },
    ),
    "shared in depth": Case(
        models.SharedInDepth, sentences, classify, {**ATTENTION, "tokens": NO_KIND}
    ),
    "GRU tagger": Case(
        models.Tagger,
        tagged,
        classify,
        {"tokens": NO_KIND, "gru": NO_KIND, "project": "tanh", "hidden": "tanh", "head": "softmax"},
    ),
    "Elman": Case(
        models.Elman, tagged, classify, {"tokens": NO_KIND, "cell": "tanh", "head": "softmax"}
    ),
    "text CNN": Case(
        models.TextCNN,
        labelled,
        classify,
        {"tokens": NO_KIND, "widths.?": "relu", "dilated": "sigmoid", "head": "softmax"},
    ),
    "VAE": Case(
        models.VAE,
        greys,
        evidence,
        {
            "encoder": "tanh",
            "mean": ADD,
            "scale": "softplus",
            "decoder.0": "elu",
            "decoder.2": "sigmoid",
        },
        sigmoid,
    ),
    "GAN generator": Case(
        models.Generator,
        noise,
        fool,
        {"project": "relu", "up": NORMED, "norm": NO_KIND, "out": "sigmoid"},
        None,
    ),
    "GAN discriminator": Case(
        models.Discriminator,
        real_and_fake,
        tell_apart,
        {"one": "leaky_relu", "two": PARAMETRIZED, "two.*": NO_KIND, "head": "sigmoid"},
        sigmoid,
    ),
    "experts": Case(
        models.Experts,
        vectors,
        classify,
        {
            "gate": "softmax",
            "experts.[01].0": "S: silu is not monotone: it has no matching loss",
            "experts.[01].2": "S: followed by Mul",
            "experts.2.?": LATER,
        },
        silent=("experts.2.0", "experts.2.2"),
    ),
    "graph": Case(
        models.Graph,
        vectors,
        classify,
        {"one": "S: followed by Mm", "two": "relu", "head": "softmax"},
    ),
    "odd": Case(
        models.Odd,
        vectors,
        two_heads,
        {
            "frozen*": "frozen",
            "twice": "S: called with different transfers",
            "normed": PARAMETRIZED,
            "spectral": PARAMETRIZED,
            "*.parametrizations.weight": NO_KIND,
            "functional": "S: its forward is not called: it takes BackProp steps",
            "silent": LATER,
            "detached": LATER,
            "unused": LATER,
            "*head": "softmax",
        },
        silent=("silent", "detached", "unused"),
    ),
}
