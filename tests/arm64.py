"""Results on arm64, emulated by QEMU, beside those of this machine; not part of the tests.

    sudo .venv/bin/python -m tests.arm64 FOLDER

FOLDER gets a Debian of 2 GB at the first run, which takes a quarter of an hour. This needs Debian's
packages debootstrap and qemu-user-static, with the entry of qemu-aarch64 in
/proc/sys/fs/binfmt_misc. Models are exported here: artifacts do not depend on the machine. Small
ones, because the emulation is a hundred times slower. Opening a model compares it with results of
PyTorch (see `self_check`).
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import vitrine

_ROOT = Path(__file__).parents[1]
_PLACE = "vitrine"  # in the folder of the arm64 system
_TEXTS = ["w5 w6 w7", "w21", "w8 w33 w6 w15 w40 w22"]


def main() -> None:
    """Print the largest difference of the results of each model."""
    parser = argparse.ArgumentParser("tests.arm64", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the arm64 system")
    parser.add_argument("--results", type=Path, help="only compute the results of the models in it")
    options = parser.parse_args()
    if options.results is not None:
        print(json.dumps([platform.machine(), _results(options.results)]))
        return
    root, place = options.folder, options.folder / _PLACE
    _prepare(root, place)
    with tempfile.TemporaryDirectory(dir=place) as models:
        _export(Path(models))
        here = _results(Path(models))
        inside = f"/{_PLACE}/{Path(models).name}"
        command = f"cd /{_PLACE} && .venv/bin/python -m tests.arm64 / --results {inside}"
        output = _run("chroot", str(root), "sh", "-c", command, stdout=subprocess.PIPE)
    machine, there = json.loads(output)
    print(f"largest difference of {machine} from {platform.machine()}")
    for name, values in here.items():
        print(f"{name}: {np.abs(np.subtract(values, there[name])).max():.1e}")


def _prepare(root: Path, place: Path) -> None:
    """Install Debian, this tree and its dependencies without PyTorch."""
    if not (root / "bin").exists():
        packages = "--include=python3,python3-venv,ca-certificates"
        _run("debootstrap", "--arch=arm64", "--variant=minbase", packages, "bookworm", str(root))
    for file in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        (root / file).write_bytes(Path("/", file).read_bytes())
    place.mkdir(exist_ok=True)
    tree = _run("git", "-C", str(_ROOT), "archive", "HEAD", stdout=subprocess.PIPE)
    subprocess.run(["tar", "x", "-C", str(place)], input=tree, check=True)
    if not (place / ".venv").exists():
        install = "pip install --no-cache-dir --constraint constraints.txt --editable '.[cpu,bulk]'"
        command = f"cd /{_PLACE} && python3 -m venv .venv && .venv/bin/{install}"
        _run("chroot", str(root), "sh", "-c", command)


def _run(*command: str, stdout: int | None = None) -> bytes:
    return subprocess.run(command, check=True, stdout=stdout).stdout


def _export(folder: Path) -> None:
    """Export a random model of each family, and one with labels."""
    # Not on the emulated machine, which has no PyTorch.
    from models.export.exporter import export
    from models.export.sources import resolve
    from tests.models.checkpoints import CONFIGS, save_checkpoint, save_classifier, save_tokenizer

    labels = ("entailment", "neutral", "contradiction")
    for name in (*CONFIGS, "labels"):
        with tempfile.TemporaryDirectory() as source:
            model = Path(source) / name
            if name == "labels":
                save_classifier(model, "roberta", 3, id2label=dict(enumerate(labels)))
            else:
                save_checkpoint(model, name)
            save_tokenizer(model)
            export(resolve(str(model)), folder / name)


def _results(folder: Path) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {}
    for path in sorted(folder.iterdir()):
        print(path.name, file=sys.stderr)
        with vitrine.SyncModel(path) as model:
            if path.name == "labels":
                candidates = vitrine.CandidateLabels(labels=["w9", "w10 w11"])
                found = model.classify(_TEXTS, candidates=candidates).scores
            else:
                vectors = np.asarray(model.encode(_TEXTS)).ravel()
                scores = model.score("w5 w6", "w7 w8 w9", explain=vitrine.Deletion(by="words"))
                units = scores.deletions[0].texts[0].units
                found = np.append(vectors, [unit.left_out for unit in units])
        results[path.name] = found.ravel().tolist()
    return results


if __name__ == "__main__":
    main()
