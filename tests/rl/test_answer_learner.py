"""The regression on the enumerable problem: what it reaches from stored answers, and where it goes back to."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.core.world import World
from private_rlhf.data.inputs import released_answers
from private_rlhf.data.release import ReleasedPair
from private_rlhf.lm.generate import sample_key
from private_rlhf.recipe import GvpoConfig
from private_rlhf.rl import resume_state
from private_rlhf.rl.answer_learner import AnswerLearner, best_step, group_steps, held_out_gains, split_prompts
from private_rlhf.rl.replay import HELD_OUT, NUMBERS, REFERENCE, RELEASE, Answers, Replay
from private_rlhf.stages.gvpo import Training
from support.engine_worker import serve
from support.fake_vllm import LIES, FakeVllm
from support.ppo_problem import PAD, Problem, StubRenderer

KL_COEF = 1.0
SETTINGS = {"samples_per_prompt": 4, "batch_size": 8, "learning_rate": 5e-3, "held_out_samples": 4, "evaluate_every": 4}


def learner_of(problem: Problem, **settings: Any) -> AnswerLearner:
    config = GvpoConfig(**{**SETTINGS, **settings})
    trainer = problem.trainer(rollouts=8, minibatch_size=8, kl_coef=KL_COEF, learning_rate=config.learning_rate)
    return AnswerLearner(trainer, config, KL_COEF)


def draws(learner: AnswerLearner, count: int, number: int = 0) -> Answers:
    """`count` answers of the policy to each prompt, in round `number`."""
    prompts = [prompt for prompt in learner.trainer.prompts for _ in range(count)]
    rollout, _ = learner.trainer.draw(prompts, [sample_key(number, row) for row in range(len(prompts))])
    return Answers.of(rollout, number).sorted()


# --- what it reaches --------------------------------------------------------------------------------------------------


def test_answers_of_another_policy_lead_to_the_gibbs_policy(problem: Problem) -> None:
    """All of them, as a uniform sampler draws them, with weights for their age that change the way and not the end."""
    learner = learner_of(problem, batch_size=114, samples_per_prompt=57, passes=60, learning_rate=1e-2, max_age=0)
    prompts = [prompt for prompt in problem.prompts for _ in problem.responses]
    rollout = learner.trainer.measure(prompts, problem.responses * 2)
    answers = Answers.of(rollout, 0)
    answers.logprob.fill_(-torch.tensor(57.0).log())
    before = copy.deepcopy(learner.trainer.model.value_head.state_dict())
    learner.learn(answers.sorted(), 3)
    assert 0.99 <= problem.gain(learner.trainer.policy, KL_COEF) <= 1.0
    after = learner.trainer.model.value_head.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rounds_of_fresh_answers_go_on_where_the_first_ends(problem: Problem) -> None:
    """Draws of π_ref miss answers that the policy then draws itself: 768 in three rounds do what PPO does not do with
    5,120 (tests/rl/test_gibbs.py)."""
    learner = learner_of(problem, batch_size=64, samples_per_prompt=32, passes=6)
    answers, gains = [], []
    for number in range(3):
        answers.append(draws(learner, 128, number))
        learner.learn(joined(answers), number)
        gains.append(problem.gain(learner.trainer.policy, KL_COEF))
    print("\nof the Gibbs gain after each round:", ", ".join(f"{gain:.1%}" for gain in gains))
    assert gains[0] < 0.8 < gains[1] < gains[2] <= 1.0
    assert gains[2] > 0.97


def joined(answers: list[Answers]) -> Answers:
    """All of them as one."""
    rows = {name: [row for each in answers for row in getattr(each, name)] for name in ("prompts", "responses")}
    return Answers(**rows, **{name: torch.cat([getattr(each, name) for each in answers]) for name in NUMBERS}).sorted()


# --- groups -----------------------------------------------------------------------------------------------------------


def test_each_pass_has_every_answer_once_and_groups_of_one_prompt() -> None:
    prompts = [[1]] * 9 + [[2]] * 8 + [[3]]
    steps = group_steps(prompts, 4, 2, 3, seed=1)
    assert len(steps) == 3 * 2
    for number in range(3):
        groups = [group for step in steps[2 * number : 2 * number + 2] for group in step]
        assert sorted(map(len, groups)) == [4] * 4
        rows = [row for group in groups for row in group]
        assert len(set(rows)) == 16
        assert 17 not in rows  # an answer without another one
        assert all(len({prompts[row][0] for row in group}) == 1 for group in groups)
    assert steps[:2] != steps[2:4]
    assert steps == group_steps(prompts, 4, 2, 3, seed=1)


def test_answers_of_several_iterations_make_groups(problem: Problem) -> None:
    """As those that PPO stores: one to each prompt in every iteration."""
    learner = learner_of(problem)
    answers = joined([draws(learner, 1, number) for number in range(4)])
    assert learner.learn(answers, 3) == {}
    assert learner.learn(answers.by_prompt, 3)["policy_loss"] > 0


def test_held_out_prompts_are_not_learnt_from() -> None:
    prompts = ["a", "b", "c", "b", "d"]
    learnt, held_out = split_prompts(prompts, 2)
    assert held_out == ["a", "c"]
    assert learnt == ["b", "b", "d"]
    assert split_prompts(["a", "b", "a"], 1) == (["b"], ["a"])


# --- the best step ----------------------------------------------------------------------------------------------------


def test_an_earlier_step_is_restored_only_if_it_is_clearly_better() -> None:
    assert best_step([[0.0, 0.0], [1.0, 1.1], [0.5, 0.6]]) == 1
    assert best_step([[0.0, 0.0], [1.0, 0.0], [0.0, 0.9]]) == 2  # by less than the error of the difference
    assert best_step([[0.0], [1.0], [2.0]]) == 2


def test_held_out_gain_is_that_of_the_policy(problem: Problem) -> None:
    """Against exact sums, by many answers."""
    learner = learner_of(problem)
    learner.learn(draws(learner, 64), 0)
    exact, reference = [], []
    for prompt in problem.prompts:
        base = problem.log_probabilities(problem.model, prompt)
        current, reward = problem.log_probabilities(learner.trainer.policy, prompt), problem.reward_vector(prompt)
        reference.append(float((base.exp() * reward).sum()))
        exact.append(float((current.exp() * (reward - KL_COEF * (current - base))).sum()) - reference[-1])
    _, gains = held_out_gains(learner.trainer, problem.prompts, 500, KL_COEF, reference)
    assert gains == pytest.approx(exact, abs=0.15)


# --- rounds, killed and resumed ---------------------------------------------------------------------------------------


def training(problem: Problem, folder: Path, **settings: Any) -> Training:
    problem.references = {}
    learner = learner_of(problem, **settings)
    resume_state.install_hooks(learner.trainer.accelerator)
    learner.trainer.scorer.references.update(resume_state.latest_references(folder / "checkpoints"))
    replay = Replay(folder / "replay", {"reference": "x"}, World(0, 1))
    return Training(learner.trainer, learner, learner.settings, replay, folder / "checkpoints", ["5 6 7 2"], {})


@pytest.mark.parametrize(("kill", "released"), [(2, 0), (5, 0), (9, 0), (5, 8), (9, 8)])
def test_killed_and_resumed_ends_at_the_same_bits(
    problem: Problem, trainable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: int, released: int
) -> None:
    """In the first round, after its last step and in the second; 4 + 6 steps, checkpoints at 0, 4, 8 and 10. With eight
    released answers 6 + 8.
    """
    problem.prompts = ["3 4", "4 3"]
    for response in problem.responses:
        text = problem.renderer.text(response)
        problem.rewards["4 3", text] = -problem.rewards["3 4", text]
    settings = {"rounds": 1, "passes": 2}
    others = {RELEASE: Answers.unscored([[3, 4]] * released, problem.responses[:released], 0)}
    whole = training(problem, tmp_path / "whole", **settings)
    whole.others = others
    whole.resume()
    whole.train()
    assert [entry["step"] for entry in whole.history] == ([0, 4, 6, 8, 12, 14] if released else [0, 4, 8, 10])
    assert len(whole.answers.read(RELEASE)) == released
    assert (len(whole.answers.read(REFERENCE)), len(whole.answers.read("gvpo"))) == (16, 8)

    stopped = training(problem, tmp_path / "killed", **settings)
    step, made = AnswerLearner.step, []

    def stop(self: AnswerLearner, *arguments: Any) -> dict[str, float]:
        made.append(1)
        if len(made) > kill:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(AnswerLearner, "step", stop)
    stopped.others = others
    stopped.resume()
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    monkeypatch.undo()
    resumed = training(problem, tmp_path / "killed", **settings)
    resumed.others = others
    resumed.resume()
    resumed.train()
    assert resumed.history == whole.history
    assert resumed.restore_best() == whole.restore_best()
    for name, tensor in trainable(resumed.trainer).items():
        assert torch.equal(tensor, trainable(whole.trainer)[name]), name


@pytest.mark.parametrize("lie", ["", "stale", pytest.param("biased", marks=pytest.mark.thorough)])
def test_servers_draw_the_fresh_rounds_and_every_draw_is_proven(problem: Problem, tmp_path: Path, lie: str) -> None:
    """A liar tells the truth until the policy has moved; what it draws then is not kept."""
    problem.prompts = ["3 4"]
    size = {"held_out_samples": 256, "evaluate_every": 2} if lie == "biased" else {}
    plain = training(problem, tmp_path / "plain", rounds=1, **size)
    plain.resume()
    plain.train()
    with FakeVllm(problem.model, PAD, lie).running() as fake:
        made = training(problem, tmp_path / "served", rounds=1, **size)
        serve(made.trainer, tmp_path / "adapters", [fake.url])
        made.resume()
        if lie:
            with pytest.raises(RunStopped, match=LIES[lie]):
                made.train()
            assert len(made.answers.read("gvpo")) == 0
            return
        made.train()
    proofs = [entry.pop("engine") for entry in made.history]
    assert made.history == plain.history
    drawn = [{"reference", "policy"}, {"policy"}, {"round 1", "policy"}, {"policy"}]
    assert [set(proof) for proof in proofs] == drawn
    assert all(facts["largest"] < 1e-5 for proof in proofs for facts in proof.values())
    assert proofs[2]["round 1"]["from_base"] > 1e-3
    assert made.trainer.engine.summary(made.history)["vllm"] == ["0.32.0"]


def test_a_policy_that_only_loses_goes_back_to_its_start(
    problem: Problem, trainable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learnt with the rewards turned round, it loses by the true ones, and π_ref comes back."""
    problem.prompts = ["3 4"]
    made = training(problem, tmp_path, passes=20)
    start = trainable(made.trainer)
    made.resume()
    made.held_out = ["3 4"]
    made.reference = held_out_gains(made.trainer, ["3 4"], 4, KL_COEF, [0.0])[1]
    read = Replay.read

    def turned(self: Replay, *by: str) -> Answers:
        answers = read(self, *by)
        return Answers(**{**vars(answers), "score": -3 * answers.score})

    monkeypatch.setattr(Replay, "read", turned)
    made.train()
    assert made.history[-1]["objective_gain"] < 0
    assert made.restore_best() == 0
    assert all(torch.equal(start[name], tensor) for name, tensor in trainable(made.trainer).items())


# --- answers of the released pairs ------------------------------------------------------------------------------------


def test_released_answers_depend_on_no_label() -> None:
    """Different ones, of one message and of no more tokens than the policy draws; none to other prompts."""
    others = [("9 9", "1", "2")]
    pairs = [("3 4", "2 1", "1"), ("3 4", "1", "6 1"), ("3 4", "2 5 1", "4 1"), ("3 4", "-4 1", "7 1"), *others]
    drawable = [[1], [2, 1], [4, 1], [6, 1], [7, 1]]
    taken = [
        released_answers([ReleasedPair(*row, "id") for row in rows], StubRenderer(), ["5", "3 4"], 9)
        for rows in (pairs, [(prompt, b, a) for prompt, a, b in reversed(pairs)])
    ]
    assert taken[0][0] == taken[1][0] == [[3, 4]] * 5
    assert taken[0][1] == taken[1][1]
    assert sorted(taken[0][1]) == drawable
    rows = [ReleasedPair(*row, "id") for row in pairs]
    assert released_answers(rows, StubRenderer(), ["3 4"], 2)[1] == taken[0][1][:2]
    with pytest.raises(UserError, match=r"^gvpo.released_answers must be 0 where .* is within .* = 2, got 2: raise"):
        released_answers(rows, StubRenderer(), ["5"], 2)


def test_released_answers_lead_to_the_gibbs_policy(problem: Problem, tmp_path: Path) -> None:
    """All answers of which there are, in the release; eight draws of π_ref show few of them."""
    problem.prompts = ["3 4"]
    gains = []
    for name in ("drawn", "released"):
        made = training(problem, tmp_path / name, passes=40, samples_per_prompt=8, evaluate_every=400)
        if name == "released":
            made.others = {RELEASE: Answers.unscored([[3, 4]] * len(problem.responses), problem.responses, 0)}
        made.resume()
        made.train()
        gains.append(problem.gain(made.trainer.policy, KL_COEF))
    assert made.drawn == 8
    assert gains[0] < 0.8
    assert 0.95 < gains[1] <= 1.0


# --- the replay -------------------------------------------------------------------------------------------------------


def answers_of(*rows: tuple[list[int], list[int], float]) -> Answers:
    return Answers.unscored([row[0] for row in rows], [row[1] for row in rows], 0, [row[2] for row in rows])


def test_shares_come_back_in_one_order_whoever_wrote_them(tmp_path: Path) -> None:
    rows = [([3, 4], [7], 0.5), ([3, 4], [6, 1], 1.5), ([2], [5], -1.0)]
    whole = Replay(tmp_path / "one", {"seed": 0}, World(0, 1))
    whole.restart(0)
    whole.write("ppo", 0, answers_of(*rows))
    for rank in range(2):
        part = Replay(tmp_path / "two", {"seed": 0}, World(rank, 2))
        if rank == 0:
            part.restart(0)
        part.write("ppo", 0, answers_of(*rows[rank::2]))
        assert len(part.read("ppo")) == (0 if rank == 0 else 3)  # a draw counts once every share is there
    one, two = whole.read("ppo"), Replay(tmp_path / "two", {"seed": 0}, World(0, 1)).read("ppo")
    assert one.prompts == two.prompts == [[2], [3, 4], [3, 4]]
    assert one.responses == two.responses == [[5], [6, 1], [7]]
    assert one.score.tolist() == two.score.tolist() == [-1.0, 1.5, 0.5]
    assert len(one.learnable) == 0  # log-probabilities are not known


def test_what_is_done_again_is_forgotten(tmp_path: Path) -> None:
    replay = Replay(tmp_path, {"seed": 0}, World(0, 1))
    replay.restart(0)
    for by, iteration in (("ppo", 0), ("ppo", 1), ("ppo", 2), (REFERENCE, 2), (REFERENCE, 0), (HELD_OUT, 0)):
        place = {REFERENCE: 3, HELD_OUT: 5}.get(by, 1) + (0 if by != "ppo" else iteration)
        answers = answers_of(([place], [9], 0.0))
        answers.iteration.fill_(float(iteration))
        replay.write(by, iteration, answers)
    replay.restart(2)
    assert replay.read("ppo").prompts == [[1], [2]]
    assert replay.read().prompts == [[1], [3], [2]]  # held-out answers only by their name
    assert replay.completions() == {(5,): [[9]], (3,): [[9]]}
    replay.restart(0)
    assert len(replay.read("ppo", HELD_OUT)) == 0


def test_answers_of_another_reference_policy_are_not_read(tmp_path: Path) -> None:
    Replay(tmp_path, {"seed": 0}, World(0, 1)).restart(0)
    Replay(tmp_path, {"seed": 0}, World(0, 1)).write("ppo", 0, answers_of(([1], [9], 0.0)))
    other = Replay(tmp_path, {"seed": 1}, World(0, 1))
    assert len(other.read()) == 0
    other.restart(0)
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]
    assert json.loads((tmp_path / "index.json").read_text()) == {"seed": 1}


@pytest.mark.parametrize("processes", [1, 2])
def test_stored_completions_are_not_drawn_again(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """They come back in the order in which they were drawn: what is learnt from them is the same to the last bit."""
    settings = {"rollouts": 8, "minibatch_size": 4, "reference_samples": 4}
    problem.references = {}
    rollout, _ = problem.trainer(**settings).draw_references(problem.prompts)
    problem.references = {}
    trainer = problem.trainer(**settings)
    replays = [Replay(tmp_path, {"seed": 0}, World(rank, processes)) for rank in range(processes)]
    replays[0].restart(0)
    for replay in replays:
        replay.write_rollout(REFERENCE, 0, rollout)
    trainer.completions = replays[0].completions()

    def sample(model: Any, prompts: list[Any], *_: Any, **__: Any) -> Any:
        return ([], None) if not prompts else pytest.fail("drawn")

    monkeypatch.setattr(trainer.engine, "sample", sample)
    again, _ = trainer.draw_references(problem.prompts)
    assert again.responses == rollout.responses
    assert torch.equal(again.scores, rollout.scores)


# --- PPO with it inside -----------------------------------------------------------------------------------------------


def test_ppo_starts_from_the_regression_on_its_references(problem: Problem) -> None:
    problem.references = {}
    settings = {"rollouts": 8, "minibatch_size": 4, "reference_samples": 16, "kl_coef": KL_COEF}
    trainer = problem.trainer(**settings, warm_start="regression", iterations=2)
    learner = AnswerLearner(trainer, GvpoConfig(**{**SETTINGS, "passes": 6}), KL_COEF)
    trainer.warm_start = lambda rollout: learner.learn(Answers.of(rollout, 0).sorted(), 0)
    rollout, entry = trainer.improve(0)
    assert len(rollout.responses) == 32
    assert entry["policy_loss"] > 0
    assert entry["value_loss"] == 0
    assert problem.gain(trainer.policy, KL_COEF) > 0.1
    assert len(trainer.improve(1)[0].responses) == 8


@pytest.mark.parametrize("regression_first", [True, False])
def test_neither_loss_steps_with_the_moments_of_the_other(problem: Problem, regression_first: bool) -> None:
    """Adam divides by the size of earlier gradients, and the two losses differ in it."""
    learner, fresh = learner_of(problem), learner_of(problem)
    answers = draws(learner, 4)
    one, other = lambda each: each.learn(answers, 0), lambda each: each.trainer.improve(0)
    before, after = (one, other) if regression_first else (other, one)
    before(learner)
    learnt = learner.trainer.bare.state_dict()
    fresh.trainer.bare.load_state_dict(learnt)
    after(learner)
    after(fresh)
    expected, weights = fresh.trainer.bare.state_dict(), learner.trainer.bare.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
