"""Attacks on releases and runs: can anybody guess a label better than the stated epsilon allows?

**The adversary** sees everything released (release folders, a whole run directory, any other file they are given),
knows the code, the prompts and the responses, and, where an attack has to be fitted, the true labels of half of the
events. In two attacks (`copies`, `statistics`) they know every label but the one they guess. They do not have the key,
its state folder, or the raw file. Several releases of the same events count as one with the largest epsilon.

**A leak.** Text predicts labels, and so does a model trained on private ones; but *canary events* have fair coins for
labels, independent of the text. Whatever was released, the odds of such a label given everything else are at most
e^eps, also among the events that the adversary picks. So the number of right guesses is at most Binomial(guesses,
alpha), alpha = e^eps/(1+e^eps); every attack is judged by the exact upper tail of that law, and by Holm's procedure
over all attacks: a sound release is accused with probability 0.1 % in all (`judge`). The same count gives a lower bound
on epsilon (`suite.epsilon_bound`). Evidence that is not a matter of chance (a number that is named after the flips and
equals their count, a plain digest of the raw file) is reported as findings.

**Coordinates.** The attacks name a pair's responses by their text; a program may leak its label in other names. Fitted
attacks on places, columns and z therefore guess relative to each public sign of a row too (`learn.frames`). Boosted
trees on all of these are the catch-all (`learn.distinguisher`).

**Limits.** An attack cannot show that nothing leaks: `no leak found` comes with the smallest excess over alpha that
would have been found with probability 0.9. Prompts and responses are public; a person with many events loses more than
one event does. Poisoned responses, planted events and timings of the machine are outside this adversary model.
"""
