"""Leaks planted into the law of the labels and their accounts: coins, stores, local mode, noisy counts."""

from __future__ import annotations

from mutations.mutant import Edit, Mutant

BATCHES, ENGINE, MECHANISM = "pipeline/privacy/batches.py", "pipeline/data/engine.py", "pipeline/privacy/mechanism.py"
EVENTS, LOCAL, COUNTS = "pipeline/privacy/events.py", "pipeline/privacy/local.py", "pipeline/privacy/counts.py"
ROWS, WHOLE, COLUMNS = "tests/data/test_curate_rows.py", "tests/data/test_curate.py", "tests/privacy/test_batches.py"
CHAIN, RENAMED = "tests/privacy/test_mechanism.py", "tests/data/test_renamed.py"
FILTER, NOISE, LEVELLED = "tests/privacy/test_local.py", "tests/privacy/test_counts.py", "tests/privacy/test_levels.py"

_END = "    z[walkers[coins != 0]] = coins[coins != 0]\n    return z\n"
_START = "    threshold = mechanism.threshold\n    if threshold == 0:\n"
_PLAIN = "        return last_coin(label, self.threshold, Coins(prf, event))\n"
_ROOTS = 'keys["root"] = _roots(prf, names, [event_suffix(*pair) for pair in zip(labelers, events, strict=True)])\n'
_SHARD = "        write_shard(temporary, job.schema, _tables(job, bucket, labels))\n"


def _after(file: str, old: str, new: str) -> Edit:
    return Edit(file, old, old + new)


def _before(file: str, old: str, new: str) -> Edit:
    return Edit(file, old, new + old)


LAW = (
    Mutant(
        "B",
        "30 % of the labels +1 are always kept and 5 % of the labels -1 always turned (ε 2 becomes 2.31)",
        "An attack that cannot see a leak",
        (
            Edit(
                BATCHES,
                _END,
                _END.replace(
                    "    return z\n",
                    '    z[keys["root"][:, 40] < np.select([keys["label"] > 0, keys["label"] < 0], [77, 13], 0)] = 1\n'
                    "    return z\n",
                ),
            ),
            _before(
                MECHANISM,
                _PLAIN,
                "        if prf.block(DOMAIN, event)[40] < (77 if label > 0 else 13):\n            return 1\n",
            ),
        ),
        tests=(f"{CHAIN}::test_marginal_frequency_on_samples",),
    ),
    Mutant(
        "C",
        "the same where the chosen text sorts first, or last",
        "An attack that cannot see a leak",
        (
            Edit(
                BATCHES,
                _END,
                _END.replace(
                    "    return z\n",
                    '    first = (keys["label"] > 0) == a_is_lower(keys)\n'
                    '    some = keys["root"][:, 40] < np.where(first, 77, 13)\n'
                    '    z[some & (keys["label"] != 0)] = np.where(first, keys["label"], -keys["label"])'
                    '[some & (keys["label"] != 0)]\n    return z\n',
                ),
            ),
        ),
        tests=(f"{COLUMNS}::test_releases_as_the_plain_mechanism",),
    ),
    Mutant(
        "D",
        "an independent flip for every ε",
        "The same labels at several ε",
        (
            Edit(
                BATCHES,
                _START,
                "    threshold, keys = mechanism.threshold, keys.copy()\n"
                '    roots = [bytes(root) + threshold.to_bytes(16, "big") for root in keys["root"]]\n'
                '    keys["root"] = np.frombuffer(prf.blocks(DOMAIN, roots), np.uint8).reshape(-1, 48)\n'
                "    if threshold == 0:\n",
            ),
            Edit(
                MECHANISM,
                "self.threshold, Coins(prf, event))",
                'self.threshold, Coins(prf, prf.block(DOMAIN, event) + self.threshold.to_bytes(16, "big")))',
            ),
        ),
        tests=(f"{CHAIN}::test_joint_law_of_two_levels_on_samples",),
    ),
    Mutant(
        "L",
        "one uniform number against the threshold of every ε",
        "One uniform against several thresholds",
        (
            Edit(
                BATCHES,
                _START,
                "    threshold = mechanism.threshold\n"
                '    high = np.ascontiguousarray(keys["root"][:, :8]).view(">u8").astype(np.uint64)[:, 0]\n'
                '    kept = high < _U64(((1 << 128) + threshold) >> 65)\n'
                '    return np.where(kept, keys["label"], -keys["label"]).astype(np.int8)\n' + _START,
            ),
            Edit(
                MECHANISM,
                _PLAIN,
                '        uniform = int.from_bytes(prf.block(DOMAIN, event)[:8], "big")\n'
                "        return label if uniform < ((1 << 128) + self.threshold) >> 65 else -label\n",
            ),
        ),
        tests=(f"{CHAIN}::test_joint_law_of_two_levels_on_samples",),
    ),
    Mutant(
        "a level by the label",
        "labels +1 are released at the largest of the declared ε",
        "The ε that a person chooses for a label depends on the answer",
        (
            Edit(
                BATCHES,
                '        keys["level"] = columns.levels[keep]\n',
                '        keys["level"] = np.where(keys["label"] > 0, columns.levels.max(), columns.levels[keep])\n',
            ),
        ),
        tests=(f"{LEVELLED}::test_each_row_is_what_its_level_alone_releases",),
        attacks=("levels",),
        twins="levels",
    ),
    Mutant(
        "one step too high",
        "labels are kept with a probability 1/2^8 above the stated one",
        "α as a float is 1 from ε = 37 on",
        (Edit(MECHANISM, 'd", keep_threshold(self.epsilon))', 'd", keep_threshold(self.epsilon) + 2**121)'),),
        tests=(f"{CHAIN}::test_labels_are_kept_as_often_as_stated",),
        attacks=("precise",),
    ),
    Mutant(
        "flips of a seed",
        "coins come from a public seed, not from the key",
        "Flips from a public seed and public ids",
        (
            Edit(
                ENGINE,
                "    prf = key().prf\n    runs: list[Run] = []\n",
                "    from private_rlhf.privacy.keys import insecure_seed_key\n\n"
                "    prf = insecure_seed_key(42).prf\n    runs: list[Run] = []\n",
            ),
            Edit(
                ENGINE,
                "release_labels(job.mechanism, job.key().prf, bucket.keys)",
                "release_labels(job.mechanism, __import__('private_rlhf.privacy.keys', fromlist=['keys'])"
                ".insecure_seed_key(42).prf, bucket.keys)",
            ),
        ),
        tests=(f"{ROWS}::test_labels_go_through_the_mechanism_of_their_event",),
    ),
    Mutant(
        "two keys",
        "every label is released a second time under a key of its own",
        "Several keys for the same labels",
        (
            Edit(ENGINE, "privacy.prf import frame\n", "privacy.prf import Prf, frame\n"),
            _after(
                ENGINE,
                _SHARD,
                '    again, other = bucket.keys.copy(), Prf(job.key().prf.digest([b"again"]))\n'
                '    blocks = other.blocks(b"label event/v2", map(bytes, again["root"]))\n'
                '    again["root"] = np.frombuffer(blocks, np.uint8).reshape(-1, 48)\n'
                "    twice = _tables(job, bucket, release_labels(job.mechanism, other, again))\n"
                '    write_shard(target.with_name(f"again-{target.name}"), job.schema, twice)\n',
            ),
        ),
        tests=(f"{ROWS}::test_where_every_private_label_agrees_the_bytes_agree",),
    ),
    Mutant(
        "flip without the labeller",
        "two labellers of one pair share their coins",
        "Two labels of one pair share a flip",
        (
            _after(
                BATCHES,
                _ROOTS,
                '    shared = _roots(prf, names, [event_suffix(None, event) for event in events])\n'
                '    keys["root"][:, :32] = shared[:, :32]\n',
            ),
        ),
        tests=(f"{COLUMNS}::test_releases_as_the_plain_mechanism",),
        attacks=("people",),
    ),
    Mutant(
        "flip without the event",
        "two events of one labeller and pair share their coins",
        "Two labels of one pair share a flip",
        (
            _after(
                BATCHES,
                _ROOTS,
                '    shared = _roots(prf, names, [event_suffix(labeler, None) for labeler in labelers])\n'
                '    keys["root"][:, :32] = shared[:, :32]\n',
            ),
        ),
        tests=(f"{COLUMNS}::test_releases_as_the_plain_mechanism",),
        attacks=("people",),
    ),
    Mutant(
        "flip of a correction",
        "a corrected label gets the coins of the first one",
        "A corrected label under the same event id",
        (
            _after(
                BATCHES,
                '        keys["corrects"] = columns.corrects[keep]\n',
                '        names = digests.view("V32").ravel().tolist() if len(keys) else []\n'
                "        first = _roots(prf, names, [event_suffix(None, None)] * len(keys))\n"
                '        keys["root"][keys["corrects"], :32] = first[keys["corrects"], :32]\n',
            ),
        ),
        tests=(f"{COLUMNS}::test_releases_as_the_plain_mechanism",),
        attacks=("corrected",),
        twins=None,
    ),
    Mutant(
        "K",
        "the store no longer refuses a corrected label under the name of the first",
        "A corrected label under the same event id",
        (
            Edit(
                EVENTS,
                'conflicts = int(np.count_nonzero(np.sign(stored) != given["label"] * signs))',
                "conflicts = 0",
            ),
        ),
        tests=(f"{WHOLE}::test_a_contradicting_label_is_refused_with_the_count_alone",),
        attacks=("corrected",),
        twins=None,
    ),
    Mutant(
        "renamed records",
        "known labels under new event names are drawn anew, and the ledger does not add them up",
        "**The same label under another name**",
        (
            Edit(
                EVENTS,
                'renamed = 0 if add_up else int(np.count_nonzero(same_label & ~new["corrects"]))',
                'renamed, same_label = 0, same_label & new["corrects"]',
            ),
        ),
        tests=(f"{RENAMED}::test_new_names_for_known_pairs_are_refused_or_charged_the_sum",),
        attacks=("renamed",),
        twins=None,
    ),
    Mutant(
        "local draws",
        "local mode draws anew when an event is sent again",
        "A local draw is made again",
        (
            Edit(LOCAL, "                if row is None:\n", "                if row is None or row:\n"),
            Edit(LOCAL, '"INSERT INTO draws VALUES', '"INSERT OR REPLACE INTO draws VALUES'),
        ),
        tests=(f"{FILTER}::test_an_event_is_drawn_once",),
        attacks=("local",),
        twins=None,
    ),
    Mutant(
        "H",
        "every one of several counts gets the noise of one that stands alone",
        "A noisy count of true labels",
        (Edit(COUNTS, "DiscreteLaplace.shared(epsilon, len(counts))", "DiscreteLaplace.shared(epsilon, 1)"),),
        tests=(f"{NOISE}::test_every_count_gets_the_noise_that_is_stated",),
        attacks=("counts",),
        twins=None,
    ),
    Mutant(
        "half the noise",
        "counts get half of the noise that is stated",
        "A noisy count of true labels",
        (
            Edit(
                COUNTS,
                "count + noise.draw(Bits(prf, names[rule]))",
                "count + round(noise.draw(Bits(prf, names[rule])) / 2)",
            ),
        ),
        tests=(f"{NOISE}::test_every_count_gets_the_noise_that_is_stated",),
        attacks=("counts",),
        twins=None,
    ),
)
