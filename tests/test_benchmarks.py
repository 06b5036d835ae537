"""The benchmarks run, and what they say of memory and traffic is so; times are never judged."""

import pytest

from tests import tiny

OBJECTIVE = "experiments/benchmarks/objective.py"


@pytest.fixture(scope="module")
def env(user_env):
    return tiny.subprocess_env(user_env)


def table(text: str) -> dict[str, dict[str, str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


@pytest.mark.slow
def test_the_mask_moves_a_thousandth_of_what_a_sort_moves(env):
    done = tiny.run(env, OBJECTIVE, "--rows", "64", "--columns", "512", "--devices", "8", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    moved = {name: int(row["bytes between devices"].replace(",", "")) for name, row in table(done.stdout).items()}
    by_sort, by_counting = moved["mask by sort and running sum"], moved["second_moment_mask"]
    assert by_sort >= 4 * 64 * 512
    assert 0 < 1000 * by_counting < by_sort
    assert set(table(done.stdout)) >= {"bare grpo loss and gradient", "m2po with all statistics"}


def test_devices_that_do_not_divide_the_rows_are_refused(env):
    refused = tiny.run(env, OBJECTIVE, "--rows", "10", "--devices", "4")
    assert refused.returncode == 2 and "--devices 4 does not divide --rows 10" in refused.stderr
