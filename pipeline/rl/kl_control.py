"""The coefficient of the KL penalty: fixed, or adapted towards a target KL per response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KlController:
    """Proportional control of log kl_coef (Ziegler et al. 2019, section 2.2); fixed when `target` is None.

    It sets the penalty that PPO learns from. J, in history, evaluation and report, is always taken at ppo.kl_coef.

    Attributes:
        value: current coefficient, kept in [lower, upper].
        target: nats per response, or None.
        horizon: responses over which an error of 20 % changes the coefficient by about 20 %.
    """

    value: float
    target: float | None
    horizon: int
    lower: float = 1e-4
    upper: float = 1e3

    def update(self, mean_kl: float, responses: int) -> None:
        """Adapts to the mean KL (nats) of `responses` fresh rollouts."""
        if self.target is None:
            return
        error = min(max(mean_kl / self.target - 1.0, -0.2), 0.2)
        self.value = min(max(self.value * (1.0 + error * responses / self.horizon), self.lower), self.upper)
