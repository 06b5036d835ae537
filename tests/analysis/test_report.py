"""The page: self-contained, escaped, complete, and where it should be."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from m2po_jax import rollouts
from m2po_jax.analysis import report
from m2po_jax.analysis.frames import find_runs, load
from m2po_jax.config import UserError
from tests.analysis import synthetic
from tests.analysis.synthetic import make_run

VOID = {"meta", "br", "link", "img", "input", "hr"}
HOSTILE = '</td><script>alert("gotcha")</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'


class Page(HTMLParser):
    """Tags of a page, its attributes and the text outside style; fails on a tag that closes another."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def written(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write([sweep], tmp_path_factory.mktemp("report"))


def test_page_has_every_section_figure_and_number(written: Path):
    page = Page(written.read_text())
    for words in ("What this shows", "Arms", "Paired differences", "Curves", "Masked and clipped tokens"):
        assert words in page.text
    for words in ("Second moment", "by age", "A few rollouts", "Configuration", "Runs and versions"):
        assert words in page.text
    assert "65.9%" in page.text and "-8.7" in page.text, "the table"
    assert "12,21,20" in page.text and "7+5+9+0=" in page.text, "the rollouts"
    assert "staleness.k" in page.text and "objective.name" in page.text, "the differences"
    assert "learner.total_updates" not in page.text, "what does not differ"
    assert [attributes["role"] for tag, attributes in page.tags if tag == "svg"] == ["img"] * 4
    assert "Before you read on" not in page.text


def test_page_asks_nothing_of_the_network(written: Path):
    text = written.read_text()
    assert "http" not in text and "//" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in page.tags}
    references = [
        value for _, attributes in page.tags for key, value in attributes.items() if key.endswith(("href", "src"))
    ]
    assert references and all(value and value.startswith("#") for value in references)
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", text))


def test_references_inside_figures_resolve(written: Path):
    text = written.read_text()
    defined = set(re.findall(r'id="([^"]+)"', text))
    assert set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text)) <= defined


def test_figures_follow_the_theme_of_the_page(written: Path):
    text = written.read_text()
    body = text[text.index("<body>") :]
    assert "var(--c-0072b2)" in body and "#0072b2" not in body
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert used <= set(re.findall(r"(--[\w-]+):", text)), "every variable is defined"
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_png_figures_lie_beside_the_page(written: Path):
    files = {file.name: file.read_bytes() for file in (written.parent / "figures").iterdir()}
    assert set(files) == {f"{name}.png" for name in report.FIGURES}
    assert all(content.startswith(b"\x89PNG") and len(content) > 10_000 for content in files.values())


def test_texts_that_a_policy_wrote_are_escaped(tmp_path: Path):
    store, run_id = synthetic.start_run(tmp_path / "run", synthetic.config_of("m2po-s256"))
    data = synthetic.make_rollouts(1, 2, texts=[HOSTILE, HOSTILE])
    synthetic.write_shard(store, run_id, rollouts.UnitId(0, 0, 0), data)
    assert report.write([tmp_path / "run"]) == tmp_path / "run" / "report.html", "one run has its page inside"
    assert (tmp_path / "run" / "figures" / "learning_curves.png").is_file()
    text = (tmp_path / "run" / "report.html").read_text()
    assert "<script" not in text and "<img" not in text
    page = Page(text)
    assert "Paired differences" not in page.text
    assert HOSTILE in page.text, "shown as it was written"


def test_several_runs_have_their_page_in_the_folder_they_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for arm in ("grpo-s0", "m2po-s256"):
        make_run(tmp_path / "sweep" / arm, arm)
    monkeypatch.chdir(tmp_path)
    page = report.write(["sweep/grpo-s0", "sweep/m2po-s256"])
    assert page.resolve() == tmp_path / "sweep" / "report.html"


def test_output_is_a_folder(sweep: Path, written: Path):
    assert written.name == "report.html"
    assert not (sweep / "report.html").exists()


@pytest.mark.parametrize(
    ("paths", "output", "page"),
    [
        (["r/a"], None, "r/a/report.html"),
        (["r/a"], "x/page.html", "x/page.html"),
        (["r/a", "r/b"], "x", "x/report.html"),
        (["/r/a", "/r/b"], None, "/r/report.html"),
        (["/r/a/0", "/r/b/1"], None, "/r/report.html"),
        (["gs://bucket/run"], "x", "x/report.html"),
        (["gs://bucket/run"], None, "gs://bucket/run/report.html"),
    ],
)
def test_where_the_page_goes(paths: list[str], output: str | None, page: str):
    folder, name = report._destination(paths, output)
    assert f"{folder}/{name}" == page


def test_several_remote_runs_need_an_output():
    with pytest.raises(UserError, match="--output"):
        report._destination(["gs://bucket/run", "gs://bucket/other"], None)


def test_unfinished_runs_and_missing_diagnostics_are_said_first(tmp_path: Path, sweep: Path):
    store = make_run(tmp_path / "sweep" / "m2po-s256", "m2po-s256", updates=20)
    store.delete_prefix("diagnostics")
    text = Page(report.write([tmp_path / "sweep", sweep / "grpo-s0-seed0"], tmp_path).read_text()).text
    assert "unfinished, 20 of 64 model updates" in text
    assert "m2po-s256, seed 0: no token diagnostics" in text
    assert text.index("Before you read on") < text.index("Paired differences")


def test_no_run_no_report(tmp_path: Path):
    with pytest.raises(UserError, match="is no run"):
        report.write([tmp_path])


def test_configuration_differences_leave_out_name_and_seed(sweep: Path):
    runs = [load(path) for path in find_runs([sweep])]
    frame = report.configuration_differences(runs)
    assert frame.values.tolist() == [["objective.name", "grpo", "m2po"], ["staleness.k", "0", "32"]]
    assert report.configuration_differences(runs[:2]).empty
