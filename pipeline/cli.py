"""The command line: `private-rlhf COMMAND`. Heavy libraries are imported by the command that needs them.

Exit codes: 0 done, 1 runtime failure, 2 wrong use or input (one line on stderr), 3 waits for answers, 130 interrupted
(state saved).
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from private_rlhf.commands import account, label, ledger_command
from private_rlhf.commands.compare import compare, sample
from private_rlhf.commands.design import design
from private_rlhf.commands.doctor import doctor
from private_rlhf.commands.inspect import head_lines, inspect
from private_rlhf.commands.label import label_filter
from private_rlhf.commands.ledger_command import keygen
from private_rlhf.commands.options import Force, all_given, escape_help, one_way, refuse_digit_groups, refuse_moved
from private_rlhf.commands.plan import plan
from private_rlhf.commands.releases import attack, verify_release
from private_rlhf.commands.validate import validate
from private_rlhf.core.atomic import FULL
from private_rlhf.core.environment import calm_bars, extra_of, remedy, wait_briefly
from private_rlhf.core.errors import RunStopped, RunWaits, UserError, one_line, print_lines
from private_rlhf.core.outputs import json_with, output_file, output_folder
from private_rlhf.core.world import wait_for_first
from private_rlhf.launcher import Launcher, planned_world, report
from private_rlhf.stages.declarations import NAMES, STAGES

INTERRUPTED = "interrupted; run the same command again to resume"
UNUSABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
)

# typer carries its own click, in recent versions; the base class of its usage errors is not exported.
USAGE_ERRORS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

PANELS = {
    "Start": ("run", "privatize", "online", "inspect", "design", "plan", "doctor", "print-config", "sample", "compare"),
    "Stages": ("stages", *(stage.name for stage in STAGES), "launch"),
    "Labels and privacy": ("keygen", "ledger", "label", "label-filter", "account"),
    "Evidence": ("verify-release", "verify-run", "attack", "validate"),
}
"""Panel of the help -> its commands, in the help's order; a command stands in the first that names it."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(account.app, name="account")
app.add_typer(label.app, name="label")
app.add_typer(ledger_command.app, name="ledger")
COMMANDS: tuple[Callable[..., None], ...] = (
    attack, compare, design, doctor, inspect, keygen, label_filter, plan, sample, validate, verify_release
)  # fmt: skip
for each_command in COMMANDS:
    app.command()(each_command)
refuse_moved(app, "benchmark", "benchmark")


def _print_version(asked: bool) -> None:
    if asked:
        print_lines(f"private-rlhf {version('private-rlhf')}")
        raise typer.Exit


@app.callback()
def program(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """RLHF alignment training under label local differential privacy."""


Config = Annotated[Path, typer.Option("--config", help="The recipe: a YAML file, see configs/.")]
RunDirectory = Annotated[Path | None, typer.Option("--run-dir", help="Default: runs/NAME of the recipe.")]
Data = Annotated[str | None, typer.Option("--data", help="Preferences: file, folder or hub id (data.preferences).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. privatize.epsilon=0.5")]
AcceptReward = Annotated[
    bool, typer.Option("--accept-reward", help="Train a policy on a reward that may be a coin (reward.accept_coin).")
]
AcceptCode = Annotated[bool, typer.Option("--accept-code", help="Keep results that other code made.")]


@app.command()
def run(
    config: Config,
    run_dir: RunDirectory = None,
    data: Data = None,
    start: Annotated[str | None, typer.Option("--from", help="Run this stage and those after it.")] = None,
    only: Annotated[str | None, typer.Option("--only", help="Run only this stage.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=1024, help="Of each trained stage: on CPUs, or one per GPU.")
    ] = 1,
    accept_code: AcceptCode = False,
    accept_reward: AcceptReward = False,
    overrides: Overrides = None,
) -> None:
    """Run a recipe: stages that are up to date are skipped, an interrupted one resumes."""
    from private_rlhf import runner
    from private_rlhf.core.rundir import RunDir
    from private_rlhf.core.world import declared_world
    from private_rlhf.recipe.load import all_overrides

    planned = planned_world(processes)
    recipe = _recipe(config, data, overrides, accept_reward)
    directory = RunDir(run_dir or Path("runs") / recipe.name)
    selection = runner.Selection(start=start, only=only)
    if dry_run:
        recipe = runner.resolved(recipe, directory, declared_world(), selection.names)
        from private_rlhf.commands.costs import NOTE, limits, stage_costs

        lines = runner.check(recipe, directory, selection, planned)
        if any(line.runs and line.stage.releases for line in lines):
            print_lines(*head_lines(recipe))
        effort = f"effort {recipe.effort}: " if recipe.effort else ""
        print_lines(f"recipe {recipe.name} in {directory.root}", f"at most  {effort}{limits(recipe)}")
        costs = stage_costs(recipe, directory, [line.stage.name for line in lines if line.runs], planned)
        for line in lines:
            cost = f"; {costs[line.stage.name]}" if line.runs else ""
            print_lines(f"  {line.stage.name:<10} {'run ' if line.runs else 'skip'}  {line.reason}{cost}")
        if costs:
            print_lines(NOTE)
        return
    options = ["--config", str(config), "--run-dir", str(directory.root)]
    launcher = Launcher(processes, [*options, *all_overrides(data, overrides, accept_reward)])
    runner.execute(recipe, directory, selection, accept_code, launcher if processes > 1 else None)
    if "report" in selection.names:
        _show(directory)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    arguments: Annotated[list[str], typer.Argument(help="[options of accelerate] -m MODULE [options of the module]")],
) -> None:
    """Run a stage's module under `accelerate launch`, with its options; an error is one line."""
    from subprocess import CalledProcessError

    from private_rlhf import launcher

    try:
        launcher.launch(arguments, {})
    except CalledProcessError as error:
        raise typer.Exit(error.returncode & 255) from None


@app.command()
def online(
    config: Config,
    run_dir: RunDirectory = None,
    policies: Annotated[
        int, typer.Option("--policies", min=1, max=99, help="How often: each run asks the policy of the one before.")
    ] = 1,
    accept_code: AcceptCode = False,
    accept_reward: AcceptReward = False,
    overrides: Overrides = None,
) -> None:
    """Run a recipe that asks for labels (section online), with all its stages; resumes like `run`."""
    from private_rlhf.runner import run_policies

    recipe = _recipe(config, None, overrides, accept_reward)
    _show(run_policies(recipe, run_dir or Path("runs") / recipe.name, policies, accept_code))


@app.command("verify-run")
def verify_run(
    config: Config,
    folder: Annotated[Path | None, typer.Option("--folder", help="Owner-only; default runs/NAME.twins.")] = None,
    data: Data = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave both twins and their runs there.")] = False,
    overrides: Overrides = None,
) -> None:
    """Run a recipe twice, on your pairs with other (random) labels: exit code 1 if a label reaches any file.

    Neither run sees a true label, and no ledger is charged. It takes twice the time of a run.
    """
    from private_rlhf import runner
    from private_rlhf.audit.twins import verify

    def execute(recipe: Any, run: Any) -> None:
        runner.execute(recipe, run, runner.Selection())

    recipe = _recipe(config, data, overrides)
    twins = Path("runs") / f"{recipe.name}.twins" if folder is None else output_folder(folder, "--folder")
    verdict = verify(recipe, twins, execute, runner.NAMES, keep)
    if verdict is not None:
        print_lines(verdict)
        raise typer.Exit(1 if verdict.comparison.leaks else 0)


@app.command("print-config")
def print_config(config: Config, data: Data = None, overrides: Overrides = None) -> None:
    """Print the resolved recipe, every key written out."""
    from private_rlhf.recipe.load import dump_yaml

    print_lines(dump_yaml(_recipe(config, data, overrides)), end="")


@app.command()
def stages(config: Config, overrides: Overrides = None) -> None:
    """Print the stages of a recipe in order: `launched` ones take several processes, the others are `alone`."""
    from private_rlhf.stages.declarations import stages_of

    for stage in stages_of(_recipe(config, None, overrides)):
        print_lines(f"{stage.name} {'launched' if stage.launched else 'alone'}")


@app.command()
def privatize(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="Run as a stage of this recipe.")] = None,
    run_dir: RunDirectory = None,
    data: Annotated[str | None, typer.Option("--data", help="Preferences: file, folder or hub id.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder of the release.")] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="ε of each label, > 0.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Key file; default: your own key.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Of a folder or hub data set; default train.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="Name in manifest and ledger.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="Refuse a release whose totals exceed it.")] = None,
    budget_per: Annotated[str | None, typer.Option("--budget-per", help="event (default) | person")] = None,
    labeler_column: Annotated[str | None, typer.Option("--labeler-column", help="Who gave the label.")] = None,
    event_column: Annotated[str | None, typer.Option("--event-column", help="Which of their answers it is.")] = None,
    corrects_column: Annotated[str | None, typer.Option("--corrects-column", help="Id of a corrected pair.")] = None,
    epsilon_column: Annotated[
        str | None, typer.Option("--epsilon-column", help="ε of each label, in place of --epsilon.")
    ] = None,
    epsilon_levels: Annotated[
        str | None, typer.Option("--epsilon-levels", help="Every ε that may stand there: 0.5,1,4")
    ] = None,
    levels_before: Annotated[
        bool | None, typer.Option("--levels-before-labels", help="Your word: each ε was set before its label.")
    ] = None,
    max_events: Annotated[
        int | None, typer.Option("--max-events-per-person", min=1, help="Leave out further ones, for good.")
    ] = None,
    add_up: Annotated[bool | None, typer.Option("--add-up-renamed", help="Charge renamed pairs the sum.")] = None,
    add_up_keys: Annotated[
        bool | None, typer.Option("--add-up-keys", help="Charge pairs of another key of yours the sum.")
    ] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="Extra columns to release as they are: a,b.")] = None,
    label_column: Annotated[
        str | None, typer.Option("--label-column", help="Label of response_a against response_b.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option("--labels", help="Its values: A,B | A=a,B=b,both=tie | <0,>0 | higher | lower")
    ] = None,
    shape: Annotated[str | None, typer.Option("--format", help="Name of a public or a tool's shape.")] = None,
    ties: Annotated[str | None, typer.Option("--ties", help="drop (reveals them) | coin")] = None,
    pairs: Annotated[str | None, typer.Option("--pairs", help="Of one ranking: one (default) | all")] = None,
    odd: Annotated[bool | None, typer.Option("--accept-odd", help="Release rows that look odd.")] = None,
    special: Annotated[str | None, typer.Option("--special-tokens", help="In texts: error (default) | keep")] = None,
    keys: Annotated[str | None, typer.Option("--message-keys", help="Read tool_calls,tools,name,...")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, max=64, help="Processes (by cores).")] = None,
    step: Annotated[str | None, typer.Option("--step", help="On a cluster: map:i/N, then reduce:j/M, finish.")] = None,
    accept_code: AcceptCode = False,
    overrides: Overrides = None,
) -> None:
    """Stage with --config; without it privatise --data into --output at --epsilon (or --epsilon-column)."""
    one_way(ctx, config, run_dir, overrides)
    if config is not None:
        _stage("privatize", config, run_dir, data, overrides, accept_code)
        return
    if budget_per is not None and budget is None:
        raise UserError("--budget-per needs --budget")
    from private_rlhf.data.curate import Request, release_step
    from private_rlhf.data.declared_columns import Options, parse_labels, parse_levels
    from private_rlhf.data.source_summary import HEAD_ROWS, summary_of
    from private_rlhf.privacy.keys import named_or_default
    from private_rlhf.privacy.ledger import Budget

    one = {"--epsilon": epsilon} if epsilon_column is None else {"--epsilon-levels": epsilon_levels}
    rows, output, _ = all_given("privatize", {"--data": data, "--output": output, **one})
    key_file = named_or_default(key)
    folder = output_folder(Path(output or ""), "--output", inputs=(rows, key_file))
    named = tuple(name.strip() for name in columns.split(",")) if columns else ()
    stated: dict[str, Any] = {"ties": ties, "pairs": pairs or "one", "special_tokens": special or "error"}
    beside = (labeler_column, event_column, named, label_column, parse_labels(labels), corrects_column)
    stated |= {"epsilon_column": epsilon_column, "epsilon_levels": parse_levels(epsilon_levels)}
    options = Options(*beside, format=shape, message_keys=tuple(keys.split(",")) if keys else (), **stated)
    limit = Budget(budget, "event" if budget_per is None else budget_per) if budget is not None else None  # type: ignore[arg-type]
    flags = (bool(add_up), max_events, workers, bool(add_up_keys), bool(levels_before))
    request = Request(rows, folder, epsilon, key_file, split, source, options, limit, *flags, step=step)
    head = summary_of(rows, split, options, HEAD_ROWS)
    if sys.stderr.isatty():  # for people; a program that reads the messages gets one line
        print_lines(*head.lines(), file=sys.stderr)
    head.check(bool(odd))
    print_lines(release_step(request))


@app.command()
def evaluate(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="Run as a stage of this recipe.")] = None,
    run_dir: RunDirectory = None,
    data: Data = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Checkpoint to judge.")] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="Checkpoint to judge against.")] = None,
    prompts: Annotated[str | None, typer.Option("--prompts", help="File of prompts, or `embedded`.")] = None,
    judge: Annotated[
        str | None, typer.Option("--judge", help="truth | rm:PATH | lm:PATH | embedding | openai:URL[#MODEL]")
    ] = None,
    judge_public: Annotated[
        bool | None, typer.Option("--judge-public", help="The labels that rm:PATH learned from are public.")
    ] = None,
    judge_http: Annotated[
        bool | None, typer.Option("--judge-http", help="openai:URL may be http on another machine.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the result here as JSON.")] = None,
    max_response_tokens: Annotated[
        int | None, typer.Option(min=2, help="Cap on a response; default: the policy's own.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longer prompts are left out and counted; default 1024.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of both policies, > 0; default 1.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sampling noise; default 0.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System message; default: the checkpoints' own.")] = None,
    force: Force = False,
    accept_code: AcceptCode = False,
    overrides: Overrides = None,
) -> None:
    """Stage with --config; without it judge --policy against --reference on --prompts."""
    one_way(ctx, config, run_dir, overrides)
    if config is not None:
        _stage("evaluate", config, run_dir, data, overrides, accept_code)
        return
    needed = {"--policy": policy, "--reference": reference, "--prompts": prompts, "--judge": judge}
    ours, theirs, file, named = all_given("evaluate", needed)
    if temperature is not None and not 0 < temperature < float("inf"):
        raise UserError(f"--temperature must be a finite number > 0, got {temperature:g}: leave it out for 1")
    if output is not None:
        result = json_with("judge", "policy", "reference", "pairs")
        inputs = (policy, reference, prompts, named.partition(":")[2])
        output = output_file(output, "--output", rewrites=result, inputs=inputs, force=force)
    from private_rlhf.evaluation.judges import parse_judge
    from private_rlhf.lm.model_folders import check_given

    check_given({"--policy": ours, "--reference": theirs}, file)
    referee = parse_judge(named, public=bool(judge_public), allow_http=bool(judge_http))
    from private_rlhf.evaluation.checkpoint_comparison import MAX_PROMPT_TOKENS, compare

    line = compare(
        ours,
        theirs,
        file,
        referee,
        output=output,
        seed=seed or 0,
        limit=limit,
        max_prompt_tokens=max_prompt_tokens or MAX_PROMPT_TOKENS,
        max_response_tokens=max_response_tokens,
        temperature=temperature or 1.0,
        system_prompt=system_prompt,
    )
    if line:
        print_lines(f"win rate by {named}: {line}")


def command_line() -> Any:
    """The whole command line as one click command, with the help in the order of `PANELS`."""
    group: Any = typer.main.get_command(app)
    panels: dict[str, str] = {}
    for panel, names in PANELS.items():
        for name in names:
            panels.setdefault(name, panel)
    group.commands = {name: group.commands[name] for name in (*panels, *(group.commands.keys() - panels.keys()))}
    for name, panel in panels.items():
        group.commands[name].rich_help_panel = panel
    escape_help(group)
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; every foreseeable error is one line on stderr."""
    return exit_code(command_line, "private-rlhf", arguments)


def exit_code(make_command: Callable[[], Any], program: str, arguments: Sequence[str] | None) -> int:
    """The exit code of a click command that runs, and is named in errors, as `program`; the lab's runs by it too."""
    wait_briefly()
    calm_bars()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = make_command()
        refuse_digit_groups(command, words)
        code = command(args=words, prog_name=program, standalone_mode=False)
    except (UserError, RunStopped) as error:
        wait_for_first()
        code = 3 if isinstance(error, RunWaits) else 1 if isinstance(error, RunStopped) else 2
        return _fail(program, str(error), code)
    except ModuleNotFoundError as error:
        if (extra := extra_of(error)) is None:
            raise
        return _fail(program, f"{error.name} is not installed: {remedy(extra)}", 2)
    except (typer.Abort, KeyboardInterrupt):
        return _fail(program, INTERRUPTED, 130)
    except USAGE_ERRORS as error:
        # A call without a command has printed its help, and its error has no message.
        message = error.format_message() or ("Missing command." if words else "")
        return _fail(program, f"{message} (see --help)", 2) if message else 2
    except OSError as error:
        if error.errno in FULL:
            return _fail(program, "no space left on the disk: free some and run the same command again to resume", 1)
        if error.errno in UNUSABLE and error.filename is not None:
            return _fail(program, f"{error.filename}: {error.strerror}: choose another path, or fix its permissions", 2)
        return _runtime_failure(program, error)
    except (FloatingPointError, RuntimeError, ValueError) as error:
        return _runtime_failure(program, error)
    # typer turns Ctrl-C into this return value, where click raises Abort.
    return _fail(program, INTERRUPTED, 130) if code == 130 else int(code or 0)


def _runtime_failure(program: str, error: Exception) -> int:
    """A failure while running: the traceback for whoever fixes it, then one line."""
    import traceback

    print_lines(traceback.format_exc(), file=sys.stderr, end="")
    return _fail(program, " ".join(str(error).split()) or type(error).__name__, 1)


def _fail(program: str, message: str, code: int) -> int:
    if not report(one_line(message)):
        print_lines(f"{program}: {one_line(message)}", file=sys.stderr)
    return code


def _recipe(config: Path, data: str | None, overrides: Sequence[str] | None, accept_reward: bool = False) -> Any:
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import all_overrides, load_recipe

    return load_recipe(Recipe, config, all_overrides(data, overrides, accept_reward))


def _show(run: Any) -> None:
    """Print what a run with a report did, in six lines, once."""
    from private_rlhf.core.world import join_world

    folder = run.stage("report")
    if join_world().main and (folder / "card.json").is_file():
        from private_rlhf.report.run_card import privacy_status
        from private_rlhf.report.run_facts import read_run
        from private_rlhf.report.sections import closing_lines

        facts, card = read_run(run, NAMES), json.loads((folder / "card.json").read_text(encoding="utf-8"))
        print_lines(*closing_lines(facts, privacy_status(facts), card, folder))


def _stage(
    name: str, config: Path, run_dir: Path | None, data: str | None, overrides: Sequence[str] | None, accept_code: bool,
    accept_reward: bool = False,
) -> None:  # fmt: skip
    from private_rlhf import runner
    from private_rlhf.core.rundir import RunDir

    recipe = _recipe(config, data, overrides, accept_reward)
    runner.execute_one(name, recipe, RunDir(run_dir or Path("runs") / recipe.name), accept_code)


def _add_stage(name: str, text: str) -> None:
    """Adds the command of a stage that does nothing without a recipe."""

    @app.command(name, help=f"Stage: {text}")
    def stage(
        config: Config,
        run_dir: RunDirectory = None,
        data: Data = None,
        accept_code: AcceptCode = False,
        accept_reward: AcceptReward = False,
        overrides: Overrides = None,
    ) -> None:
        _stage(name, config, run_dir, data, overrides, accept_code, accept_reward)


_own = {str(command.callback.__name__) for command in app.registered_commands if command.callback}
for each in STAGES:
    if each.name not in _own:  # some have more to say
        _add_stage(each.name, each.help)


if __name__ == "__main__":
    sys.exit(main())
