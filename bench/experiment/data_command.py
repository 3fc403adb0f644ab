"""Implements `sage-sched bench data`: what data experiments need, and whether a folder has it."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from bench.experiment.spec import Experiment, names
from bench.workloads.catalogue import DataFile, data_files, files_of
from predictor_store.terminal import add_json, print_json
from sage_sched.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the public data that experiments read from the folder of --data, with its licence "
        "and where its publisher offers it. With DIR, say what that folder lacks."
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR", help="a folder to check")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if the folder lacks something. Raises UserError if it is no folder."""
    if args.folder is None:
        found = [{**_about(file), "experiments": _readers(file.name)} for file in _all()]
        print_json(found) if args.json else print(_listing())
        return 0
    if not args.folder.is_dir():
        raise UserError(f"{args.folder} is not a folder")
    checked = tqdm(_all(), desc="checking", unit="file", leave=False)
    problems = {file.name: file.problem_in(args.folder) for file in checked}
    if args.json:
        print_json(problems)
    else:
        print(_report(problems))
    return int(any(problems.values()))


def _all() -> list[DataFile]:
    return list(data_files().values())


def _needs(experiment: Experiment) -> dict[str, None]:
    """Return the names of the files that an experiment reads."""
    loads = experiment.loads
    return {name: None for load in loads
            for name in files_of(load.workload["name"], load.arrivals)}  # fmt: skip


def _readers(file: str) -> list[str]:
    """Return the experiments that read a file."""
    return [name for name in names() if file in _needs(Experiment.read(name))]


def _about(file: DataFile) -> dict[str, object]:
    return {
        "file": file.path, "title": file.title, "from": file.origin, "licence": file.licence,
        "rows": file.num_rows, "mb": file.size_mb, "fields": list(file.fields),
    }  # fmt: skip


def _listing() -> str:
    lines = ["Files of the folder that --data names: gzip, a JSON object per line.", ""]
    for file in _all():
        lines += [
            f"{file.path}",
            f"    {file.title}",
            f"    from {file.origin}; licence: {file.licence}",
            f"    {file.num_rows} rows, {file.size_mb:g} MB, with {', '.join(file.fields)}",
            f"    for {', '.join(_readers(file.name)) or 'workloads of your own experiments'}",
        ]
    without = [name for name in names() if not _needs(Experiment.read(name))]
    return "\n".join([*lines, "", f"Experiments that need no data: {', '.join(without)}"])


def _report(problems: dict[str, str]) -> str:
    lines = [f"{data_files()[name].path:38}{said or 'ok'}" for name, said in problems.items()]
    absent = {name for name, said in problems.items() if said == "missing"}
    lacking = {name: absent & {*_needs(Experiment.read(name))} for name in names()}
    lines += ["", f"can run: {', '.join(name for name, needs in lacking.items() if not needs)}"]
    lines += [
        f"{name} lacks {', '.join(sorted(needs))}" for name, needs in lacking.items() if needs
    ]
    return "\n".join(lines)
