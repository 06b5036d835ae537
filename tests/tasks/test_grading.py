"""The grader: the last number and nothing else, on any text at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2po_jax.tasks import grade, grade_number

LONG = "9" * 100_000


@pytest.mark.parametrize(
    "text",
    ["12,21,24", "24", ",24", "wrong,steps,24", "12,21,024", "00024", "24,24"],
)
def test_the_last_number_alone_is_scored(text):
    assert grade(text, "24") == grade("24", "24")
    assert grade(text, "24").score == 1.0
    assert grade(text, "24").reason == "right"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "12,21,24,",
        "12,21,24+",
        "12,21,+24",
        "12,21,-24",
        "12,21, 24",
        "12,21,24 ",
        "12,21,24\n",
        "12,21,24.0",
        "12,21,2_4",
        "12,21,24<pad>",
        "12,21,٢٤",  # Arabic-Indic digits
        "12,21,２４",  # full-width digits
        "12,21,²⁴",
        "12，21，24",  # full-width commas
        "12,21,0x18",
        "12,21,nan",
    ],
)
def test_what_is_no_whole_number_at_the_end_scores_nothing(text):
    verdict = grade(text, "24")
    assert verdict.score == 0.0
    assert verdict.reason == "no number"


@pytest.mark.parametrize("text", ["12,21", "12,21,2", "12,21,25", "12,24,25", "12,21,240", "24,0", "0"])
def test_another_number_at_the_end_is_wrong(text):
    verdict = grade(text, "24")
    assert verdict.score == 0.0
    assert verdict.reason == f"wrong: {text.split(',')[-1]} is not 24"


def test_zero_is_a_number():
    assert [grade(text, "0").score for text in ("0", "000", "", "1")] == [1.0, 1.0, 0.0, 0.0]


def test_numbers_too_long_for_an_integer_are_graded():
    assert grade(LONG, LONG).score == 1.0
    assert grade(f"1,{LONG}", LONG).score == 1.0
    verdict = grade(LONG[:-1] + "8", LONG)
    assert verdict.score == 0.0
    assert len(verdict.reason) < 200
    assert grade("0" * 100_000 + "24", "24").score == 1.0


@pytest.mark.parametrize("gold", ["", "x", "24,", "-24", "٢٤", "24.0"])
def test_a_gold_answer_that_is_no_number_is_never_rewarded(gold):
    for text in (gold, "24", "0", "", "12,24"):
        assert grade(text, gold).score == 0.0


@given(st.lists(st.integers(0, 10**30), min_size=1, max_size=5), st.integers(0, 10**30), st.booleans())
def test_grading_agrees_with_integers(chain, gold, right):
    chain = [*chain, gold] if right else chain
    verdict = grade(",".join(map(str, chain)), str(gold))
    assert verdict.score == float(chain[-1] == gold)


@given(st.text() | st.text("0123456789,+=<pad>"), st.integers(0, 99))
def test_any_text_gets_a_verdict(text, gold):
    verdict = grade(text, str(gold))
    assert verdict.score in (0.0, 1.0)
    assert (verdict.reason == "right") == (verdict.score == 1.0)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("The answer is 24.", "24"),
        ("12,21,24", "24"),
        ("7+5=12", "12"),
        ("So she pays $1,234.50.", "1234.5"),
        ("18 apples, so 36 in all", "36.0"),
        ("x = -3", "-3"),
        ("It is (-3)", "-3"),
        ("a gain of 10-7=3", "3"),
        ("\\boxed{72}", "72"),
        ("3/4 of them", "0.75"),
        ("007", "7"),
        ("1,000,000 people", "1000000"),
        ("#### 1,450", "1,450"),
        ("that is .5 of it", "0.5"),
        ("0.5", ".5"),
        ("it is \N{MINUS SIGN}5", "-5"),
    ],
)
def test_the_last_number_of_a_text_is_graded_by_its_value(text, gold):
    assert grade_number(text, gold) == grade_number(gold, gold)
    assert grade_number(text, gold).reason == "right"


@pytest.mark.parametrize(
    ("text", "gold", "reason"),
    [
        ("", "24", "no number"),
        ("twenty-four", "24", "no number"),
        ("٢٤", "24", "no number"),
        ("24 or 25", "24", "wrong: 25 is not 24"),
        ("10-7", "-7", "wrong: 7 is not -7"),
        ("1/0", "0", "no number"),
        ("3/4", "4", "wrong: 3/4 is not 4"),
        (".5", "5", "wrong: 1/2 is not 5"),
        ("\N{MINUS SIGN}5", "5", "wrong: -5 is not 5"),
        ("24", "none", "wrong: the gold answer 'none' is no number"),
        ("9" * 41, "9", "no number"),
    ],
)
def test_another_number_or_none_scores_nothing(text, gold, reason):
    assert (grade_number(text, gold).score, grade_number(text, gold).reason) == (0.0, reason)


@given(st.text() | st.text("0123456789,./- $()"), st.integers(-99, 99))
def test_any_text_gets_a_verdict_by_its_last_number(text, gold):
    verdict = grade_number(text, str(gold))
    assert (verdict.reason == "right") == (verdict.score == 1.0)
    assert grade_number(f"{text} is {gold}", str(gold)).score == 1.0


def test_a_hundred_thousand_digits_take_no_time():
    for text in (LONG, "1," * 50_000, "100," * 25_000, "-" * 100_000, "1/" * 50_000, "1." * 50_000):
        assert grade_number(text, "24").score == 0.0
