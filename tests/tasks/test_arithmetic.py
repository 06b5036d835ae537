"""Procedural addition: right demonstrations, a split that nothing crosses, draws that follow from their seed."""

import pytest

from m2po_jax.config import ConfigError, TaskConfig
from m2po_jax.tasks import ArithmeticTask
from m2po_jax.tasks.arithmetic import make_problem

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


def test_asking_for_more_held_out_prompts_than_there_are_is_refused():
    small = ArithmeticTask(TaskConfig(min_operands=2, max_operands=2))
    with pytest.raises(ConfigError, match=r"evaluation.prompts 101 .*lower it, or raise task.max_operands"):
        small.held_out(101)


@pytest.mark.parametrize("fraction, side", [(1e-9, "held-out"), (1 - 1e-9, "training")])
def test_an_empty_side_of_the_split_is_refused_and_never_searched_for_ever(fraction, side):
    task = ArithmeticTask(TaskConfig(held_out_fraction=fraction))
    with pytest.raises(ConfigError, match=f"task.held_out_fraction .* next to no {side} prompts"):
        task.held_out(1) if side == "held-out" else task.draw(1, (0,))


def test_prompt_ids_are_stable():
    assert make_problem([7, 5, 9, 3]).prompt_id == "e3c787c24ab7ac74"
