"""Detects changes of a server's behaviour: `python -m tests.patches.recorded` records it anew.

It runs SGLang's scheduler with our plugin in each of the situations, and keeps a hash of each kind
of output that an operator could see: steps, answers, trace, series, reports and files. After a
deliberate change, record them anew, and say in the commit why they changed.

`python -m tests.patches.recorded NAME` prints one situation. Compare its output with that of the
commit before.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tests.nursery import Nursery, other_models

RECORDED = Path(__file__).with_name("recorded.json")
_PROGRAM = "from tests.patches.recorded import forks; forks.main()"


def records(nursery: Nursery, names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Run situations. Return their lines of text, by situation and kind."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models()), "OMP_NUM_THREADS": "1"}
        done = nursery.run(_PROGRAM, folder, *names, **env)
        assert done.returncode == 0, done.stderr
        errors = [file.read_text() for file in Path(folder).glob("*.error")]
        assert not errors, "\n".join(errors)
        files = {name: Path(folder, f"{name}.json") for name in names}
        return {name: json.loads(file.read_text()) for name, file in files.items()}


def digests(of_situation: dict[str, list[str]]) -> dict[str, str]:
    """Return a hash of each kind of records."""
    return {
        kind: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        for kind, lines in sorted(of_situation.items())
    }


def main(names: Sequence[str]) -> None:
    from tests.patches.recorded.situations import SITUATIONS

    with closing(Nursery()) as nursery:
        found = records(nursery, names or [*SITUATIONS])
    if names:
        for kinds in found.values():
            for kind, lines in kinds.items():
                print(*(f"{kind} {line}" for line in lines), sep="\n")
        return
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    now = {name: digests(kinds) for name, kinds in found.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in now.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n")
    changed = [name for name in now if known.get(name) != now[name]]
    print(f"{len(changed)} of {len(now)} changed", *changed, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
