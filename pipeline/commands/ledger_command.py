"""`private-rlhf ledger show | verify | export | init | restore`: what was released under a key, whether its records are
intact, and what its holder says where they were lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.errors import MOST_NAME, one_line, print_lines
from private_rlhf.core.outputs import json_with, output_file
from private_rlhf.core.user import default_key

if TYPE_CHECKING:
    from private_rlhf.privacy.keys import PrivacyKey


KINDS = {"counts": " (noisy counts)", "sum": " (noisy sum)"}  # said of a release in the table

app = typer.Typer(no_args_is_help=True, help="What was released under a key, and what it cost.")

Key = Annotated[
    Path | None, typer.Option("--key", help="Key file; its ledger lies in FILE.state/. Default: your own key.")
]


@app.command()
def show(key: Key = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the releases, the totals and the budgets."""
    from private_rlhf.privacy.ledger import Ledger
    from private_rlhf.privacy.signatures import public_key

    holder = _holder(key)
    facts = Ledger.open(holder).show() | {"public_key": public_key(holder)}
    print_lines(json.dumps(facts, indent=2, allow_nan=False) if as_json else as_text(facts))


@app.command()
def verify(key: Key = None) -> None:
    """Check the ledger and its data for damage and edits: one line per problem and exit code 1, or exit code 0."""
    from private_rlhf.privacy.ledger import Ledger

    problems = Ledger(_holder(key)).verify()
    for problem in problems:
        print_lines(problem)
    if problems:
        raise typer.Exit(1)
    print_lines("the ledger and its data are intact")


IKnow = Annotated[float, typer.Option("--i-know", help="Sum of the ε released that no ledger knows of; 0 for none.")]


@app.command()
def init(i_know: IKnow, key: Key = None) -> None:
    """Begin a ledger for a key that has none; what was released before is charged in full, for every event."""
    from private_rlhf.privacy.ledger import Ledger

    holder = _holder(key)
    Ledger.begin(holder, i_know)
    print_lines(f"a ledger begins in {holder.state.folder}; ε = {i_know:g} is charged to every event for earlier ones")


@app.command()
def restore(
    source: Annotated[Path, typer.Option("--from", help="Copy of the key's state folder (FILE.state).")],
    i_know: IKnow,
    key: Key = None,
) -> None:
    """Put a backup of the state folder back; what was released since is charged in full, for every event."""
    from private_rlhf.privacy.ledger import Ledger

    holder = _holder(key)
    Ledger.restore(holder, source.expanduser(), i_know)
    print_lines(f"restored to {holder.state.folder}; ε = {i_know:g} is charged to every event for later ones")


@app.command()
def export(
    output: Annotated[Path, typer.Option("--output", help="JSON file for the privacy officer.")],
    key: Key = None,
    force: Force = False,
) -> None:
    """Write what `show` prints to a file; it holds neither tags nor labels."""
    from private_rlhf.core.atomic import write_json
    from private_rlhf.privacy.ledger import Ledger

    facts = json_with("key", "epsilon_total", "releases", "budgets")
    place = output_file(output, "--output", rewrites=facts, force=force)
    write_json(place, Ledger.open(_holder(key)).show(), mode=0o600)
    print_lines(f"ledger written to {output}")


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts of `Ledger.show` for reading: totals, budgets, and a table of the releases."""
    from private_rlhf.core.noise import upper_text
    from private_rlhf.core.noise_levels import levels_text

    labelers = facts["labelers"]
    limits = [f"ε = {limit:g} per {kind}" for kind, limit in facts["budgets"].items() if limit is not None]
    lines = [
        f"largest total of any one record: ε = {facts['epsilon_total']:g}"
        + (f" at δ = {facts['delta_total']:g}" if facts["delta_total"] else "")
        + f" ({facts['events']} events)",
        f"budgets: {', '.join(limits) or 'none stated'}",
    ]
    if labelers["count"]:
        lines.append(
            f"largest total of any one of {labelers['count']} labellers: ε = {labelers['max_epsilon']:g},"
            f" or {upper_text(labelers['max_epsilon_at_delta'])} at δ = {labelers['delta']:g}"
        )
    if labelers["unattributed_events"]:
        lines.append(f"events that name no labeller: {labelers['unattributed_events']}")
    if facts["events"]:
        exact = labelers["count"] and not facts["names_folded"]
        lines.append(f"another spelling of an event{' or a labeller' * bool(exact)} counts as another one")
    if facts["events_before_spellings"]:
        lines.append(
            f"texts of {facts['events_before_spellings']} events are known in their own spelling only, as an earlier"
            " version released them"
        )
    if facts.get("public_key"):
        lines.append(f"signs releases as: {facts['public_key']}")
    if not facts["releases"]:
        return "\n".join([*lines, "", "no releases yet"])
    rows = [("time", "source", "events", "ε", "status")]
    for entry in facts["releases"]:
        source = one_line(entry["source"], MOST_NAME) + KINDS.get(entry.get("kind"), "")
        rows.append((entry["time"], source, str(entry["events"]), levels_text(entry), entry["status"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([*lines, "", *table])


def _holder(key: Path | None) -> PrivacyKey:
    from private_rlhf.privacy.keys import load_key, named_or_default

    return load_key(named_or_default(key))


def keygen(
    output: Annotated[
        Path | None, typer.Option("--output", help="Where the new secret key goes (mode 0600); default: your own key.")
    ] = None,
) -> None:
    """Make the owner's secret key: your own, which every command uses by default, or another one."""
    from private_rlhf.privacy.keys import keygen as make_key
    from private_rlhf.privacy.keys import state_folder

    place = default_key() if output is None else output_file(output, "--output", secret=True)
    key = make_key(place)
    print_lines(f"new key in {key}: keep it secret and outside every run directory")
    print_lines(f"back it up together with {state_folder(key)}, which keeps what was released under it")
