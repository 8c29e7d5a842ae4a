"""`private-rlhf attack`: plants canaries, judges releases and run directories, prints or writes the result."""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from private_rlhf.audit.canaries import Truth, fair_coin, pair_key, plant, raw_truth, read_truth, truth_path
from private_rlhf.audit.judge import FAMILY_WISE
from private_rlhf.audit.seeds import ids
from private_rlhf.audit.statistics import Finding
from private_rlhf.audit.suite import NOT_EXAMINED, SPECS, Outcome, run_attacks
from private_rlhf.audit.view import build_view
from private_rlhf.core.atomic import write_json
from private_rlhf.core.errors import UserError, print_lines
from private_rlhf.core.noise import check_epsilon, is_public
from private_rlhf.core.outputs import json_with, output_file, run_directory
from private_rlhf.core.user import another_user
from private_rlhf.privacy.keys import keygen, named_or_default
from private_rlhf.privacy.records import is_blank

DEFAULT_CANARIES = 2000
RESULT = json_with("verdict", "judged_on", "attacks")
"""Recognises the result of this command."""
REPLAYED = (
    "canaries were replayed: the texts of this release with coins for labels, privatised anew by this program."
    "\nHow this release itself was made takes canaries planted before: private-rlhf attack SOURCE --plant FILE"
)


@dataclass(frozen=True)
class Request:
    """The options of the command; see `private-rlhf attack --help`. privatize: what makes the replayed releases."""

    targets: Sequence[Path]
    privatize: Privatize
    raw: str | None = None
    canaries: int | None = None
    key: Path | None = None
    truth: Path | None = None
    plant: Path | None = None
    carry: tuple[str, ...] = ()
    epsilon: float | None = None
    output: Path | None = None
    as_json: bool = False


def attack(request: Request) -> int:
    """Run the command and print its result. Returns 0 if no leak was found (or canaries were planted), 1 if one was.

    UserError: options that do not go together, or anything that cannot be read or written.
    """
    if request.canaries is not None and request.canaries < 1:
        raise UserError(f"--canaries {request.canaries}: give at least 1")
    if request.epsilon is not None:
        check_epsilon(request.epsilon, "--epsilon")
    if request.plant is not None:
        return _plant(request, request.plant)
    facts, text, leak = _judged(request)
    print_lines(json.dumps(facts, indent=2, allow_nan=False) if request.as_json else text)
    return 1 if leak else 0


def _plant(request: Request, planted: Path) -> int:
    options = {"--raw": request.raw, "--epsilon": request.epsilon, "--output": request.output}
    if unused := [name for name, value in options.items() if value is not None]:
        raise UserError(f"attack --plant takes a source, --canaries and --key or --truth, not {', '.join(unused)}")
    if len(request.targets) != 1:
        raise UserError("attack --plant takes one source of raw preferences; give a single path")
    truth = request.truth or truth_path(named_or_default(request.key))
    source, many = str(request.targets[0]), request.canaries or DEFAULT_CANARIES
    count = plant(source, planted, truth, many, columns=request.carry)
    print_lines(f"{count} canaries in {planted} (owner-only); their labels in {truth}: keep both secret.")
    print_lines(f"Release {planted} in place of the source; judge with: private-rlhf attack RELEASE --truth {truth}")
    return 0


def _truth_file(request: Request) -> Path | None:
    if request.truth is not None:
        return request.truth
    return truth_path(request.key) if request.key is not None else None


def _judged(request: Request) -> tuple[dict[str, Any], str, bool]:
    """(JSON, text, leak) on real labels, planted canaries or replayed ones, as the options name them."""
    targets, truth_file, output = list(request.targets), _truth_file(request), request.output
    if request.raw is not None:
        if truth_file is not None:
            raise UserError("attack takes --raw or canaries (--key, --truth), not both: run it twice")
        output = _owner_output(request, request.raw)
        outcome = run_attacks(targets, raw_truth(request.raw), request.epsilon)
        facts, lines = dict[str, Any](), [f"owner-only result: {output}"]
    elif truth_file is not None:
        outcome = run_attacks(targets, read_truth(truth_file, request.canaries), request.epsilon)
        facts, lines = {"canaries": "planted"}, []
    else:
        outcome, findings = replay(targets, request.canaries, request.privatize, request.epsilon)
        facts = {"canaries": "replayed", "findings_in_the_release": [asdict(finding) for finding in findings]}
        facts |= {"verdict": "leak"} if findings else {}
        lines = [f"LEAK in the release itself: {row.where}: {row.what}; {SPECS[row.attack].remedy}" for row in findings]
        lines.append(REPLAYED)
    facts = outcome.as_dict() | facts
    if output is not None:
        write_json(output, facts, mode=0o600)
    return facts, "\n".join([render(outcome), *lines]), facts["verdict"] == "leak"


def _owner_output(request: Request, raw: str) -> Path:
    """The file for the result on real labels: beside the raw file, never in a folder that is released. UserError: no
    place is given for a source that is not a file, or it lies in a target or a run directory."""
    if request.output is not None:
        output = request.output
    elif Path(raw).exists():
        output = output_file(Path(raw).with_name(Path(raw).name + ".attacks.json"), "--raw", rewrites=RESULT)
    else:
        raise UserError("--raw must be a file here, or --output FILE must say where the owner's result goes")
    targets = {target.resolve() for target in request.targets}
    if folder := run_directory(output) or next((each for each in output.resolve().parents if each in targets), None):
        raise UserError(f"{output}: lies in {folder}, from where things are released; pass another --output")
    return output


def render(outcome: Outcome) -> str:
    """The result as a table of plain text: per attack the variant with the strongest evidence."""
    kind = "canary events (fair-coin labels)" if outcome.coins else "real labels: OWNER ONLY, do not pass on"
    lines = [
        f"judged on {outcome.events} {kind}; the most a guess may be right: alpha = {outcome.alpha:.4f}\n",
        f"{'attack':<18} {'n':>8} {'rate':>7} {'95 % interval':>18} {'ceiling':>8} {'p':>9} {'Holm':>9}  verdict",
    ]
    for name in SPECS:
        rows = [row for row in outcome.attacks if row.attack == name and row.n]
        if not rows:
            continue
        row = min(rows, key=lambda row: (row.p_value, -row.n))
        verdict = "LEAK" if row.leak else "no leak found"
        rate = f"{row.rate:.4f}" if row.rate is not None else "-"
        lines.append(
            f"{name:<18} {row.n:>8} {rate:>7} {f'[{row.low:.4f}, {row.high:.4f}]':>18} {row.ceiling:>8.4f} "
            f"{row.p_value:>9.2g} {row.adjusted:>9.2g}  {verdict}"
        )
        shown = [row for row in rows if row.leak][:3] or [row]
        lines += [f"    {row.variant}" for row in shown]
        if row.leak:
            lines.append(f"    what to do: {SPECS[name].remedy}")
    for finding in outcome.findings:
        lines.append(f"\nLEAK ({finding.attack}): {finding.where}: {finding.what}")
        lines.append(f"    what to do: {SPECS[finding.attack].remedy}")
    lines += [
        f"\nverdict: {'LEAK' if outcome.leak else 'no leak found'} ({len(outcome.attacks)} guesses, which accuse"
        f" a sound release with probability {FAMILY_WISE:.1%} at most)",
        f"power: a rate of {outcome.alpha + outcome.power_excess:.4f} on all events is found 9 times in 10",
    ]
    for name, events, excess in outcome.parts:
        exposed = outcome.alpha + excess
        power = f"a rate of {exposed:.4f} is found 9 times in 10" if exposed < 1 else "too few for any leak to be sure"
        lines.append(f"    {name}: {events} events, {power}")
    if outcome.epsilon_low is not None:
        proved = f"audit: everything together proves ε ≥ {outcome.epsilon_low:.3f} (99.9 % confidence);"
        lines.append(f"{proved} the claim is {math.log(outcome.alpha / (1 - outcome.alpha)):.3f}")
    return "\n".join([*lines, *filter(None, [outcome.untried]), NOT_EXAMINED])


MOST_EPSILONS = 6

Privatize = Callable[[str, Path, float, Path], object]  # source, output folder, epsilon, key file


def replay(
    roots: Sequence[Path], count: int | None, privatize: Privatize, epsilon: float | None = None
) -> tuple[Outcome, list[Finding]]:
    """Run the attacks on `count` replayed canaries (None: 2,000, or fewer) at every finite epsilon of the given
    releases. Returns the outcome, and the findings in the given releases, for which no label is needed.

    Replayed canaries are the texts of a release with fair coins for labels, privatised by the installed program, at the
    same epsilons in a random order, under a throw-away key. They say nothing about how the given release was made.
    UserError: no release, fewer than `count` pairs or none, or no epsilon to be held to.
    """
    view, _ = build_view(roots, None, epsilon, count or DEFAULT_CANARIES)
    texts = zip(view.prompts, view.first, view.second, strict=True)
    pairs = [pair for pair in texts if not any(map(is_blank, pair))]
    if len(pairs) < (count or 1):
        rule = f"must hold at least {count or 1} pairs without a blank text, got {len(pairs)}"
        raise UserError(f"{roots[0]}: {rule}: ask for fewer --canaries")
    stated = {table.epsilon for table in view.tables if table.epsilon is not None and not is_public(table.epsilon)}
    if not stated and epsilon is not None:
        stated = {epsilon}
    epsilons = sorted(stated)[-MOST_EPSILONS:]
    with tempfile.TemporaryDirectory(prefix="canaries-") as name:  # 0700
        home = Path(name)
        labels: dict[bytes, tuple[int, ...]] = {}
        with os.fdopen(os.open(home / "raw.jsonl", os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            for prompt, first, second in pairs:
                label = fair_coin()
                labels[pair_key(prompt, first, second)[0]] = (label,)
                chosen, rejected = (first, second)[::label]
                row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        secrets.SystemRandom().shuffle(epsilons)
        released = [home / f"release-{place}" for place in range(len(epsilons))]
        with another_user(home / "user"):
            key = keygen(home / "throwaway.key")
            for folder, value in zip(released, epsilons, strict=True):
                privatize(str(home / "raw.jsonl"), folder, value, key)
        outcome = run_attacks(released, Truth(labels, coins=True), epsilon)
    # Ids that are plain digests of the ordered pair: the order needs no label to be read off.
    telling = [guess for guess in ids(view) if len(guess.events)]
    read_off = "the order of the responses can be read off {} ids"
    return outcome, [Finding("ids", guess.variant, read_off.format(len(guess.events))) for guess in telling]
