"""A summary of a labelled source before its labels are used: what was read, what is left out and why, what is learnt.

Nothing in it depends on a label: responses are counted together or stand in the order of their texts, and the rows that
are shown are those whose record ids come first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from private_rlhf.core.errors import UserError, one_line, printable
from private_rlhf.data.curate import OpenedSource
from private_rlhf.data.declared_columns import SIGNED, Options
from private_rlhf.data.formats import FIRST_ROWS, MarkedSource
from private_rlhf.data.layout import LABELER
from private_rlhf.data.odd_texts import SIGNS, signs
from private_rlhf.data.render import Renderer
from private_rlhf.data.sources import NestedTooDeeply, Row, open_source
from private_rlhf.privacy.guarantee import dropped_text
from private_rlhf.privacy.records import Text, encode_text, fold_name, is_blank, message_text, record_id

HEAD_ROWS = 1000
SHORT = 5
"""Characters of a prompt that is hardly one."""
ODD_SHARE, REPEATED_SHARE, LEAST = 0.1, 0.5, 100
"""Shares of the rows over which a source is odd, and the rows from which that is judged."""
RENDERED, SHOWN, MOST_SHOWN = 1000, 2, 2000
"""Pairs that are counted in tokens; pairs that are shown, and characters of each text."""


class SourceSummary:
    """Content of a source. UserError while it is made: the first bad row.

    rows: pairs that were read; whole: all of the source. columns: those that it has. dropped: reason -> count, also of
    unjudged rows, which hold none. prompts: different ones; short: those under SHORT characters. signs: of `odd_texts`
    -> pairs. turns: messages of a dialogue -> pairs. characters, tokens: of prompts and responses; tokens only with a
    renderer, of at most RENDERED pairs, with too_long, the number of them over a limit. shown: the first pairs, as the
    model sees them.
    """

    def __init__(self, opened: OpenedSource, renderer: Renderer | None = None, most: int | None = None) -> None:
        """Read a source, or its first `most` rows. renderer: shows texts as token ids; without one as they are."""
        self.opened, self.options = opened, opened.layout.options
        self.columns = {name for part in opened.parts for name in part.columns or ()}
        self.dropped: Counter[str] = Counter(identical=0, empty=0, duplicates=0, ties=0)
        self.signs: Counter[str] = Counter()
        self.turns: Counter[int] = Counter()
        self.characters: dict[str, list[int]] = {"prompts": [], "responses": []}
        self.rows = self.short = 0
        seen: set[tuple[Any, ...]] = set()
        prompts: set[int] = set()
        first: list[tuple[int, int, tuple[Text, Text, Text]]] = []  # of the smallest record ids, negative
        labeler, event = self.options.labeler_column or LABELER, self.options.event_column
        for _, row, ((prompt, *responses), sign) in self._judged_rows(most):
            self.rows += 1
            self._measure(prompt, responses)
            prompts.add(hash(encode_text(prompt)))
            reason = _reason(prompt, responses, sign, self.options)
            if reason is None:
                name = record_id(prompt, responses)
                key = (name, fold_name(str(row.get(labeler))), str(row.get(event)))
                reason = "duplicates" if key in seen else None
                seen.add(key)
            if reason is not None:
                self.dropped[reason] += 1
                continue
            one, other = sorted(responses, key=encode_text)
            item = (-int(name, 16), self.rows, (prompt, one, other))
            heapq.heappush(first, item) if len(first) < RENDERED else heapq.heappushpop(first, item)
        self.whole = most is None or self.rows + self.dropped["unjudged"] < most
        self.prompts = len(prompts)
        pairs = [pair for _, _, pair in sorted(first, reverse=True)]
        self.tokens, self.too_long = _tokens(renderer, pairs)
        self.shown = [line for place, pair in enumerate(pairs[:SHOWN], 1) for line in _shown(place, pair, renderer)]

    def _measure(self, prompt: Text, responses: Sequence[Text]) -> None:
        """Counts the sizes of a pair, and the signs that it shows."""
        size = len(_plain(prompt))
        self.characters["prompts"].append(size)
        self.characters["responses"] += [len(_plain(each)) for each in responses]
        self.turns[_turns(prompt) + max(map(_turns, responses))] += 1
        self.short += size < SHORT
        self.signs.update(signs(prompt, responses))

    def _judged_rows(self, left: int | None) -> Iterator[Any]:
        """The judged pairs of the first `left` rows, whose columns are noted; counts the unjudged ones."""
        layout, whole = self.opened.layout, left is None

        def noted(rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
            nonlocal left
            try:
                for number, row in rows:
                    left = None if left is None else left - 1
                    self.columns.update(row)
                    yield number, row
            except NestedTooDeeply:
                if whole:
                    raise  # the head ends before it: whoever reads all rows can read it, or names it

        for part in self.opened.parts:
            rows = noted(islice(part.rows(layout.wanted), left))
            try:
                yield from layout.judged_rows(rows, f"{part.name}, {part.unit}", self.dropped)
            except MarkedSource as fault:
                raise layout.marked(self.opened.parts, fault) from None

    @property
    def read(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(sorted(self.columns & {*self.opened.layout.wanted}))

    @property
    def unread(self) -> tuple[str, ...]:
        """The columns that are not read."""
        return tuple(sorted(self.columns - {*self.opened.layout.wanted}))

    def odd(self) -> list[str]:
        """Oddities of the source, over the stated shares."""
        named = self.options.labeler_column or self.options.event_column
        counts = {
            f"a prompt of under {SHORT} characters": (self.short, ODD_SHARE, 1.0),
            "two identical responses": (self.dropped["identical"], ODD_SHARE, 1.0),
            "an empty prompt or response": (self.dropped["empty"], ODD_SHARE, 1.0),
            "a pair that an earlier row holds": (0 if named else self.dropped["duplicates"], REPEATED_SHARE, 1.0),
            **{sign: (count, *SIGNS[sign]) for sign, count in self.signs.items()},
        }
        shares = ((what, count, share if self.rows >= LEAST else few) for what, (count, share, few) in counts.items())
        return [self._share(count, what) for what, count, most in shares if count > most * self.rows]

    def _share(self, count: int, what: str) -> str:
        return f"{count} of {self.rows} rows have {what}"

    def check(self, accept: bool) -> None:
        """UserError for an odd source, unless it is accepted."""
        if not accept and (odd := self.odd()):
            raise UserError(
                f"{self.opened.name}: {'; '.join(odd)}: look at it with `private-rlhf inspect`, then repair it, or say"
                " that it is meant (data.accept_odd: true, for privatize --accept-odd)"
            )

    def lines(self) -> list[str]:
        """For people."""
        what = f"{self.rows + self.dropped.get('unjudged', 0)} {'rows' if self.whole else 'first rows'}"
        turns = ", ".join(f"{count} ({rows} rows)" for count, rows in sorted(self.turns.items()))
        files, form = sum(len(part.files) or 1 for part in self.opened.parts), self.opened.layout.form
        found = [
            f"{one_line(self.opened.name)}: {what} of {files} file(s), read as {form.partition('; columns')[0]}",
            f"this form was chosen by the first {FIRST_ROWS} rows; a later row that does not fit it stops the release",
            f"columns read: {_named(self.read)}; not read: {_named(self.unread)}",
            f"{dropped_text(self.dropped)}; different prompts: {self.prompts}",
            f"messages in a dialogue: {turns}",
            f"prompts under {SHORT} characters: {self.short / max(1, self.rows):.1%}",
        ]
        if self.options.labels in SIGNED:  # whatever the labels are: a refusal would tell that all are of one sign
            found.append("labels are read by their sign; of a scale such as 1 to 5 declare each value: 1=a,…,3=tie,…")
        for unit, sizes in (("characters", self.characters), ("tokens", self.tokens)):
            found += [_spread(f"{unit} of {name}", values) for name, values in sizes.items() if len(values)]
        if self.tokens:
            of = len(self.tokens["prompts"])
            found.append(f"over a limit of tokens (model.too_long): {self.too_long} of {of} pairs")
        odd = self.odd()
        rare = {self._share(count, sign) for sign, count in self.signs.items()} - {*odd}
        return found + [f"odd: {each}" for each in odd] + [f"rare: {each}" for each in sorted(rare)] + self.shown


def summary_of(source: str, split: str | None, options: Options, most: int | None = None) -> SourceSummary:
    """The summary of a source that no recipe names."""
    return SourceSummary(OpenedSource.open(source, open_source(source, split), options), most=most)


def _reason(prompt: Text, responses: Sequence[Text], sign: int, options: Options) -> str | None:
    if not sign and options.ties == "drop":
        return "ties"
    if responses[0] == responses[1]:
        return "identical"
    return "empty" if any(map(is_blank, (prompt, *responses))) else None


def _tokens(renderer: Renderer | None, pairs: Sequence[tuple[Text, Text, Text]]) -> tuple[dict[str, list[int]], int]:
    if renderer is None:
        return {}, 0
    prompts = [renderer.prompt_size(prompt) for prompt, _, _ in pairs]
    responses = [len(renderer.response_ids(each)) for _, *both in pairs for each in both]
    too_long = sum(not renderer.fits(*pair) for pair in pairs)
    return {"prompts": prompts, "responses": responses}, too_long


def _shown(place: int, pair: tuple[Text, Text, Text], renderer: Renderer | None) -> Iterator[str]:
    """A pair as the model sees it, its responses in the order of their texts; what is learnt stands in ⟦ ⟧."""
    prompt, *responses = pair
    yield f"--- row {place} of those with the first record ids; ⟦ ⟧: tokens of the loss and the score ---"
    if renderer is None:
        yield _cut(_plain(prompt))
        yield from (f"⟦{_cut(_plain(each))}⟧" for each in responses)
        return
    roomy = replace(renderer, max_prompt_tokens=1 << 40)
    yield _cut(renderer.tokenizer.decode(roomy.prompt_ids(prompt)))
    for each in responses:
        yield _cut(_marked(renderer.learnt_ids(each), renderer.tokenizer))


def _marked(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of token ids, those that are learnt (>= 0) between ⟦ and ⟧."""
    edges = [place for place in range(1, len(ids)) if (ids[place] < 0) != (ids[place - 1] < 0)]
    spans = [ids[start:end] for start, end in zip([0, *edges], [*edges, len(ids)], strict=True)]
    texts = (tokenizer.decode([token if token >= 0 else ~token for token in span]) for span in spans)
    return "".join(f"⟦{text}⟧" if span[0] >= 0 else text for span, text in zip(spans, texts, strict=True))


def _plain(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(map(message_text, text))


def _turns(text: Text) -> int:
    return 1 if isinstance(text, str) else len(text)


def _named(names: Sequence[str]) -> str:
    return one_line(", ".join(names)) or "none"


def _cut(text: str) -> str:
    return printable(text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]} … {text[-MOST_SHOWN // 2 :]}")


def _spread(what: str, sizes: Sequence[int]) -> str:
    values = sorted(sizes)
    middle, most = (values[int(share * (len(values) - 1))] for share in (0.5, 0.95))
    return f"{what}: shortest {values[0]}, median {middle}, 95 % within {most}, longest {values[-1]}"
