"""Errors planted into the accountants and into the experiments of `validate`: none may leave every verdict as it is.

Those of the review keep their letters: O offline, N online, K kl_dp, D dptd, P private_rl; A are of the accountants and
came later; C make infinite or undefined what a claim measures, which must refute it and not end the study.
"""

from __future__ import annotations

from dataclasses import dataclass

from mutations.mutant import Edit, Mutant

STUDIES, ACCOUNTING = "lab/private_rlhf_lab/studies", "lab/private_rlhf_lab/accounting"
BANDITS = "pipeline/validation/bandits.py"
FINITE, RATES = f"{STUDIES}/offline/finite.py", "pipeline/validation/offline.py"
HARD, PESSIMISM = f"{STUDIES}/offline/hard.py", f"{STUDIES}/offline/pessimism.py"
ONLINE, OUTCOMES = "pipeline/validation/regret.py", "pipeline/validation/outcome_rewards.py"
SUBSETS, ZCDP = "pipeline/accounting/subset_sampling.py", f"{ACCOUNTING}/steps.py"
DRAWS, COMPOSITION, DPTD = (f"{ACCOUNTING}/{name}.py" for name in ("draws", "composition", "dptd"))
PRL, BOUNDED = (f"{ACCOUNTING}/{name}.py" for name in ("private_rl", "bounded_range"))
REPORTS = f"{STUDIES}/private_rl/reports.py"
EQUAL = f"{STUDIES}/kl_dp/equal_utility.py"
STEPS, NETWORK = f"{STUDIES}/dptd/algorithms.py", f"{STUDIES}/dptd/network.py"
UPDATES, GENERAL, PLATEAUS = (f"{STUDIES}/private_rl/{name}.py" for name in ("updates", "general", "plateaus"))


def _error(name: str, said: str, file: str, *places: tuple[str, str]) -> Mutant:
    edits = tuple(Edit(file, old, new) for old, new in places)
    return Mutant(name, said, "", edits, attacks=(), twins=None)


OFFLINE = (
    _error("O1", "the MLE ignores the flips", BANDITS,
           ("problem = _Fits(counts, difference, epsilon, ridge, loss)",
            'problem = _Fits(counts, difference, float("inf"), ridge, loss)')),
    _error("O2", "labels are kept 3 points too often", BANDITS,
           ("    keep = keep_prob(epsilon)\n    plus", "    keep = min(1.0, keep_prob(epsilon) + 0.03)\n    plus")),
    _error("O3", "the Fisher information is that of true labels", RATES,
           ("fisher_weights(difference @ self.theta, epsilon)", "fisher_weights(difference @ self.theta, math.inf)")),
    _error("O4", "the policy comes from 1.1 times the reward", RATES,
           ("subopt[row, column] = problem.subopt(fit.theta)",
            "subopt[row, column] = problem.subopt(1.1 * fit.theta)")),
    _error("O5", "the predicted SubOpt is twice as large", RATES,
           ("= problem.predicted(number, epsilon)", "= 2.0 * problem.predicted(number, epsilon)")),
    _error("O6", "optimism where pessimism is meant (rare responses)", PESSIMISM,
           ("bandit.gibbs(reward - gamma)", "bandit.gibbs(reward + gamma)")),
    _error("O7", "the bonus of Eq. 10 lacks (2 alpha - 1)^-2", FINITE, ("/ factor(epsilon) ** 2 * rate", "* rate")),
    _error("O8", "a third of the bonus of Eq. 10", FINITE,
           ("np.asarray(np.sqrt(concentration", "np.asarray(np.sqrt(concentration / 9.0")),
    _error("O9", "a quarter of the concentrability", FINITE,
           ("variance[distinct, None, None]).max(axis=0)", "variance[distinct, None, None]).max(axis=0) / 4.0")),
    _error("O10", "Algorithm 1 adds its bonus", FINITE, ("pessimistic = found - gamma", "pessimistic = found + gamma")),
    _error("O11", "five times the published lower bound, within its slack of 8.6", HARD,
           ("return 0.25 * math.exp(-1.0)", "return 1.25 * math.exp(-1.0)")),
    _error("O12", "twelve times the published lower bound", HARD,
           ("return 0.25 * math.exp(-1.0)", "return 3.0 * math.exp(-1.0)")),
)
ENDLESS = (
    _error("C1", "the predicted SubOpt is 0: a ratio over nothing", RATES,
           ("= problem.predicted(number, epsilon)", "= 0.0 * problem.predicted(number, epsilon)")),
    _error("C2", "SubOpt is 0: the slope of nothing", RATES,
           ("subopt[row, column] = problem.subopt(fit.theta)",
            "subopt[row, column] = 0.0 * problem.subopt(fit.theta)")),
)  # fmt: skip
UNEQUAL = (
    _error("C3", "the policy from randomised labels shuns what they prefer, and no epsilon buys the gain", EQUAL,
           ("share(fit.theta.numpy(), GREEDY)", "share(-fit.theta.numpy(), GREEDY)")),
)  # fmt: skip
INTERACTIVE = (
    _error("N1", "least squares ignores the flips", ONLINE,
           ("loss_values(self.margin, epsilon, loss)", "loss_values(self.margin, math.inf, loss)")),
    _error("N2", "the bonus is 0", ONLINE,
           ("self.bonus = np.minimum(self.clip, self.radius * self.uncertainty)",
            "self.bonus = np.zeros_like(self.uncertainty)")),
    _error("N3", "U is not centred", ONLINE,
           ("uncertainty(self.world.members - mean,", "uncertainty(self.world.members,")),
    _error("N4", "labels are not privatised", ONLINE,
           ("private_labels(generator, compared, truth, epsilon)",
            "private_labels(generator, compared, truth, math.inf)")),
    _error("N5", "pi2 comes from minus the bonus", ONLINE,
           ("world.bandit.kl_coef).gibbs(self.bonus)", "world.bandit.kl_coef).gibbs(-self.bonus)")),
    _error("N6", "a tenth of Gamma", ONLINE,
           ("return constant * math.exp(bound)", "return 0.1 * constant * math.exp(bound)")),
)  # fmt: skip
DRAWN = (
    _error("K1", "bandit, e0 times .9", DRAWS,
           ("return (reward_range / (min_count + 1)", "return 0.9 * (reward_range / (min_count + 1)")),
    _error("K2", "linear, pure, times .9", DRAWS,
           ("return (shift + pessimism * inverse_root_drop(lambda_min))",
            "return 0.9 * (shift + pessimism * inverse_root_drop(lambda_min))")),
    _error("K3", "linear, e(tau) times .9", DRAWS,
           ("return tau * (2.0 * residual", "return 0.9 * tau * (2.0 * residual")),
    _error("K4", "RLHF label times .9", DRAWS, ("return 2.0 * reach * min(", "return 1.8 * reach * min(")),
    _error("K5", "RLHF label, e(tau) times .5", DRAWS,
           ("if tau is None else tau\n", "if tau is None else 0.5 * tau\n")),
    _error("K6", "RLHF add-remove times .9", DRAWS,
           ("return (shift * feature_norm", "return 0.9 * (shift * feature_norm")),
    _error("K7", "RLHF add-remove, e(tau) times .5", DRAWS,
           ("return tau * (shift + pessimism", "return 0.5 * tau * (shift + pessimism")),
    _error("K8", "RLHF label for given features times .9", DRAWS,
           ("return action_width * pair_width", "return 0.9 * action_width * pair_width")),
    _error("K9", "the delta of the badly covered times .9", DRAWS,
           ("return max(math.exp(exponent)", "return max(0.9 * math.exp(exponent)")),
    _error("K10", "the delta of the badly covered times .3", DRAWS,
           ("return max(math.exp(exponent)", "return max(0.3 * math.exp(exponent)")),
    _error("K11", "zCDP e^2/10 for e^2/8", ZCDP, ("** 2 / 8.0", "** 2 / 10.0")),
    _error("K12", "zCDP e^2/16 for e^2/8", ZCDP, ("** 2 / 8.0", "** 2 / 16.0")),
    _error("K13", "total variation: the factor is e^e, not 1 + e^e", COMPOSITION,
           ("factor = 1.0 + math.exp(epsilon)", "factor = math.exp(epsilon)")),
    _error("K14", "pointwise error a for 2a", COMPOSITION, ("epsilon + 2.0 * log_error", "epsilon + log_error")),
    _error("K15", "a draw after randomised response, times .95", COMPOSITION,
           ("return min(2.0 * math.atanh(product)", "return 0.95 * min(2.0 * math.atanh(product)")),
    _error("K16", "the curvature is that of L = 1.8 F", DRAWS,
           ('reach = 2.0 * positive("feature_norm"', 'reach = 1.8 * positive("feature_norm"')),
    _error("K17", "delta without its pessimism term", DRAWS,
           ("(reward_gap - penalty_gap) / kl_coef", "reward_gap / kl_coef")),
    _error("K18", "xi, the ridge's part too low", DRAWS,
           ("width / math.hypot(width", "0.9 * width / math.hypot(width")),
    _error("K19", "m draws: m delta is not added", COMPOSITION, ("spent = draws * delta", "spent = 0.0 * delta")),
    _error("A1", "bandit, delta without the range of the rewards", DRAWS,
           ("kl_coef, gap, reward_range)", "kl_coef, gap, 0.0)")),
    _error("A2", "linear, delta with half the gap of the rewards", DRAWS,
           ("gap = (split.separation or 2.0) * (largest", "gap = 0.5 * (split.separation or 2.0) * (largest")),
    _error("A3", "the penalty's drop from the larger count", DRAWS,
           ("return step / (low * high * (low + high))", "return step / (high * high * (high + high))")),
)
CONVENTIONS = (
    _error("A9", "bandit without coverage: half the range of the rewards", DRAWS,
           ("epsilon = max(reward_range / positive(", "epsilon = max(0.5 * reward_range / positive(")),
    _error("A10", "linear in a ball: .8 of its radius", DRAWS,
           ('reward_abs_max + positive("parameter_norm"', 'reward_abs_max + 0.8 * positive("parameter_norm"')),
)
TEMPORAL = (
    _error("D1", "the joint sensitivity lacks its root 2", DPTD,
           ("return 2.0 * math.sqrt(2.0) * positive", "return 2.0 * positive")),
    _error("D2", "a tenth of the joint sensitivity", DPTD,
           ("return 2.0 * math.sqrt(2.0) * positive", "return 0.2 * math.sqrt(2.0) * positive")),
    _error("D3", "the code adds a tenth of the noise", STEPS,
           ("estimate[:, noisy] += deviation[step", "estimate[:, noisy] += 0.1 * deviation[step")),
    _error("D4", "gradients are not clipped", NETWORK,
           ("return np.minimum(1.0, clip / norm)", "return np.minimum(1.0, 1e30 * clip / norm)")),
    _error("D5", "the accountant samples at 1/n^2", SUBSETS,
           ("return sample_size / population\n", "return sample_size / population**2\n")),
    _error("D6", "no projection onto the box", STEPS, ("return np.clip(parameters, -BOX, BOX)", "return parameters")),
    _error("D7", "descent on omega", STEPS,
           ("(project(omega + length * estimate[1]) - omega)",
            "(project(omega - length * estimate[1]) - omega)")),
    _error("A4", "the second player's estimate gets no noise", STEPS,
           ("estimate[:, noisy] += deviation[step, noisy, None].astype(dtype) * drawn",
            "estimate[0, noisy] += (deviation[step, noisy, None].astype(dtype) * drawn)[0]")),
    _error("A5", "a tenth of the steps is composed", SUBSETS,
           ("part.self_compose(steps) if steps > 1 else part\n", "part.self_compose(steps // 10 + 1)\n")),
    _error("A6", "every step takes one of the first hundred rows", STEPS,
           ("return generator.integers(0, len(data), (steps, runs))",
            "return generator.integers(0, min(100, len(data)), (steps, runs))")),
)
UPDATED = (
    _error("P1", "one read is counted", UPDATES,
           ("return later if self.window is None else min(self.window, later)", "return min(1, later)")),
    _error("P2", "sensitivity .25 for 1", PLATEAUS, ("TRUE = 25.0, 16.0, 1.0", "TRUE = 25.0, 16.0, 0.25")),
    _error("P3", "zCDP e^2/32 for e^2/8", PRL, ("math.sqrt(8.0 * rho / updates)", "math.sqrt(32.0 * rho / updates)")),
    _error("P4", "twice the exponent", PRL,
           ("exponent=steps[best] / (2.0 * sensitivity)", "exponent=steps[best] / sensitivity"),
           ('steps["zcdp"] / (2.0 * sensitivity)}', 'steps["zcdp"] / sensitivity}'),
           ("steps[name] / (2.0 * sensitivity)}", "steps[name] / sensitivity}")),
    _error("P5", "draws ignore the data", OUTCOMES,
           ("return (exponent * scores + noise).argmax(axis=1)", "return noise.argmax(axis=1)")),
    _error("P6", "draws take twice the exponent", OUTCOMES,
           ("return (exponent * scores + noise)", "return (2.0 * exponent * scores + noise)")),
    _error("P7", "a window is declared as one read", UPDATES, ("min(self.window, later)", "min(1, later)")),
    _error("P8", "Algorithm 1 without its infimum", GENERAL,
           ("excess = error - error.min(axis=1, keepdims=True)", "excess = error")),
    _error("A7", "batches are forgotten two updates late", UPDATES,
           ("if len(self._kept) > self.window:", "if len(self._kept) > self.window + 2:")),
    _error("A8", "rho of twice the epsilon", PRL,
           ("zcdp_rho(epsilon_total, delta)", "zcdp_rho(2.0 * epsilon_total, delta)")),
    _error("C4", "the best score is drawn, without noise", OUTCOMES,
           ("return (exponent * scores + noise).argmax(axis=1)", "return scores.argmax(axis=1)")),
    _error("C5", "draws take 30 times the exponent", OUTCOMES,
           ("return (exponent * scores + noise)", "return (30.0 * exponent * scores + noise)")),
    _error("A11", "the exact composition grants 1.2 times the epsilon", BOUNDED,
           ("value = np.maximum(-np.expm1(epsilon - lost), 0.0)",
            "value = np.maximum(-np.expm1(1.2 * epsilon - lost), 0.0)")),
)  # fmt: skip
REPORTED = (
    _error("A12", "reports are true as often as at twice the epsilon", REPORTS,
           ("(kinds - 1) * math.exp(-epsilon)", "(kinds - 1) * math.exp(-2.0 * epsilon)")),
)


@dataclass(frozen=True)
class Part:
    """Claims of a study, as `python -m private_rlhf_lab.studies STUDY --quick` has them, with the errors that some of
    them should refute.

    claims: an expression over the names of the study's run.py.
    """

    name: str
    study: str
    claims: str
    errors: tuple[Mutant, ...]


_CARTPOLE = "prepare(TASKS['cartpole'], QUICK_EPOCHS['cartpole'], 3, LIMIT[True])"
PARTS = (
    Part("private_rl, privacy", "private_rl",
         "[*accounts.claims(random_worlds(4, seed=5)), *audit.claims(True)]",
         tuple(each for each in UPDATED if each.name != "P8")),
    Part("private_rl, reports", "private_rl", "[*reports.privacy_claims(True)]", REPORTED),
    Part("private_rl, loss", "private_rl", "rates.exact(random_worlds(4, seed=5))",
         tuple(each for each in UPDATED if each.name == "P8")),
    Part("kl_dp", "kl_dp",
         "[*(each.verdict() for each in (*combined.lemma(4000), *bandit.searches(5), *linear.searches(2),"
         " *rlhf.searches(3, (0.5, 2.0)), *rlhf.threshold_searches(2), *combined.many_draws(200),"
         " *combined.inexact(300), combined.randomised_labels())), *extremes.claims()]", DRAWN),
    Part("kl_dp, conventions", "kl_dp",
         "[*(each.verdict() for each in conventions.searches(2)), *conventions.claims()]", CONVENTIONS),
    Part("kl_dp, equal utility", "kl_dp", "[*equal_utility.claims(equal_utility.measure(2, pairs=500))]", UNEQUAL),
    Part("dptd, privacy", "dptd",
         f"(lambda problem: [*theory.privacy_claims(problem, theory.calibrations(problem), 10),"
         f" *audit.claims(problem, problem.budget(EPSILON))])({_CARTPOLE})",
         tuple(each for each in TEMPORAL if each.name != "D7")),
    Part("dptd, direction", "dptd", f"[audit.direction({_CARTPOLE})]",
         tuple(each for each in TEMPORAL if each.name == "D7")),
    Part("offline, efficiency", "offline", "[*rates.efficiency_claims(rates.efficiency(4000, SEED + 2), SEED)]",
         OFFLINE[:3]),
    Part("offline, rates", "offline",
         "[*rates.rate_claims(rates.curves(1.0, 400, 4, SEED), rates.curves(4.0, 400, 4, SEED + 1), SEED)]",
         (*OFFLINE[3:5], *ENDLESS)),
    Part("offline, rare responses", "offline", "pessimism.claims(pessimism.measure(60, SEED + 7), SEED)", OFFLINE[5:6]),
    Part("offline, finite class", "offline",
         "finite.claims(finite.algorithm(100, SEED + 4), finite.lemma_b2(20_000, SEED + 5), finite.nets(60, SEED + 6),"
         " SEED + 4)", OFFLINE[6:10]),
    Part("offline, lower bound", "offline",
         "hard.claims(hard.grid(200, SEED + 8, (10**3, 10**4, 10**5, 10**6), theorem=True),"
         " hard.grid(200, SEED + 9, (10**4, 10**5, 10**6), theorem=False), hard.coverage_curve(200, SEED + 10), SEED)",
         OFFLINE[10:]),
    Part("online", "online", "study.__globals__['short'](10, SEED)", INTERACTIVE),
)  # fmt: skip
