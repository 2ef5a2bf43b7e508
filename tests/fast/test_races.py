"""No stream reads what another has not written yet, or writes what another still reads.

A step runs on a CPU with emulated streams. Each stream knows how many operations it has run, and how
many each other stream had run when it last waited for it. Every operation is checked against this.
Freed memory is checked too: the next tensor of the stream that owns it may reuse it, even if another
stream still reads it.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from streams import CUDA, Stream
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_locoprop import LocoProp, TrainingStep
from torch_locoprop.fast import cuda_graph, cuda_streams, overlapped_weight_grads


class Use(NamedTuple):
    """An operation on a stream, and its number on that stream."""

    stream: str
    number: int
    operation: str

    def comes_before(self, stream: Stream) -> bool:
        return stream.known[self.stream] >= self.number


class Memory:
    """The memory of a tensor and its uses, while it is alive."""

    def __init__(self, tensor: Tensor, owner: str) -> None:
        self.alive = StorageWeakRef(tensor.untyped_storage())
        self.owner = owner
        self.written: Use | None = None
        self.read: list[Use] = []

    @property
    def uses(self) -> list[Use]:
        return self.read if self.written is None else [*self.read, self.written]


class Watch(TorchDispatchMode):
    """Checks for every operation that its stream has waited for earlier uses of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Memory] = {}
        self.freed: list[Memory] = []
        self.races: list[str] = []
        self.streams: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._notice_freed()
        given = _tensors((args, kwargs))
        places = {_place(t) for t in given}
        result = func(*args, **kwargs)
        new = [t for t in _tensors(result) if _place(t) not in places]
        if not new and _tensors(result) and not func._schema.is_mutable:
            return result  # a view
        stream = CUDA.now
        stream.known[stream.name] += 1
        self.streams.add(stream.name)
        use = Use(stream.name, stream.known[stream.name], str(func))
        written = {_place(t) for t in _written(func, args, kwargs)}
        for place, tensor in {_place(t): t for t in given}.items():
            self._use(
                self.known.setdefault(place, Memory(tensor, stream.name)), use, place in written
            )
        if new:
            self._take_freed(use)
        for tensor in new:
            self.known[_place(tensor)] = Memory(tensor, stream.name)
            self.known[_place(tensor)].written = use
        return result

    def _use(self, memory: Memory, use: Use, writes: bool) -> None:
        earlier = memory.uses if writes else [memory.written] if memory.written else []
        self._check(earlier, use)
        if writes:
            memory.written, memory.read = use, []
        else:
            memory.read.append(use)

    def _check(self, earlier: list[Use], use: Use) -> None:
        for each in earlier:
            if not each.comes_before(CUDA.now):
                self.races.append(
                    f"{use.operation} on {use.stream} does not wait for {each.operation} on "
                    f"{each.stream}"
                )

    def _notice_freed(self) -> None:
        dead = [place for place, memory in self.known.items() if memory.alive.expired()]
        self.freed += [self.known.pop(place) for place in dead]

    def _take_freed(self, use: Use) -> None:
        """Check a new tensor against memory that the same stream has freed, which it may reuse."""
        for memory in self.freed:
            if memory.owner == use.stream:
                self._check(memory.uses, use)
        self.freed = [memory for memory in self.freed if memory.owner != use.stream]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    named = {argument.name: argument for argument in arguments}
    pairs = [*zip(arguments, args, strict=False), *((named[k], v) for k, v in kwargs.items())]
    return [
        tensor
        for argument, value in pairs
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    ]


def deep(
    transfer: Callable[[], nn.Module] = nn.Tanh, code: Callable[[], nn.Module] = nn.Tanh
) -> Any:
    widths, layers = (6, 8, 7, 5, 7, 8, 6), []
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        layers += [nn.Linear(inputs, outputs), code() if place == 2 else transfer()]
    return nn.Sequential(*layers, nn.Linear(6, 3))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.again(self.first(x)).tanh()).tanh())


def weights_alone(model: nn.Module) -> dict[str, Any]:
    """Return settings that train weights only: the gradients of biases are never cleared."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return {"param_groups": [{"params": weights}]}


def races(
    cuda: CUDA,
    make: Callable[[], nn.Module],
    settings: dict[str, Any] | Callable[[nn.Module], dict[str, Any]],
    passes: int = 1,
) -> Watch:
    """Return what was found in the last of four steps."""
    torch.manual_seed(0)
    model = make()
    own = settings(model) if callable(settings) else settings
    opt = LocoProp(model, **{"lr": 1e-3, "gamma": 5.0, "weight_decay": 0.3, **own})
    for _ in range(4):
        x, y = torch.randn(40, 6), torch.randn(40, 3)
        with Watch() as found:
            with cuda_streams.overlapping_backward():
                loss = nn.functional.mse_loss(model(x), y, reduction="sum")
                for left in reversed(range(passes)):
                    loss.backward(retain_graph=left > 0)
                opt.step()
            opt.zero_grad()
        cuda.synchronize()
    return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CUDA:
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: True)
    return CUDA(monkeypatch)


@pytest.mark.parametrize(
    ("make", "settings", "passes"),
    [
        pytest.param(deep, {}, 1, id="LocoProp-M"),
        pytest.param(deep, {"variant": "locoprop-s"}, 1, id="LocoProp-S"),
        pytest.param(deep, {"variant": "pocoprop-m"}, 1, id="PocoProp-M"),
        pytest.param(deep, {"variant": "pocoprop-s"}, 1, id="PocoProp-S"),
        pytest.param(deep, {"local_steps": 1}, 1, id="BackProp"),
        pytest.param(deep, {"solver": "sgd"}, 1, id="SGD"),
        pytest.param(deep, {"gate": True, "cap": 0.01}, 1, id="gate and cap"),
        pytest.param(deep, {}, 2, id="two passes"),
        pytest.param(deep, weights_alone, 1, id="weights alone"),
        pytest.param(lambda: deep(code=nn.Identity), {}, 1, id="linear code"),
        pytest.param(lambda: deep(lambda: nn.ReLU(inplace=True)), {}, 1, id="in place"),
        pytest.param(Twice, {}, 1, id="called twice"),
    ],
)
def test_nobody_reads_too_early_or_writes_too_soon(
    make: Callable[[], nn.Module], settings: Any, passes: int, cuda: CUDA
) -> None:
    found = races(cuda, make, settings, passes)
    assert found.races == []
    assert any(name.startswith("side") for name in found.streams)


def test_gradients_are_beside(cuda: CUDA) -> None:
    assert "gradient 0" in races(cuda, deep, {}).streams


@pytest.mark.parametrize("missing", ["enter_gradient_stream", "mark", "hold", "join"])
def test_what_would_be_found(missing: str, cuda: CUDA, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race is found if one of the waits is left out."""
    if missing == "enter_gradient_stream":
        wait = Stream.wait_stream
        lonely = lambda self, other: (  # noqa: E731
            None if self.name.startswith("gradient") else wait(self, other)
        )
        monkeypatch.setattr(Stream, "wait_stream", lonely)
    elif missing == "mark":
        monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    elif missing == "hold":
        monkeypatch.setattr(cuda_streams, "_read", _Nothing())
    else:
        monkeypatch.setattr(overlapped_weight_grads, "_are_assigned", lambda layer: True)
    assert races(cuda, Twice if missing == "join" else deep, {}).races


def clip(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.1, 0.1)


def clip_in_place(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("case", ["plain", "penalty", "hook", "hook after", "called twice"])
def test_training_steps_in_which_others_use_the_gradients(
    case: str, cuda: CUDA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of gradients and hooks on them would not wait for overlapped gradients."""
    monkeypatch.setattr(cuda_graph, "is_recording", lambda: True)
    model = Twice() if case == "called twice" else deep()
    for p in model.parameters():
        if case == "hook":
            p.register_hook(clip)
        if case == "hook after":
            p.register_post_accumulate_grad_hook(clip_in_place)

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(out, y)
        penalty = sum(p.square().sum() for p in model.parameters())
        return loss + penalty if case == "penalty" else loss

    step = TrainingStep(model, loss_fn, LocoProp(model, lr=1e-3))
    for _ in range(4):
        with Watch() as found:
            step._take([torch.randn(40, 6), torch.randn(40, 3)])
        cuda.synchronize()
    assert found.races == []
    assert ("gradient 0" in found.streams) == (case == "plain")


class _Nothing(list[Tensor]):
    def extend(self, more: Any) -> None:
        pass
