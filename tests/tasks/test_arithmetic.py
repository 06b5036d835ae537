"""Procedural addition: right demonstrations, a split that nothing crosses, draws that follow from their seed."""

import numpy as np
import pytest

from m2po_jax.config import ConfigError, TaskConfig
from m2po_jax.tasks import ArithmeticTask
from m2po_jax.tasks.arithmetic import _slipped, make_problem

TASK = ArithmeticTask(TaskConfig())
MIXED = ArithmeticTask(TaskConfig(min_operands=2, max_operands=13))


def test_the_worked_example_of_the_readme():
    problem = make_problem([7, 5, 9, 3])
    assert (problem.prompt, problem.gold_answer, problem.demonstration) == ("7+5+9+3=", "24", "12,21,24")


@pytest.mark.parametrize("task", [TASK, MIXED])
def test_demonstrations_are_graded_right_and_every_length_fits(task):
    problems = task.draw(300, (1, 2))
    for problem in problems:
        operands = [int(digit) for digit in problem.prompt[:-1].split("+")]
        assert task.config.min_operands <= len(operands) <= task.config.max_operands
        assert problem.gold_answer == str(sum(operands))
        assert task.grade(problem.demonstration, problem.gold_answer).score == 1.0
        assert len(task.tokenizer.encode(problem.prompt)) <= task.max_prompt_tokens
        assert len(task.tokenizer.encode(problem.demonstration)) < task.max_response_tokens
    assert {problem.prompt.count("+") + 1 for problem in problems} == set(
        range(task.config.min_operands, task.config.max_operands + 1)
    )


def sums_of(answer: str) -> list[int]:
    return [int(text) for text in answer.split(",")]


def test_a_student_who_never_slips_gives_the_worked_responses():
    worked = MIXED.demonstrations(100, 0.0, (1, 2))
    assert worked == [(problem, problem.demonstration) for problem in MIXED.draw(100, (1, 2))]


def test_a_student_slips_at_the_set_rate_by_one_or_two_and_goes_on_from_there():
    slips = []
    for problem, answer in TASK.demonstrations(1000, 0.3, (1, 2)):
        total, *others = map(int, problem.prompt[:-1].split("+"))
        for operand, stated in zip(others, sums_of(answer), strict=True):
            slips.append(stated - total - operand)
            total = stated
    share = {slip: slips.count(slip) / len(slips) for slip in range(-2, 3)}
    assert sum(share.values()) == pytest.approx(1.0)
    assert share == pytest.approx({-2: 0.075, -1: 0.075, 0: 0.7, 1: 0.075, 2: 0.075}, abs=0.025)


def test_demonstrations_follow_from_their_seed_alone():
    worked = TASK.demonstrations(50, 0.5, (1, 2))
    assert worked == ArithmeticTask(TaskConfig()).demonstrations(50, 0.5, (1, 2))
    assert [answer for _, answer in worked] != [answer for _, answer in TASK.demonstrations(50, 0.5, (1, 3))]


@pytest.mark.parametrize("operands", [2, 4, 10, 11, 12])
def test_no_slip_is_longer_than_the_longest_response(operands):
    task = ArithmeticTask(TaskConfig(min_operands=2, max_operands=operands))
    for digit in (0, 9):
        problem, rng = make_problem([digit] * operands), np.random.default_rng(0)
        answers = [_slipped(problem, 0.99, rng) for _ in range(200)]
        assert all(len(answer) < task.max_response_tokens for answer in answers)
        assert min(min(sums_of(answer)) for answer in answers) >= 0


@pytest.mark.parametrize("operands", [2, 4, 11, 12, 20])
def test_the_longest_prompt_and_response_have_just_their_room(operands):
    task = ArithmeticTask(TaskConfig(min_operands=2, max_operands=operands))
    longest = make_problem([9] * operands)
    assert len(longest.prompt) == task.max_prompt_tokens
    assert len(longest.demonstration) + 1 == task.max_response_tokens


def test_draws_follow_from_their_seed_alone():
    assert TASK.draw(20, (3, 4, 0, 1)) == ArithmeticTask(TaskConfig()).draw(20, (3, 4, 0, 1))
    assert TASK.draw(20, (3, 4, 0, 1))[:7] == TASK.draw(7, (3, 4, 0, 1))
    seeds = [(3, 4, 0, 1), (3, 4, 1, 0), (3, 0, 4, 1), (4, 3, 0, 1), (3, 4, 0, 0), (2**31 - 1, 4, 0, 1)]
    draws = [tuple(problem.prompt for problem in TASK.draw(20, seed)) for seed in seeds]
    assert len(set(draws)) == len(seeds)


@pytest.mark.parametrize("task", [TASK, MIXED])
def test_training_never_draws_a_held_out_prompt(task):
    held_out = {problem.prompt for problem in task.held_out(300)}
    drawn = [problem.prompt for seed in range(20) for problem in task.draw(500, (seed, 0, 0, 0))]
    assert held_out.isdisjoint(drawn)
    assert all(map(task.is_held_out, held_out))
    assert not any(map(task.is_held_out, drawn))


def test_the_default_task_has_the_held_out_prompts_that_are_promised():
    held_out = TASK.held_out(2048)
    assert len({problem.prompt for problem in held_out}) == len({problem.prompt_id for problem in held_out}) == 2048
    share = sum(TASK.is_held_out(make_problem([*map(int, f"{n:04d}")]).prompt) for n in range(10_000)) / 10_000
    assert share == pytest.approx(TASK.config.held_out_fraction, abs=0.02)


def test_held_out_prompts_are_those_of_the_task_configuration():
    again = ArithmeticTask(TaskConfig())
    again.draw(50, (9,))
    assert again.held_out(100) == TASK.held_out(100) == TASK.held_out(200)[:100]
    assert ArithmeticTask(TaskConfig(held_out_fraction=0.5)).held_out(100) != TASK.held_out(100)
    assert ArithmeticTask(TaskConfig(max_operands=5)).held_out(100) != TASK.held_out(100)


def test_whether_a_prompt_is_held_out_is_its_own_property_and_grows_with_the_fraction():
    prompts = [problem.prompt for problem in TASK.held_out(100)]
    assert all(map(ArithmeticTask(TaskConfig(held_out_fraction=0.5)).is_held_out, prompts))
    assert all(map(ArithmeticTask(TaskConfig(min_operands=2, max_operands=9)).is_held_out, prompts))


def test_every_held_out_prompt_is_found_and_one_more_is_refused():
    small = ArithmeticTask(TaskConfig(min_operands=2, max_operands=2))
    every = {prompt for a in range(10) for b in range(10) if small.is_held_out(prompt := f"{a}+{b}=")}
    assert {problem.prompt for problem in small.held_out(len(every))} == every
    with pytest.raises(ConfigError, match=rf"evaluation.prompts {len(every) + 1} .*lower it, or raise task.max_"):
        small.held_out(len(every) + 1)


@pytest.mark.parametrize("fraction, side", [(1e-9, "held-out"), (1 - 1e-9, "training")])
def test_an_empty_side_of_the_split_is_refused_and_never_searched_for_ever(fraction, side):
    task = ArithmeticTask(TaskConfig(held_out_fraction=fraction))
    with pytest.raises(ConfigError, match=f"task.held_out_fraction .* next to no {side} prompts"):
        task.held_out(1) if side == "held-out" else task.draw(1, (0,))


def test_prompt_ids_are_stable():
    assert make_problem([7, 5, 9, 3]).prompt_id == "e3c787c24ab7ac74"
