"""A pair that was released before: under other names it is refused, corrected in words, or charged the sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data import engine
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.release import read_release
from private_rlhf.privacy import ledger_file
from private_rlhf.privacy.events import EVENT, LEGACY, EventStore, Generation, StagedGeneration
from private_rlhf.privacy.keys import load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from private_rlhf.privacy.ledger_file import LedgerFile
from private_rlhf.privacy.records import record_id
from private_rlhf.privacy.row_files import row_digest
from support.raw_releases import Row, run, shown

pytestmark = pytest.mark.usefixtures("quick_disk")
COUNT = 40


def rows_of(**more: Any) -> list[Row]:
    return [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}", **more} for i in range(COUNT)]


def turned(row: Row, **more: Any) -> Row:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"], **more}


def corrected(fixes: dict[int, str], corrects: bool) -> list[Row]:
    """The rows again; those of `fixes` turned round, with an event of their own that names their record."""
    rows = rows_of(event="", corrects="")
    for place, name in fixes.items():
        own = record_id(rows[place]["prompt"], (rows[place]["chosen"], rows[place]["rejected"]))
        rows[place] = turned(rows[place], event=name, corrects=own if corrects else "")
    return rows


def test_a_correction_costs_its_own_pair_both_draws_and_no_other(tmp_path: Path, key: Path) -> None:
    """The review's D1: four corrected labels, with the remedy that the refusal names."""
    run(rows_of(), tmp_path / "v1", key, budget=Budget(1.0, "event"))
    fixed = corrected({3: "fix-1", 8: "fix-2", 9: "fix-3", 30: "fix-4"}, True)
    names = {"event_column": "event", "corrects_column": "corrects"}
    with pytest.raises(UserError, match=r"4 events carry another label .*names the record that it corrects"):
        run([{**row, "event": "", "corrects": ""} for row in fixed], tmp_path / "v2", key, **names)
    with pytest.raises(UserError, match=r"over the budget of 1 per event: .* would make it 2"):
        run(fixed, tmp_path / "v2", key, **names)
    run(fixed, tmp_path / "v2", key, budget=Budget(2.0, "event"), **names)
    assert (shown(key)["epsilon_total"], shown(key)["events"]) == (2.0, COUNT + 4)
    first, second = ({row.record_id: row for row in read_release(tmp_path / name).rows} for name in ("v1", "v2"))
    same = [row for row in fixed if not row["event"]]
    assert all(first[name] == second[name] for name in map(id_of, same))  # not drawn again
    run(fixed, tmp_path / "v3", key, 0.5, **names)  # a smaller ε of the same events is free
    assert shown(key)["epsilon_total"] == 2.0
    with pytest.raises(UserError, match=r"would make it 2\.5"):  # raising the first draw raises the sum
        run(rows_of(), tmp_path / "v4", key, 1.5)


def test_a_correction_in_the_release_of_its_original_costs_both_draws(tmp_path: Path, key: Path) -> None:
    """As where a file that holds both comes under its first key: the first two files would cost 2 apart."""
    names = {"event_column": "event", "corrects_column": "corrects", "labeler_column": "who"}
    rows = [row | {"who": "ann"} for row in rows_of(event="", corrects="")]
    rows += [turned(rows[3], event=f"fix-{k}", corrects=id_of(rows[3])) for k in range(2)]
    rows += [turned(rows[8], who="bob", event="")]  # another person's label
    with pytest.raises(UserError, match=r"over the budget of 2 per event: .* would make it 3"):
        run(rows, tmp_path / "v1", key, budget=Budget(2.0, "event"), **names)
    run(rows, tmp_path / "v1", key, budget=Budget(3.0, "event"), **names)
    facts = shown(key)
    assert (facts["epsilon_total"], facts["events"]) == (3.0, COUNT + 3)
    run(rows, tmp_path / "v2", key, 0.5, **names)
    assert shown(key)["epsilon_total"] == 3.0


def id_of(row: Row) -> str:
    return record_id(row["prompt"], (row["chosen"], row["rejected"]))


@pytest.mark.parametrize("column", ["event_column", "labeler_column"])
def test_new_names_for_known_pairs_are_refused_or_charged_the_sum(tmp_path: Path, key: Path, column: str) -> None:
    """Thirty exports with other row ids, or re-salted annotators, used to cost nothing and tell every label."""
    run(rows_of(), tmp_path / "v1", key)
    renamed = [{**row, "name": f"row {i}"} for i, row in enumerate(rows_of())]
    with pytest.raises(UserError, match=rf"{COUNT} labels of pairs that were released .* come under other names"):
        run(renamed, tmp_path / "v2", key, 0.5, **{column: "name"})
    assert not (tmp_path / "v2").exists()
    assert (shown(key)["epsilon_total"], len(shown(key)["releases"])) == (1.0, 1)
    run(renamed, tmp_path / "v2", key, 0.5, add_up=True, **{column: "name"})
    assert shown(key)["epsilon_total"] == 1.5
    again = [{**row, "name": f"again {i}"} for i, row in enumerate(rows_of())]
    with pytest.raises(UserError, match="come under other names"):
        run(again, tmp_path / "v3", key, 0.5, **{column: "name"})


def test_a_column_that_is_empty_names_nothing(tmp_path: Path, key: Path) -> None:
    run(rows_of(), tmp_path / "v1", key)
    for place, empty in enumerate(("", None)):
        run(rows_of(event=empty, who=""), tmp_path / f"w{place}", key, event_column="event", labeler_column="who")
        assert read_release(tmp_path / "v1").rows == read_release(tmp_path / f"w{place}").rows
    assert (shown(key)["epsilon_total"], shown(key)["events"], shown(key)["labelers"]["count"]) == (1.0, COUNT, 0)


def test_another_person_s_label_is_a_new_event_where_all_were_named(tmp_path: Path, key: Path) -> None:
    run(rows_of(who="ann"), tmp_path / "v1", key, labeler_column="who")
    run(rows_of(who="bob"), tmp_path / "v2", key, labeler_column="who")
    assert (shown(key)["epsilon_total"], shown(key)["events"], shown(key)["labelers"]["count"]) == (1.0, 2 * COUNT, 2)
    second_answers = rows_of(who="ann", event="second")
    with pytest.raises(UserError, match="come under other names"):
        run(second_answers, tmp_path / "v3", key, labeler_column="who", event_column="event")
    with pytest.raises(UserError, match="come under other names"):
        run(rows_of(), tmp_path / "v4", key)  # whose labels are these?


def test_a_correction_names_its_own_record(tmp_path: Path, key: Path) -> None:
    run(rows_of(), tmp_path / "v1", key)
    names = {"event_column": "event", "corrects_column": "corrects"}
    rows = corrected({3: "fix"}, True)
    rows[3]["corrects"] = id_of(rows[4])
    with pytest.raises(UserError, match=r"line 4: corrects '[0-9a-f]{64}', which is not the record of its own pair"):
        run(rows, tmp_path / "v2", key, **names)
    rows[3] |= {"corrects": id_of(rows[3]), "event": ""}
    with pytest.raises(UserError, match="line 4: corrects an earlier label without a name of its own in 'event'"):
        run(rows, tmp_path / "v2", key, **names)
    with pytest.raises(UserError, match="--corrects-column needs --event-column"):
        Options(corrects_column="corrects")


def test_stored_labels_tell_nothing_without_the_key(tmp_path: Path, key: Path) -> None:
    """The review's D9: grouped by the first byte of the public id, the stored signs used to be the labels."""
    run(rows_of(), tmp_path / "v1", key, 20.0)  # z is the label
    book = LedgerFile(load_key(key)).read()
    stored = [np.sign(row["label"]) for byte in range(256) for row in book.events.read(byte)]
    z = []
    for row in sorted(read_release(tmp_path / "v1").rows, key=lambda row: row.record_id):
        a_is_lower = int(row.record_id[-1], 16) % 2 == 0
        z.append(1 if (row.chosen < row.rejected) == a_is_lower else -1)
    first_bytes = [row.record_id[:2] for row in sorted(read_release(tmp_path / "v1").rows, key=lambda r: r.record_id)]
    single = [i for i, byte in enumerate(first_bytes) if first_bytes.count(byte) == 1]
    agree = sum(int(stored[i]) == z[i] for i in single)
    assert 0.2 * len(single) < agree < 0.8 * len(single)


def test_a_store_of_before_opens_and_goes_on(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without records and with labels as they are, under format 1."""
    write_legacy_release(tmp_path, key, monkeypatch)
    assert Ledger.open(load_key(key)).verify() == []
    assert shown(key)["epsilon_total"] == 1.0
    with pytest.raises(UserError, match="an empty name was a name: give every row one"):
        run(rows_of(event=""), tmp_path / "v2", key, 2.0, event_column="event")
    with pytest.raises(UserError, match="come under other names"):
        run(rows_of(event="x"), tmp_path / "v2", key, 2.0, event_column="event")
    with pytest.raises(UserError, match="1 events carry another label"):
        run([turned(rows_of()[0]), *rows_of()[1:]], tmp_path / "v2", key, 2.0)
    run(rows_of()[: COUNT // 2], tmp_path / "v2", key, 2.0)
    assert (shown(key)["epsilon_total"], shown(key)["events"]) == (2.0, COUNT)
    assert Ledger.open(load_key(key)).verify() == []
    with pytest.raises(UserError, match="1 events carry another label"):
        run([turned(rows_of()[0]), *rows_of()[1:]], tmp_path / "v3", key, 3.0)


def write_legacy_release(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One release whose store and ledger are as they were before records were kept."""
    join = EventStore.join

    def joined(self: EventStore, staged: StagedGeneration, serial: int) -> Generation:
        made = join(self, staged, serial)
        assert made.path is not None
        rows = np.fromfile(made.path, EVENT)
        old = np.zeros(len(rows), LEGACY)
        for name in ("tag", "labeler", "epsilon"):
            old[name] = rows[name]
        old["label"] = rows["label"] // 2
        made.path.write_bytes(old.tobytes())
        digest = row_digest()
        digest.update(old.tobytes())
        return replace(made, digest=digest.hexdigest(), legacy=True)

    with monkeypatch.context() as patch:
        patch.setattr(EventStore, "join", joined)
        patch.setattr(engine, "blinds", lambda keys: np.ones(len(keys), np.int8))
        patch.setattr(ledger_file, "FORMAT", 1)
        run(rows_of(), tmp_path / "v1", key)
    assert shown(key)["events_before_spellings"] == COUNT
    text = (key.with_name(key.name + ".state") / "ledger.json").read_text()
    assert '"format": 1' in text
