"""`private-rlhf label serve | invite | remove | tasks | export`: people label at a web page that randomises before it
sends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.documents import DocumentError, read_text
from private_rlhf.core.errors import UserError, one_line, print_lines
from private_rlhf.core.outputs import all_lines_in, output_file, output_folder
from private_rlhf.labelling.address import host_names

app = typer.Typer(no_args_is_help=True, help="A labelling page that randomises every answer before it leaves it.")

Store = Annotated[Path, typer.Option("--store", help="Owner-only folder of questions and private answers.")]
LOCAL, ANY = ("127.0.0.1", "localhost", "::1"), ("", "0.0.0.0", "::")


@app.command()
def serve(
    store: Store,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="ε of each answer, > 0; of a new store.")] = None,
    epsilon_levels: Annotated[
        str | None, typer.Option("--epsilon-levels", help="Every ε that a person may choose: 0.5,1,4; of a new store.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget-per-person", help="ε of all of a person's answers; of a new store.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", help="Questions to add: JSON lines of id, prompt, response_a, response_b.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen; behind a proxy that ends TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Where to listen; 0: any free one.")] = 8765,
    url: Annotated[
        str | None, typer.Option("--url", help="Where people reach it behind a proxy; it answers for that name too.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Online run that asks, for the operator's page.")] = None,
    guidelines: Annotated[Path | None, typer.Option("--guidelines", help="Markdown that people may unfold.")] = None,
) -> None:
    """Serve the page, and take private answers in, until stopped."""
    from private_rlhf.data.declared_columns import parse_levels
    from private_rlhf.labelling.questions import read_questions
    from private_rlhf.labelling.server import LabelServer
    from private_rlhf.labelling.store import AnswerStore

    if epsilon is not None and epsilon_levels is not None:
        raise UserError("--epsilon and --epsilon-levels must not come together: give one ε, or those to choose among")
    levels = epsilon if epsilon_levels is None else parse_levels(epsilon_levels)
    if levels is None and budget is not None:
        raise UserError("--budget-per-person needs --epsilon or --epsilon-levels: they are the terms of a new store")
    if host in ANY and url is None:
        raise UserError(f"--host {host} needs --url: the address that people open, as https://label.example.org")
    if url is not None:
        host_names(url)
    try:
        text = "" if guidelines is None else read_text(guidelines, 1 << 16)
    except (OSError, DocumentError):
        rule = "--guidelines must name a file of UTF-8 text of at most 64 KiB"
        raise UserError(f"{rule}, got {one_line(str(guidelines))}: give a Markdown file") from None
    questions = [] if pairs is None else read_questions(pairs)
    if pairs is not None and not questions:
        raise UserError(f"{pairs}: must hold at least one question: give one a line")
    answers = AnswerStore.open(store) if levels is None else AnswerStore(store, levels, budget)
    answers.ask(questions)
    with LabelServer(answers, host, port, run and run / "online" / "history.json", url, text) as server:
        answers.keep_url(server.url)
        terms = f"ε = {' or '.join(f'{level:g}' for level in answers.levels)} an answer, "
        terms += "no limit for a person" if answers.budget is None else f"{answers.budget:g} a person: "
        terms += f"room for {answers.most} at ε = {answers.epsilon:g}" if answers.budget else ""
        print_lines(f"{answers.asked()} questions, {len(answers.persons())} people; {terms}")
        print_lines(f"page SHA-256 {server.page.sha256}")
        print_lines(f"progress: {server.url}operator#{server.operator}")
        print_lines(f"listening on port {server.port} of {host} for {server.url}")
        if host not in LOCAL:
            print_lines("label serve: this is plain HTTP: put a proxy that ends TLS in front of it", file=sys.stderr)
        try:
            server.serve_forever()
        finally:
            answers.close()


@app.command()
def invite(
    store: Store,
    names: Annotated[list[str], typer.Argument(help="People; a name that is known gets a new link.")],
    url: Annotated[
        str | None, typer.Option("--url", help="Where people reach it; by default as `label serve` was begun last.")
    ] = None,
) -> None:
    """Print a link for each person: it opens in one browser, once. Only its hash is kept. Earlier links end."""
    from private_rlhf.labelling.store import AnswerStore

    if url is not None:
        host_names(url)  # before a link is void
    answers = AnswerStore.open(store)
    begin = (url or answers.url() or "http://127.0.0.1:8765").rstrip("/")
    known = {each.name for each in answers.persons()}
    for name in dict.fromkeys(names):
        print_lines(f"{name}: {begin}/#{answers.add_person(name)}")
        if name in known:
            print_lines(
                f"label invite: {one_line(name)!r} was invited before: the earlier link and its browser are void; what"
                " they left unanswered goes to others and counts against this person's budget",
                file=sys.stderr,
            )


@app.command()
def remove(
    store: Store, names: Annotated[list[str], typer.Argument(help="People whose answers stay and who give no more.")]
) -> None:
    """End people's links, and give what they left unanswered to others."""
    from private_rlhf.labelling.store import AnswerStore

    answers = AnswerStore.open(store)
    for name in names:
        answers.remove_person(name)
        print_lines(f"{name}: the link has ended")


@app.command()
def tasks(
    source: Annotated[Path, typer.Argument(help="JSON list of Label Studio tasks, without annotations.")],
    output: Annotated[Path, typer.Option("--output", help="Write the questions here (JSON lines), for --pairs.")],
    fields: Annotated[
        str, typer.Option("--fields", help="Prompt and the two responses in a task's data.")
    ] = "prompt,answer1,answer2",
    force: Force = False,
) -> None:
    """Turn Label Studio tasks into questions."""
    from private_rlhf.labelling.questions import line, write_questions
    from private_rlhf.labelling.tasks import read_tasks

    names = fields.split(",")
    if len(set(names)) != 3:
        raise UserError(f"--fields {fields!r} does not name three different fields; for example prompt,answer1,answer2")
    questions, others = read_tasks(source, names)
    known = all_lines_in(line(question.as_json()) for question in questions)
    write_questions(output_file(output, "--output", rewrites=known, inputs=(source,), force=force), questions)
    print_lines(f"{len(questions)} questions in {output}")
    if others:
        print_lines(f"label tasks: left out, whatever they hold: {', '.join(map(one_line, others))}", file=sys.stderr)


@app.command()
def export(
    store: Annotated[Path, typer.Option("--store", help="Store of `label serve`, or folder of files.")],
    out: Annotated[Path | None, typer.Option("--out", help="New folder: a bundle for --data.")] = None,
    answers: Annotated[Path | None, typer.Option("--answers", help="Write z here: JSON lines of id and label.")] = None,
    force: Force = False,
) -> None:
    """Write the private answers so far as a release bundle, as JSON lines, or both."""
    from private_rlhf.core.atomic import sweep_temporaries
    from private_rlhf.labelling.questions import answer_lines, write_answers
    from private_rlhf.labelling.tasks import export_bundle, open_answers
    from private_rlhf.privacy.card import totals_sentence

    if out is None and answers is None:
        raise UserError("label export writes nothing: give --out, --answers or both")
    if out is not None:
        out = output_folder(out, "--out")
        sweep_temporaries(out.parent, out.name)  # of an export that was killed
    if answers is not None:
        with open_answers(store) as (_, labeller):
            private_labels, epsilons = labeller.answers(), labeller.epsilons()
        known = all_lines_in(answer_lines(private_labels, epsilons))
        answers = output_file(answers, "--answers", rewrites=known, force=force)
        sweep_temporaries(answers.parent, answers.name)
        write_answers(answers, dict(sorted(private_labels.items())), epsilons=epsilons)
        print_lines(f"{len(private_labels)} answers in {answers}")
    if out is not None:
        manifest = export_bundle(store, out)
        print_lines(f"{manifest.rows} private labels in {out}; {totals_sentence(manifest.totals)}")


def label_filter(
    epsilon: Annotated[float, typer.Option("--epsilon", help="ε of each event, > 0.")],
    store: Annotated[Path, typer.Option("--store", help="File of the draws (0600), made on first use; keep it.")],
    labels: Annotated[str, typer.Option("--labels", help="The two labels: -1,1 or 0,1 or A,B.")] = "-1,1",
    id_field: Annotated[str, typer.Option("--id-field", help="Field with the event's id.")] = "id",
    label_field: Annotated[str, typer.Option("--label-field", help="Field with the label.")] = "label",
    keep: Annotated[str, typer.Option("--keep", help="Further fields to pass through, comma-separated.")] = "",
) -> None:
    """Local mode: randomise labels on their way from stdin to stdout, JSON lines, once per event."""
    from private_rlhf.core.noise import LabelNoise
    from private_rlhf.privacy.local import filter_stdin

    if epsilon > 0 and (warning := LabelNoise.of(epsilon).warning):
        print_lines(f"beware: {warning}", file=sys.stderr)
    raise typer.Exit(filter_stdin(epsilon, store, labels, id_field, label_field, keep))
