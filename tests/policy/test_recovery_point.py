"""Which generation all ranks go back to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.recovery_point import choose_recovery_point

COPIES = st.lists(st.dictionaries(st.integers(0, 6), st.sampled_from("ab"), max_size=6), max_size=4)
REFUSED = st.sets(st.integers(0, 6))


@given(COPIES, REFUSED)
def test_it_is_the_newest_that_every_rank_has_alike(copies: list[dict[int, str]], refused: set[int]) -> None:
    """The choice is one that all ranks have under one digest, not refused, and nothing newer is."""
    usable = [
        generation
        for generation in range(7)
        if copies
        and generation not in refused
        and len({copy.get(generation) for copy in copies}) == 1
        and generation in copies[0]
    ]
    assert choose_recovery_point(copies, refused) == (usable[-1] if usable else None)


@given(COPIES, REFUSED, st.randoms())
def test_the_order_of_ranks_does_not_matter(copies: list[dict[int, str]], refused: set[int], shuffler) -> None:
    """Whoever sorts the same facts otherwise chooses the same."""
    shuffled = list(copies)
    shuffler.shuffle(shuffled)
    assert choose_recovery_point(shuffled, refused) == choose_recovery_point(copies, refused)


@given(COPIES)
def test_refusing_every_choice_comes_to_an_end(copies: list[dict[int, str]]) -> None:
    """Each refusal leads to an older generation, and the last one to none."""
    refused: set[int] = set()
    choices = []
    while (choice := choose_recovery_point(copies, refused)) is not None:
        choices.append(choice)
        refused.add(choice)
    assert choices == sorted(set(choices), reverse=True)
