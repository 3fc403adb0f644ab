"""A server that is left untouched, and one within a program."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.conftest import ASKED, Stock
from tests.engine.serving import LONG_PROMPT, SHORT_PROMPT, warmed_store
from tests.nursery import Nursery


def test_not_chosen_it_is_a_stock_server(stock: Stock) -> None:
    # Its answers are the reference of all others.
    assert [len(answer.ids) for answer in stock.answers] == [tokens for _, tokens in ASKED]
    assert "sage" not in stock.state


def test_the_engine_api(nursery: Nursery, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "sage.yaml"
    config.write_text(f"store: {{path: {warmed_store(tmp_path / 'store')}}}\n")
    code = f"""
import json
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(model_path={str(model)!r}, schedule_policy="makespan", device="cpu",
                           mem_fraction_static=0.1, max_total_tokens=4096)
    prompts = [{SHORT_PROMPT!r}, {LONG_PROMPT!r}]
    answers = engine.generate(prompts, {{"max_new_tokens": 3, "n": 4, "temperature": 1.0}})
    assert len(answers) == 8
    print(json.dumps(engine.get_server_info()["internal_states"][0]["sage"]))
    engine.shutdown()
"""
    result = nursery.run(code, SAGE_CONFIG=str(config))
    assert result.returncode == 0, result.stderr
    stats = json.loads(result.stdout.strip().splitlines()[-1])
    # SGLang first prefills each prompt by a request of its own.
    assert sum(stats["num_ranked"].values()) == 2 * (4 + 1)
