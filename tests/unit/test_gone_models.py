"""A model is gone only after it was missing for long, without interruption, while Triton answered."""

import pytest

from batch_consumer.gone import GoneModels, Wanted, is_missing


class Models:
    """A registry that says what the test wants."""

    def __init__(self, **versions: tuple[str, ...]) -> None:
        self.ready = versions

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.ready)

    def versions(self, name: str) -> tuple[str, ...]:
        return self.ready.get(name, ())


@pytest.mark.parametrize(
    ("model", "version", "missing"),
    [
        ("served", None, False),
        ("served", "2", False),
        ("served", "1", True),
        ("loading", None, False),
        ("loading", "1", False),
        ("nobody", None, True),
        ("nobody", "1", True),
    ],
)
def test_a_model_that_loads_is_not_missing_and_one_served_in_other_versions_only_is(
    model: str, version: str | None, missing: bool
) -> None:
    assert is_missing(Wanted(model, version), Models(served=("3", "2"), loading=())) is missing


def test_it_is_gone_after_the_whole_time_and_not_if_it_was_back_in_between() -> None:
    gone, wanted = GoneModels(10), {"m": frozenset({"1", None})}
    away, back = Models(m=("2",)), Models(m=("2", "1"))
    assert [gone.look(wanted, away, now) for now in (0.0, 4.0, 8.0)] == [[], [], []]
    assert gone.look(wanted, back, 9.0) == []
    assert [gone.look(wanted, away, now) for now in (10.0, 14.0, 18.0)] == [[], [], []]
    assert gone.look(wanted, away, 20.0) == [Wanted("m", "1")]


def test_time_in_which_nobody_looked_or_triton_was_away_does_not_count() -> None:
    gone, wanted, away = GoneModels(10), {"m": frozenset({"1"})}, Models(m=("2",))
    assert gone.look(wanted, away, 0.0) == []
    assert gone.look(wanted, away, 60.0) == []
    assert gone.look(wanted, away, 64.0) == []
    gone.forget()
    assert gone.look(wanted, away, 68.0) == []
    assert [gone.look(wanted, away, now) for now in (72.0, 76.0)] == [[], []]
    assert gone.look(wanted, away, 78.0) == [Wanted("m", "1")]


def test_what_is_told_says_whether_the_model_or_only_the_version_is_gone() -> None:
    assert Wanted("m", None).code == "unknown_model"
    assert Wanted("m", "1").code == "model_gone"
    assert "version 1" in Wanted("m", "1").message
