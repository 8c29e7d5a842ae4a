"""What π_ref imitates does not depend on which answer was preferred."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.inputs import canonical_response


@given(st.text(), st.text())
def test_the_imitated_answer_is_symmetric_in_the_pair(first: str, second: str) -> None:
    assert canonical_response(first, second) == canonical_response(second, first)
    assert canonical_response(first, second) in (first, second)


def test_either_place_is_picked_about_half_of_the_time() -> None:
    picked = sum(canonical_response(f"yes {i}", f"no {i}").startswith("yes") for i in range(1000))
    assert 420 < picked < 580  # five standard deviations of a fair coin; the texts are fixed, so it never flickers
