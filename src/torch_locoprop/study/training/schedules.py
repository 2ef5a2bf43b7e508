"""The learning-rate schedules by name: factors of the peak rate as a function of epoch and step."""

from collections.abc import Callable

Rate = Callable[[int, int], float]
"""From the epoch and the step within it, both from zero, to the factor of the peak rate."""


def paper(epochs: int, warmup_epochs: int) -> Callable[[int], float]:
    """Return the published reference's factor as a function of the epoch, constant within it.

    The first epoch of a warm-up runs at zero: weights stand still and adaptive averages settle. The
    reference stops before the last epoch, whose factor would be zero too; here that epoch has half
    a decrement, because with a learning rate inside the momentum, as in TensorFlow's RMSProp, the
    weights would coast through it without a gradient to correct them.
    """
    falling = epochs - warmup_epochs

    def factor(epoch: int) -> float:
        if epoch < warmup_epochs:
            return epoch / warmup_epochs
        return max(1 - (epoch + 1 - warmup_epochs) / falling, 0.5 / falling)

    return factor


def linear(steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Return the factor as a function of the step, in a line up to one and in a line down.

    It would be zero only at the step after the last, for the reason that `paper` gives.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return (steps - step) / (steps - warmup_steps + 1)

    return factor


def _paper(epochs: int, warmup_epochs: int, steps: int) -> Rate:
    factor = paper(epochs, warmup_epochs)
    return lambda epoch, step: factor(epoch)


def _linear(epochs: int, warmup_epochs: int, steps: int) -> Rate:
    factor = linear(epochs * steps, warmup_epochs * steps)
    return lambda epoch, step: factor(epoch * steps + step)


_SCHEDULES: dict[str, Callable[[int, int, int], Rate]] = {"paper": _paper, "linear": _linear}

NAMES = tuple(_SCHEDULES)


def rate(schedule: str, *, epochs: int, warmup_epochs: int, steps: int) -> Rate:
    """Return the schedule for so many epochs of so many steps.

    The warm-up takes at most half of the epochs, so that a short run has a decay too.
    """
    return _SCHEDULES[schedule](epochs, min(warmup_epochs, epochs // 2), steps)
