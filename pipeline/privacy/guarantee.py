"""Statements of a release: the rows that were left out, and the guarantee with its NOT PRIVATE mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.privacy.mechanism import NAMES, OF_LEVELS, Mechanism, PublicLabels

if TYPE_CHECKING:
    from private_rlhf.privacy.keys import PrivacyKey

NOT_PRIVATE = "NOT PRIVATE"
REASONS = {  # by key mode
    "none": "epsilon is infinite: the labels were declared public and are released as they are",
    "insecure_seed": "the flips derive from a seed, so anyone who guesses the seed can undo them",
}


@dataclass
class DropCounts:
    """Counts of rows that were left out, by reason; each a symmetric function of the two responses of every row.

    identical: the two responses are the same. empty: prompt or a response has no text. duplicates: an earlier row
    holds the same unordered pair (the first is kept, whatever the labels say). over_cap: one person has more events
    than are released of anyone (a choice that depends on no label); None without such a cap. ties: their labels said
    so, which leaving them out reveals; None where the holder did not ask for that. unjudged: no judgement of them was
    read. Which pairs have one is not protected: the released rows tell it. None where all have one.
    """

    identical: int = 0
    empty: int = 0
    duplicates: int = 0
    over_cap: int | None = None
    ties: int | None = None
    unjudged: int | None = None

    def as_dict(self) -> dict[str, int]:
        """For the manifest."""
        return {name: count for name, count in asdict(self).items() if count is not None}


DROPPED = {
    "identical": "identical responses",
    "empty": "an empty prompt or response",
    "duplicates": "a pair that an earlier row holds",
    "over_cap": "a person over the cap",
    "ties": "a tie",
    "unjudged": "a task without a judgement",
}
"""Reasons of `DropCounts` for people."""


def dropped_text(dropped: Mapping[str, int], what: str = "rows") -> str:
    """Counts by reason: "146 rows left out (100 for identical responses, 46 for a tie)", or "no rows left out"."""
    reasons = [f"{count} for {DROPPED.get(reason, reason)}" for reason, count in dropped.items() if count]
    return f"{sum(dropped.values())} {what} left out ({', '.join(reasons)})" if reasons else f"no {what} left out"


def nothing_left(source: str, counts: DropCounts) -> UserError:
    """The error of a source of which every row was dropped."""
    others = {"over_cap": "were over the cap per person", "ties": "were ties", "unjudged": "had no judgement"}
    over = "".join(f", {n} {others[reason]}" for reason, n in counts.as_dict().items() if n and reason in others)
    return UserError(
        f"{source}: no rows are left; {counts.identical} had identical responses and {counts.empty} an empty prompt"
        f" or response{over}; check that `chosen` and `rejected` are two different answers to the prompt"
    )


LOCAL = {  # what differs where each answer was randomised before anyone had it, by the operating system's coins
    "statement": "for each event, P[z | label] <= e^epsilon P[z | other label]; there is no key to lose",
    "several_releases": "each event is drawn once; a second draw of the same event would add its epsilon",
}


RandomisedBy = Literal["page", "command", "terminal", "label-filter", "files"]
"""In local mode, where true answers became private labels; `files`: not known, they came in a file."""
RANDOMISED_BY: tuple[RandomisedBy, ...] = get_args(RandomisedBy)
TRUSTED: Mapping[str | None, str] = {
    "page": "the page and the browser in which each person answers; what they send is private already",
    "command": "the machine where answers are given, and the program that gives them: this process saw the true labels"
    " and randomised each before it was stored",
    "terminal": "the machine where answers are given: this process saw the true labels and randomised each before it"
    " was stored",
    "label-filter": "the machine where label-filter ran, and whatever gave it the true labels; its record holds the"
    " draw of every answer",
    "files": "whoever wrote answers.jsonl, and every machine that saw answers before they were randomised",
    None: "not known: it is not recorded where the labels were randomised",
}
CLAIMS: Mapping[str | None, str] = {
    "files": "as stated by whoever wrote answers.jsonl; not verified here",
    None: "as stated without a record of who randomised the labels; not verified here",
}
UNSIGNED_CLAIM = "as stated by an unsigned manifest; not verified here"


def key_mode(mechanism: Mechanism, key: PrivacyKey | None) -> str:
    """Source of the randomness: "keyed", "insecure_seed" or "none" (public labels). UserError without a key."""
    if isinstance(mechanism, PublicLabels):
        return "none"
    if key is None:
        raise UserError(
            "privatising needs a key; make one with `private-rlhf keygen --output FILE` and pass --key FILE"
        )
    return key.mode


def guarantee(mechanism: Mechanism, key: PrivacyKey | None) -> dict[str, Any]:
    """The mechanism's guarantee with the key mode, and the NOT PRIVATE mark (otherwise null) with its reason."""
    return stated(mechanism, key_mode(mechanism, key))


def stated(
    mechanism: Mechanism, mode: str, randomised_by: RandomisedBy | None = None, unsigned: bool = False
) -> dict[str, Any]:
    """`guarantee` where the key mode is known and the key is not. randomised_by: in local mode, where that is known.
    unsigned: it was taken over from a bundle that nobody signed."""
    facts = mechanism.guarantee() | {"key_mode": mode} | (LOCAL if mode == "local" else {})
    if mode == "local" and "levels" in facts:
        facts["statement"] += f"; {OF_LEVELS}"
    facts |= {"randomised_by": randomised_by} if mode == "local" and randomised_by else {}
    facts |= {"unsigned": True} if unsigned and mode not in REASONS else {}
    return facts | {"mark": NOT_PRIVATE if mode in REASONS else None, "mark_reason": REASONS.get(mode)}


def claim_of(facts: Mapping[str, Any]) -> str | None:
    """By whose word the labels of a release are private, by its guarantee; None where this program made them so, or a
    key's holder signed for it."""
    if facts.get("unsigned"):
        return UNSIGNED_CLAIM
    return CLAIMS.get(facts.get("randomised_by")) if facts["key_mode"] == "local" else None


def who_is_trusted(facts: Mapping[str, Any]) -> str:
    """The parties that see true labels, and so must be trusted with them, by a release's guarantee."""
    mode, claim = facts["key_mode"], claim_of(facts)
    if mode in REASONS:
        return "everybody who sees the release: it is not private"
    if mode == "local":
        trusted = TRUSTED[facts.get("randomised_by")]
    else:
        trusted = (
            "whoever holds the raw labels or the key, until each label is randomised; training, and whoever sees only"
            " what is released, sees no true label"
        )
    return f"{trusted} ({claim})" if claim else trusted


DECLARED_PUBLIC = "LABELS DECLARED PUBLIC"
SYNTHETIC = (
    "this program, from a reward that it knows (r*): they are synthetic, so nobody is behind them; they are treated as"
    " people's, and only the judge that is called truth uses r*"
)
NO_CLAIM_ROW = "no claim: see the mark"
NO_CLAIM = "the holder of the labels declares them public or synthetic, so no protection is claimed"


@dataclass(frozen=True)
class PrivacyStatus:
    """Facts that a page may state about privacy.

    epsilon: of one label; None for ∞. keep_prob: in [0.5, 1]. reasons: why nothing is private; empty otherwise.
    declared_public: their holder declared the labels public or synthetic, whatever was done to them. trusted: who must
    be, with true labels. keyed: the promise assumes that nobody without the key can undo its function. claim: by whose
    word labels were randomised, where this program did not see it. pair_total: ε of all answers about any one pair;
    None where the release does not state it. levels: (ε, number of labels) where each label has an ε of its own, of
    which epsilon is the largest.
    """

    epsilon: float | None
    keep_prob: float
    reasons: tuple[str, ...] = ()
    declared_public: bool = False
    trusted: str = ""
    keyed: bool = False
    claim: str | None = None
    pair_total: float | None = None
    levels: tuple[tuple[float, int], ...] = ()

    @property
    def kept(self) -> str:
        """The probability that a label was kept, in per cent; of each level where each label has its own ε."""
        texts = [LabelNoise.of(epsilon).keep_text(percent=True) for epsilon, _ in self.levels]
        return f"{', '.join(texts)} by its level" if texts else self.noise.keep_text(percent=True)

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
    recipe asks for flips from a seed. UserError if the manifest states no guarantee, or one that cannot be or that this
    program does not give (the noisy sums of earlier versions).
    """
    try:
        guarantee = manifest["guarantee"]
        noise, mode, mark = LabelNoise.from_json(guarantee), guarantee["key_mode"], guarantee["mark"]
    except (KeyError, TypeError):
        raise UserError("the manifest does not state its guarantee; write the release again") from None
    except ValueError as error:
        raise UserError(f"the manifest states a guarantee that cannot be ({error}); write the release again") from None
    if guarantee["mechanism"] not in NAMES:
        raise UserError(f"the mechanism must be one that this program has, got {guarantee['mechanism']}: release again")
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
        mode == "keyed",
        claim_of(guarantee),
        (manifest.get("totals") or {}).get("record"),
        tuple((float(each), int(count)) for each, count in (manifest.get("levels") or {}).get("events", ())),
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
