"""Questions in words: read with a line number for what is wrong, split by hash, left out and counted when too long."""

import hashlib
import json

import pytest

from m2po_jax.config import ConfigError, TaskConfig, UserError
from m2po_jax.tasks import ModelTokenizer, QuestionsTask, make_task
from m2po_jax.tasks.questions import questions_sha256, read_questions
from tests.tasks import texts

COUNT = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(texts.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return str(texts.write_questions(tmp_path_factory.mktemp("data") / "words.jsonl", texts.word_problems(COUNT)))


def task(source, file, **config) -> QuestionsTask:
    made = make_task(TaskConfig(name="questions", questions=str(file), **config), source)
    assert isinstance(made, QuestionsTask)
    return made


def test_the_final_answer_is_what_follows_the_last_mark(file):
    problems = read_questions(file)
    assert len(problems) == COUNT
    assert problems[2].prompt == "Ann has 3 apples and buys 5 more. How many apples has she now?"
    assert problems[2].gold_answer == "8"
    assert problems[2].demonstration.endswith("apples.\n#### 8")


def test_numbers_blank_lines_and_repetitions_are_taken(tmp_path):
    rows = [{"question": "a", "answer": 7}, {"question": "b", "answer": 1.5, "id": 3}, {"question": "a", "answer": 9}]
    path = tmp_path / "plain.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n\n")
    assert [(problem.prompt, problem.gold_answer) for problem in read_questions(str(path))] == [
        ("a", "7"),
        ("b", "1.5"),
    ]


def test_training_never_draws_what_is_held_out(source, file):
    made = task(source, file)
    held_out = {problem.prompt for problem in made.held_out(8)}
    drawn = {problem.prompt for seed in range(20) for problem in made.draw(16, (0, seed))}
    assert len(held_out) == 8
    assert not held_out & drawn
    assert all(map(made.is_held_out, held_out))
    with pytest.raises(ConfigError, match="evaluation.prompts 60 is more than the .* held-out questions"):
        made.held_out(COUNT)


def test_a_draw_follows_from_its_seed_and_repeats_nothing_while_there_is_more(source, file):
    made = task(source, file)
    drawn = made.draw(20, (3, 4, 0, 1))
    assert drawn == task(source, file).draw(20, (3, 4, 0, 1))
    assert drawn != made.draw(20, (3, 4, 0, 2))
    assert len({problem.prompt for problem in drawn}) == 20
    assert len(made.draw(200, (1,))) == 200


def test_every_prompt_fits_and_the_longer_ones_are_counted(source, file, tmp_path):
    rows = [*texts.word_problems(20), {"question": "long " * 400, "answer": "1"}, {"question": "Who?", "answer": "Ann"}]
    path = texts.write_questions(tmp_path / "mixed.jsonl", rows)
    made = task(source, path, max_prompt_tokens=150)
    assert made.notes == (
        f"1 of the 22 questions in {path} left out: the answer is no number",
        f"1 of the 22 questions in {path} left out: empty, or over task.max_prompt_tokens 150",
    )
    lengths = [len(made.prompt_tokens(problem)) for problem in made.draw(200, (1,)) + made.held_out(2)]
    assert max(lengths) <= made.max_prompt_tokens <= 150
    assert task(source, file).notes == ()
    with pytest.raises(
        ConfigError, match="no question to train on: .*21 of the 22 .* empty, or over task.max_prompt_tokens 5"
    ):
        task(source, texts.write_questions(path, rows[:20] + rows[-2:]), max_prompt_tokens=5)


def test_prompts_are_those_of_the_template(source, file):
    made = task(source, file, template="{question} Think.", chat=False)
    problem = made.held_out(1)[0]
    tokenizer = ModelTokenizer(source, chat=False)
    assert made.prompt_tokens(problem) == tokenizer.prompt(f"{problem.prompt} Think.")


def test_the_last_number_is_graded(source, file):
    made = task(source, file)
    assert made.grade("3 and 5 make 8.", "8").score == 1.0
    assert made.grade("8? No, 9", "8").score == 0.0


def test_addition_is_asked_in_the_same_way(source):
    made = make_task(TaskConfig(template="{question} Answer with the number alone."), source)
    prompt = made.prompt_tokens(made.draw(1, (0,))[0])
    text = ModelTokenizer(source).decode(prompt)  # the end of the turn has no text
    assert text.endswith("= Answer with the number alone.\n<|im_start|>assistant\n")
    assert len(prompt) <= made.max_prompt_tokens
    assert made.grade("The sum of these is 24.", "24").score == 1.0
    with pytest.raises(ConfigError, match="task.max_prompt_tokens 4 is below a prompt of"):
        make_task(TaskConfig(max_prompt_tokens=4), source)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON object"),
        ("[]", "line 2 is no JSON object"),
        ("3", "line 2 is no JSON object"),
        ('{"question": "x"}', "line 2 is no JSON object with question and answer: KeyError('answer')"),
        ('{"question": 3, "answer": 3}', "line 2: question must be a text"),
        ('{"question": "x", "answer": null}', "line 2: question must be a text, and answer a text or a number"),
        ('{"question": "x", "answer": false}', "line 2: question must be a text, and answer a text or a number"),
        ('{"question": "x", "answer": true}', "line 2: question must be a text, and answer a text or a number"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "x", "answer": "3"}\n' + line + "\n")
    with pytest.raises(UserError) as raised:
        read_questions(str(path))
    assert f"{path} {said}" in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read .*nowhere.jsonl: No such file"):
        questions_sha256(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary is no text in UTF-8"):
        read_questions(str(tmp_path / "binary"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(UserError, match="empty holds no question"):
        task(str(texts.save_tokenizer(tmp_path / "t")), tmp_path / "empty")


def test_texts_may_hold_other_line_ends_and_files_may_begin_with_a_mark(tmp_path):
    path = tmp_path / "odd.jsonl"
    rows = ['{"question": "a\u2028b", "answer": 1e21}', '{"question": "c", "answer": 1e-5}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    found = read_questions(str(path))
    assert [problem.prompt for problem in found] == ["a\u2028b", "c"]
    assert [problem.gold_answer for problem in found] == ["1000000000000000000000", "0.00001"]
    assert questions_sha256(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("line", ['{"question": "\\ud83d", "answer": "3"}', "[" * 100_000])
def test_what_python_cannot_take_is_named_too(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"question": "x", "answer": "3"}}\n{line}\n')
    with pytest.raises(UserError, match="bad.jsonl line 2 is no JSON object"):
        read_questions(str(path))


def test_empty_prompts_are_left_out_and_counted(source, tmp_path):
    rows = [*texts.word_problems(20), {"question": "", "answer": 3}]
    made = task(source, texts.write_questions(tmp_path / "empty.jsonl", rows), chat=False)
    assert [note.rpartition(": ")[2] for note in made.notes] == ["empty, or over task.max_prompt_tokens 256"]
