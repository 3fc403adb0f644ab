"""The demo, which a newcomer sees first."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from bench.experiment import demo
from tests.bench.workloads.fingerprint import fingerprint


@pytest.mark.slow
def test_the_report_opens_with_the_result_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(argparse.Namespace(simulate=True, seeds=1, output=tmp_path)) == 0
    text = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    places = [text.index(part) for part in ("sage finished answers", 'class="lanes"', "<table>")]
    assert places == sorted(places)
    assert re.findall("<h3>(.*?): requests waited (.*?) s on", text) == [
        ("shortest-prefill-first@clip=32", "8"), ("sage", "3")
    ]  # fmt: skip
    assert fingerprint(re.findall(r'path d="(.*?)"', text)) == "c6a0a0d1"
    assert "src=" not in text
    assert "href=" not in text
    *_, limit, _, _, said = capsys.readouterr().out.splitlines()
    assert limit.startswith("If no request waits, no order can help: below 1.7 requests/s")
    assert said == (
        "sage finished answers in 14 s on average, SGLang's best tuned policy "
        "(shortest-prefill-first@clip=32) in 19 s: 23 % sooner. Of 100 requests 99 were good under "
        "sage, and 73 under SGLang's: the first token within 2 s, and then at most 100 ms per "
        "token."
    )
