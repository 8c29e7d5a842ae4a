"""Privacy of a release or run, decided here from its files and printed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.privacy.guarantee import NOT_PRIVATE, REASONS, claim_of, who_is_trusted

DECLARED_PUBLIC = "LABELS DECLARED PUBLIC"
NO_CLAIM_ROW = "no claim: see the mark"
NO_CLAIM = "the holder of the labels declares them public or synthetic, so no protection is claimed"


@dataclass(frozen=True)
class PrivacyStatus:
    """Facts that a page may state about privacy.

    epsilon: of one label; None for ∞. keep_prob: in [0.5, 1]. reasons: why nothing is private; empty otherwise.
    declared_public: their holder declared the labels public or synthetic, whatever was done to them. trusted: who must
    be, with true labels. delta: of one noisy sum in place of the labels; None where the labels were randomised. keyed:
    the promise assumes that nobody without the key can undo its function. claim: by whose word labels were randomised,
    where this program did not see it. pair_total: ε of all answers about any one pair; None where the release does not
    state it.
    """

    epsilon: float | None
    keep_prob: float
    reasons: tuple[str, ...] = ()
    declared_public: bool = False
    trusted: str = ""
    delta: float | None = None
    keyed: bool = False
    claim: str | None = None
    pair_total: float | None = None

    @property
    def noise(self) -> LabelNoise:
        """Noise of each label."""
        return LabelNoise.from_json({"epsilon": self.epsilon, "keep_prob": self.keep_prob})

    @property
    def mark(self) -> str | None:
        """The mark on top of every page; None where the labels are protected."""
        return NOT_PRIVATE if self.reasons else DECLARED_PUBLIC if self.declared_public else None

    @property
    def mark_reason(self) -> str | None:
        """Reason for the mark; None without one."""
        return "; ".join(self.reasons) or (NO_CLAIM if self.declared_public else None)

    @property
    def several_answers(self) -> str:
        """A sentence about a pair that has several answers; empty where none has."""
        if self.pair_total is None or self.epsilon is None or self.pair_total <= self.epsilon:
            return ""
        return f"All answers about one pair together cost up to ε = {self.pair_total:g}. "

    @property
    def private(self) -> bool:
        """True if protection of the labels is claimed."""
        return self.mark is None


def status_of(
    manifest: Mapping[str, Any],
    *,
    overrides: Sequence[str | None] = (),
    declared_public: bool = False,
    seeded: bool = False,
) -> PrivacyStatus:
    """The status of whatever was made from a release; any single sign against privacy is enough.

    manifest: of the release. overrides: guards that were overruled. declared_public: `data.public_labels`. seeded: the
    recipe asks for flips from a seed. UserError if the manifest states no guarantee, or one that cannot be.
    """
    try:
        guarantee = manifest["guarantee"]
        noise, mode, mark = LabelNoise.from_json(guarantee), guarantee["key_mode"], guarantee["mark"]
    except (KeyError, TypeError):
        raise UserError("the manifest does not state its guarantee; write the release again") from None
    except ValueError as error:
        raise UserError(f"the manifest states a guarantee that cannot be ({error}); write the release again") from None
    reasons = []
    if noise.public:
        reasons.append(REASONS["none"])
    elif seeded or mode == "insecure_seed":
        reasons.append(REASONS["insecure_seed"])
    elif mark or manifest.get("mark"):
        reasons.append(str(guarantee.get("mark_reason") or mark or manifest["mark"]))
    reasons += sorted({reason for reason in overrides if reason} - set(reasons))
    epsilon = None if noise.public else noise.epsilon
    # A run that is not private may hold true labels in any of its files, whatever its release was made with.
    trusted = NO_CLAIM_ROW if reasons or declared_public else who_is_trusted(guarantee)
    return PrivacyStatus(
        epsilon,
        noise.keep_prob,
        tuple(reasons),
        declared_public,
        trusted,
        guarantee.get("delta"),
        mode == "keyed",
        claim_of(guarantee),
        (manifest.get("totals") or {}).get("record"),
    )


# --- who else had a hand in a run -------------------------------------------------------------------------------------


def external_reward(fit: Mapping[str, Any]) -> str | None:
    """Text of the card about a reward model that was not fitted in this run, from the fit's facts; otherwise None."""
    if fit.get("mode") != "external":
        return None
    if fit.get("fitted_by") == "others":
        return f"{fit['source']}, from outside this pipeline; the holder of the run declares its labels public"
    epsilon = fit.get("epsilon")
    labels = "public labels" if epsilon is None else f"labels released at ε = {epsilon:g} in another ledger"
    return f"{fit['source']}, fitted by this package to {labels}"


def extra_rewards(rewards: Sequence[Mapping[str, Any]]) -> str | None:
    """Text of the card about the rewards that PPO added to the private one (the ppo stage's report), or None."""
    texts = []
    for reward in rewards:
        what = external_reward(reward) or f"the function {reward['source']}; what it reads is not checked"
        texts.append(f"weight {reward['weight']:g}: {what}")
    return "; ".join(texts) or None


def outside_judge(judge: Mapping[str, Any]) -> str | None:
    """Text of the card about the judge that the recipe named (evaluation.json); None without one."""
    if judge.get("kind") == "chat":
        return (
            f"the chat model {judge['model']} at {judge['url']}, to which prompts and answers were sent; the holder of"
            " the run declares the labels it learned from public"
        )
    if judge.get("kind") == "language model":
        return f"the language model {judge['source']}; the holder of the run declares the labels it learned from public"
    if judge.get("kind") == "embeddings":
        return "a reward on sentence embeddings that was fitted to public labels (hh_truth)"
    return external_reward({**judge, "mode": "external"}) if judge else None
