"""The proxy image: small, ours alone, without rights, and it serves: in containers, and on arm64 by emulation."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import platform
import subprocess
import tarfile
import time
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Final

import pytest

from proxy.policy import ProxyPolicy
from tests.rig.docker import Engine, Image, Runtime, cache, proxy_image_tar
from tests.rig.docker.fixtures import Images, Setup
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from tests.rig import Rig

pytestmark = [pytest.mark.docker, pytest.mark.rig]

KEY: Final = b"0123456789abcdef"
CHALLENGE: Final = "c0ffee00c0ffee00c0ffee00c0ffee00"
ANSWER: Final = hmac.new(KEY, CHALLENGE.encode(), hashlib.sha256).hexdigest()
BOUND_BYTES: Final = 64 << 20


def policy() -> ProxyPolicy:
    """A policy that holds for long enough from now on."""
    return ProxyPolicy(
        run="20260101T000000-00000000",
        generation=1,
        revision="sha256:" + 64 * "0",
        allow=(),
        deny=(),
        layers=(),
        resolvers=(("93.184.216.53", 53),),
        proof_key=KEY,
        expires_at=time.time() + 600,
    )


def ask(connection: socket.socket) -> str:
    """Ask the gate URL; the answer's body."""
    with connection:
        connection.settimeout(20)
        connection.sendall(f"GET http://gate.ringfence.invalid/{CHALLENGE} HTTP/1.1\r\nHost: gate\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(ANSWER[-8:].encode()):
            data = connection.recv(4096)
            if not data:
                break
            answer += data
    head, _blank, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    return body.decode().strip()


@contextlib.contextmanager
def served(argv: list[str], rig: Rig | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a proxy, give it its policy, wait until it is ready; end it by the end of its input."""
    prefix = () if rig is None else rig.enter
    process = subprocess.Popen(
        [*prefix, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    stdin, stdout = piped(process.stdin), piped(process.stdout)
    try:
        stdin.write(policy().to_json().encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        assert line.startswith(b'{"generation":1,"kind":"ready"'), (line, process.poll())
        yield process
        stdin.close()
        (last,) = [each for each in stdout if b'"stopped"' in each]
        assert json.loads(last)["code"] == "eof"
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait(timeout=20)
        stdout.close()


def piped(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


@pytest.mark.parametrize("docker_engine", [Setup()], indirect=True, ids=str)
@pytest.mark.parametrize("runtime", Runtime, ids=str)
def test_the_image_serves_read_only_and_without_a_capability(
    docker_engine: Engine, docker_images: Images, runtime: Runtime
) -> None:
    sandbox = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--memory", "128m"]
    client = [str(cache.packages().path / "debian/usr/bin/docker"), "--host", docker_engine.base_url]
    name = f"proxy-{runtime}"
    run = ["run", "--rm", "--interactive", "--name", name, "--runtime", runtime, *sandbox, docker_images.proxy.name]
    with served([*client, *run, "--listen", "0.0.0.0:3128"]):
        (attached,) = docker_engine.get(f"/containers/{name}/json")["NetworkSettings"]["Networks"].values()
        assert ask(docker_engine.rig.connect(attached["IPAddress"], 3128)) == ANSWER
        users = docker_engine.docker("exec", name, "/usr/bin/python3", "-c", "import os; print(os.getresuid())")
        assert users.stdout.strip() == "(65532, 65532, 65532)"


@pytest.mark.parametrize("docker_engine", [Setup()], indirect=True, ids=str)
def test_the_image_holds_the_gate_too(docker_engine: Engine, docker_images: Images) -> None:
    gate = ("run", "--rm", "--interactive", "--network", "none", "--entrypoint", "/usr/bin/ringfence-gate")
    done = docker_engine.docker(*gate, docker_images.proxy.name, stdin="{}")
    assert (done.returncode, "unusable input" in done.stderr) == (2, True), done


def test_the_image_is_small_and_the_same_each_time(docker_built: None, tmp_path: Path) -> None:
    del docker_built
    once, again = (proxy_image_tar(tmp_path / name) for name in ("once.tar", "again.tar"))
    assert once.archive.read_bytes() == again.archive.read_bytes()
    assert once.archive.stat().st_size < BOUND_BYTES


def test_nothing_in_the_image_gives_rights_or_can_be_written(docker_built: None, tmp_path: Path) -> None:
    del docker_built
    image = proxy_image_tar(tmp_path / "proxy.tar")
    every = {
        str(PurePath("/", entry.name)): entry
        for layer in layers(image)
        for entry in layer.getmembers()
        if not entry.issym()
    }
    assert [path for path, entry in every.items() if entry.mode & 0o6000] == []
    assert sorted(path for path, entry in every.items() if entry.mode & 0o002) == ["/tmp", "/var/tmp"]  # noqa: S108
    assert {(entry.uid, entry.gid) for entry in every.values()} == {(0, 0)}
    assert {"/usr/bin/sh", "/usr/bin/dash", "/usr/bin/apt", "/usr/bin/dpkg"} & every.keys() == set()
    package = {PurePath(path).name for path in every if path.startswith("/usr/lib/ringfence/") and path.endswith(".py")}
    assert package == {path.name for path in (ROOT / "proxy").glob("*.py")}


@pytest.fixture
def arm64(tmp_path: Path, docker_built: None) -> Path:
    """The root of the arm64 image, with the emulator in it."""
    del docker_built
    if platform.machine() != "x86_64":
        pytest.skip("the emulator that was fetched runs on x86_64")
    root = unpacked(proxy_image_tar(tmp_path / "arm64.tar", architecture="arm64"), tmp_path / "root")
    (root / "emulator").hardlink_to(cache.packages().path / "emulator/usr/bin/qemu-aarch64-static")
    return root


def test_the_arm64_image_serves_under_emulation(arm64: Path, rig: Rig) -> None:
    emulated = ["/usr/sbin/chroot", "--userspec=65532:65532", str(arm64), "/emulator", "/usr/bin/python3"]
    machine = subprocess.run(
        [*emulated, "-c", "import platform; print(platform.machine())"], capture_output=True, text=True, check=True
    )
    assert machine.stdout == "aarch64\n"
    with served([*emulated, "-I", "/usr/bin/ringfence-proxy", "--listen", "127.0.0.1:3128"], rig):
        assert ask(rig.connect("127.0.0.1", 3128)) == ANSWER


def unpacked(image: Image, root: Path) -> Path:
    """Unpack an image's layers, in order."""
    root.mkdir()
    for layer in layers(image):
        layer.extractall(root, filter="tar", numeric_owner=True)
    return root


def layers(image: Image) -> Iterator[tarfile.TarFile]:
    """Yield an image's layers, the lowest first, each open until the next."""
    with tarfile.open(image.archive) as archive:
        (listed,) = json.load(piped(archive.extractfile("manifest.json")))
        for layer in listed["Layers"]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                yield files
