"""The learning-rate schedule of the benchmark."""

from collections.abc import Callable


def warmup_then_decay(*, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the factor of the peak learning rate as a function of the step, for `LambdaLR`.

    The factor rises linearly to one over the first `warmup_steps` steps, then falls linearly and
    would be zero only at the step after the last. It never is zero: TensorFlow's RMSProp keeps the
    learning rate inside the momentum, so at a rate of exactly zero the weights would coast on the
    old momentum, away from the minimum and with no gradient to correct them.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"Invalid warmup_steps={warmup_steps}, total_steps={total_steps}. "
            "Must be 0 <= warmup_steps < total_steps."
        )

    def factor(step: int) -> float:
        rising = (step + 1) / max(warmup_steps, 1)
        falling = max(total_steps - step, 1) / (total_steps - warmup_steps + 1)
        return rising if step < warmup_steps else falling

    return factor
