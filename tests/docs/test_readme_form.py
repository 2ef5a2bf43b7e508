"""The README is short, and it reads the same on a package index as in the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REPOSITORY = "https://github.com/torch-locoprop/torch-locoprop"
RAW = "https://raw.githubusercontent.com/torch-locoprop/torch-locoprop"
TARGETS = re.findall(r"\]\(([^)]+)\)", README)


def test_it_has_at_most_700_words() -> None:
    assert len(README.split()) <= 700


def test_links_and_images_are_absolute() -> None:
    assert TARGETS
    assert all(target.startswith("https://") for target in TARGETS)
    assert not re.search(r"<(?:a|img)\b", README)


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="a source distribution has no runs")
@pytest.mark.parametrize("target", TARGETS)
def test_what_it_links_to_is_in_the_repository(target: str) -> None:
    path = re.sub(rf"^(?:{REPOSITORY}/(?:blob|tree)|{RAW})/main/", "", target)
    assert path != target, f"{target} is elsewhere"
    assert (ROOT / path).exists()


def test_it_has_one_picture_one_example_and_one_table_of_six_rows() -> None:
    assert README.count("![") == 1
    assert README.count("```python") == 1
    assert len(re.findall(r"^\| ", README, re.MULTILINE)) == 2 + 6
