"""Attacks on releases and runs: can anybody guess a label better than the stated epsilon allows?

**The adversary** sees everything released (one or several release folders, a whole run directory, any other file they
are given), knows the code, the prompts and the responses, and, where an attack has to be fitted, the true labels of
half of the events. In two attacks (`copies`, `statistics`) they know every label but the one they guess: label
differential privacy holds against that adversary too. They do not have the key, its state folder, or the raw file.

**What counts as a leak.** alpha = e^eps/(1+e^eps) is not a ceiling on real labels: text predicts labels, and so does a
model trained on private ones. It is a ceiling on *canary events*, whose labels are fair coins independent of the text.
Whatever was released, the odds of such a label given everything else are at most e^eps, so that a guess is right with
probability at most alpha, also among the events that the adversary picks by looking at the release. The number of
right guesses is then at most Binomial(guesses, alpha); every attack is judged by the exact upper tail of that law, and
by Holm's procedure over all attacks, so that a sound release is accused with probability 0.1 % in all (`judge`). The
same count gives a lower bound on epsilon (`suite.epsilon_bound`); beside it stands an audit of the outcomes.

**Coordinates.** The attacks name a pair's responses by their text; a program may leak its label in other names. Fitted
attacks on places, columns and z therefore guess relative to each public sign of a row too: bits of ids, length, parity
of place and file (`learn.frames`). Boosted trees on all of these are the catch-all (`learn.distinguisher`).
Not crossed: recomputation from seeds, digests in ids, rows sorted by the answer, texts in files, checkpoints.

**Several releases** of the same events count as one with the largest epsilon, because that is what the project claims
(a chain of releases, see `private_rlhf.privacy.mechanism`).

**Evidence of another kind.** Some leaks are not a matter of chance: a number that is named after the flips and equals
their count, a plain digest of the raw file. They are reported as findings, without a p-value.

**Limits.** An attack cannot show that nothing leaks. `no leak found` comes with the smallest excess over alpha that the
number of canaries would have found with probability 0.9. Nor do the attacks touch what was never promised:
prompts and responses are public; the holder of the key or of the raw file sees the labels; a person with many events
loses more than one event does; a reader with prior p from the text is right max(alpha, p, 1-p) of the time. An attack
that changes what is released (a poisoned response, a planted event) is outside this adversary model, and so are timings
of the machine that privatises.

Imports `core`, `privacy`, `data`; torch only inside `files.checkpoints`, and
scikit-learn, where it is installed, inside `learn.distinguisher`.
"""
