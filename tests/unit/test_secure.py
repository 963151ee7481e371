"""What protects connections between hosts: which files are good, which addresses are allowed, and what is sent how."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import cloudpickle
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from certificates import HOSTS, folders, run_security
from manyhands.cli.main import app
from manyhands.engine.fitting import fit
from manyhands.engine.options import TLS_VARIABLE, Options
from manyhands.errors import UserError
from manyhands.transport.certificates import AUTHORITY_KEY, make_certificates
from manyhands.transport.hub import admission
from manyhands.transport.security import FILES, Security, is_loopback, validity
from manyhands.transport.tls import _pieces
from manyhands.workloads.tasks.digits import digits


def now() -> datetime:
    """When it is asked: a long run of tests reaches this file minutes after it was read."""
    return datetime.now(UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A host's good folder, to be spoiled."""
    shutil.copytree(folders() / HOSTS[0], tmp_path / "host")
    return tmp_path / "host"


# ── certificates ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_host_has_a_folder_that_nobody_else_can_read(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "run", ["node1", "10.0.0.7"], days=2)
    assert made.folders == (tmp_path / "run" / "node1", tmp_path / "run" / "10.0.0.7")
    assert made.end - now() == pytest.approx(timedelta(days=2), abs=timedelta(minutes=5))
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == [
        "10.0.0.7",
        "node1",
    ]  # no authority's key
    tokens = set()
    for folder in made.folders:
        assert sorted(one.name for one in folder.iterdir()) == sorted(FILES)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
        tokens.add(Security.from_directory(folder).token)
    assert len(tokens) == 1
    [names] = [
        one.value
        for one in x509.load_pem_x509_certificate((made.folders[1] / "cert.pem").read_bytes()).extensions
        if isinstance(one.value, x509.SubjectAlternativeName)
    ]
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]


def test_an_authority_that_was_kept_signs_for_more_hosts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_certificates(run, ["a"], keep_authority=True)
    assert stat.S_IMODE((run / AUTHORITY_KEY).stat().st_mode) == 0o600
    make_certificates(run, ["b"])
    assert (run / "a" / "ca.pem").read_bytes() == (run / "b" / "ca.pem").read_bytes()
    assert Security.from_directory(run / "a").token == Security.from_directory(run / "b").token
    with pytest.raises(UserError, match=r"run/a already exists"):
        make_certificates(run, ["c", "a"])
    assert not (run / "c").exists()


@pytest.mark.parametrize(
    ("hosts", "options", "sentence"),
    [
        ([], {}, "--hosts: name at least one"),
        (["a", "../b"], {}, r"'\.\./b' is neither a host name nor an address"),
        (["a", "a"], {}, "a is named twice"),
        (["a"], {"days": 0}, "--days 0 must be above 0"),
        (["a"], {"days": float("nan")}, "--days nan must be above 0"),
    ],
)
def test_what_no_certificates_can_be_made_for(
    tmp_path: Path, hosts: list[str], options: dict[str, float], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        make_certificates(tmp_path / "run", hosts, days=options.get("days", 7.0))
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="is not empty"):
        make_certificates(tmp_path, ["a"])
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_dates_are_those_that_cryptography_reads(tmp_path: Path) -> None:
    for years in (0, 30):  # beyond 2049 a date has four digits of the year
        folder = make_certificates(
            tmp_path / str(years), ["a"], now=now() + timedelta(days=365 * years), days=300
        ).folders[0]
        pem = (folder / "cert.pem").read_text()
        known = x509.load_pem_x509_certificate(pem.encode())
        found = validity("a line before it\n" + pem)
        assert (found.begin, found.end) == (known.not_valid_before_utc, known.not_valid_after_utc)


@given(st.binary(max_size=60))
def test_what_is_no_certificate_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        validity(ssl.DER_cert_to_PEM_cert(content))


# ── beside OpenSSL's own program, which nobody here wrote ─────────────────────────────────────────────────────────────


def openssl(folder: Path, *words: str) -> str:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl program here")
    done = subprocess.run(
        ["openssl", *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_openssl_accepts_our_certificates_to_the_letter(folder: Path) -> None:
    for purpose in ("sslclient", "sslserver"):
        words = ["-x509_strict", "-purpose", purpose, "-CAfile", "ca.pem", "cert.pem"]
        assert "cert.pem: OK" in openssl(folder, "verify", *words)


def test_certificates_that_openssl_made_work_as_well(tmp_path: Path) -> None:
    """An authority, another below it that signed an RSA certificate, and a folder as a user would fill it."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    signs = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
    openssl(
        tmp_path, "req", "-x509", *key, "-keyout", "root.key", "-out", "root.pem", "-subj", "/CN=root", *signs
    )
    below = ["-CA", "root.pem", "-CAkey", "root.key", "-subj", "/CN=below", *signs]
    openssl(tmp_path, "req", "-x509", *key, "-keyout", "below.key", "-out", "below.pem", *below)
    rsa = ["-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-subj", "/CN=a"]
    openssl(
        tmp_path, "req", "-x509", *rsa, "-CA", "below.pem", "-CAkey", "below.key", "-out", "leaf.pem",
        "-addext", "extendedKeyUsage=clientAuth,serverAuth", "-addext", "basicConstraints=critical,CA:FALSE",
    )  # fmt: skip
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "token").write_text("a text of 32 characters or more.")
    (tmp_path / "token").chmod(0o600)
    leaf, below_pem, root = ((tmp_path / f"{name}.pem").read_text() for name in ("leaf", "below", "root"))
    for authority, chain in ((root, leaf + below_pem), (below_pem, leaf)):
        (tmp_path / "ca.pem").write_text(authority)
        (tmp_path / "cert.pem").write_text(chain)
        assert Security.from_directory(tmp_path).tls
    (tmp_path / "ca.pem").write_text(root)
    with pytest.raises(UserError, match=r"cert\.pem is not valid under ca\.pem: unable to get"):
        Security.from_directory(tmp_path)


# ── folders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _other(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copy(folders("other") / HOSTS[0] / name, folder / name)


def _encrypt(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    (folder / "key.pem").write_bytes(encrypted)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no key": (lambda f: (f / "key.pem").unlink(), r"host/key\.pem is missing; copy this host's folder"),
    "no token": (lambda f: (f / "token").unlink(), r"host/token is missing; every host needs the same one"),
    "no authority": (lambda f: (f / "ca.pem").unlink(), r"host/ca\.pem is missing"),
    "a folder": (lambda f: ((f / "key.pem").unlink(), (f / "key.pem").mkdir()), r"key\.pem must be a file"),
    "everybody's key": (
        lambda f: (f / "key.pem").chmod(0o644),
        r"host/key\.pem: every user of this host can read or change it \(mode 0644\); chmod 600",
    ),
    "everybody's token": (lambda f: (f / "token").chmod(0o606), r"host/token: every user .*0606"),
    "another key": (lambda f: _other(f, "key.pem"), r"host/key\.pem is not the key of cert\.pem; copy both"),
    "another authority": (
        lambda f: _other(f, "ca.pem"),
        r"host/cert\.pem is not valid under ca\.pem: .*; copy both from the same folder",
    ),
    "no PEM": (lambda f: (f / "cert.pem").write_text("hello"), r"cert\.pem: it has no PEM certificate"),
    "no PEM key": (lambda f: (f / "key.pem").write_text("hello"), r"host/key\.pem .*must be PEM"),
    "a cut certificate": (
        lambda f: (f / "ca.pem").write_text((f / "ca.pem").read_text()[:200]),
        r"ca\.pem: it has no PEM certificate",
    ),
    "an encrypted key": (_encrypt, r"host/key\.pem is encrypted; write it without a password"),
    "a short token": (lambda f: (f / "token").write_text("12345"), r"host/token has 5 characters"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_each_bad_file_is_named_with_what_to_do(folder: Path, spoiled: str) -> None:
    Security.from_directory(folder)
    spoil, sentence = SPOILED[spoiled]
    spoil(folder)
    with pytest.raises(UserError, match=sentence) as error:
        Security.from_directory(folder)
    assert "\n" not in str(error.value)


def test_certificates_of_another_time_are_reported_with_the_clock(tmp_path: Path) -> None:
    old = make_certificates(tmp_path / "old", ["a"], now=now() - timedelta(days=9), days=7).folders[0]
    with pytest.raises(
        UserError, match=r"ca\.pem expired on .*UTC, 2 days ago by this host's clock; make new ones"
    ):
        Security.from_directory(old)
    early = make_certificates(tmp_path / "early", ["a"], now=now() + timedelta(hours=5)).folders[0]
    with pytest.raises(
        UserError, match=r"this host's clock says .*UTC, 4\.8 h earlier; correct the wrong clock"
    ):
        Security.from_directory(early)
    near = make_certificates(tmp_path / "near", ["a"], now=now() + timedelta(minutes=5)).folders[0]
    assert Security.from_directory(near).tls  # clocks differ a little


def test_a_directory_of_all_hosts_is_searched_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-b.example.org")
    assert Security.from_directory(folders()).directory == folders() / "host-b"
    monkeypatch.setattr(socket, "gethostname", lambda: "host-c")
    with pytest.raises(UserError, match="has folders for host-a, host-b but not for this host, host-c"):
        Security.from_directory(folders())
    with pytest.raises(UserError, match=r"nowhere: this folder does not exist; make it with `manyhands cert"):
        Security.from_directory(tmp_path / "nowhere")


def test_it_travels_as_the_way_to_make_it_and_shows_no_secret() -> None:
    security = run_security()
    sent = pickle.dumps(security)
    again = pickle.loads(sent)
    assert (again.token, again.directory, again.tls) == (security.token, security.directory, True)
    assert security.token not in sent
    assert security.token.decode() not in repr(security)
    assert pickle.loads(pickle.dumps(Security.insecure())) is Security.insecure()
    assert pickle.loads(pickle.dumps(Security.loopback())) is Security.loopback()
    assert pickle.loads(cloudpickle.dumps(Security.loopback())) is Security.loopback()  # as jobs are packed


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_address_off_loopback_needs_tls_or_the_users_word() -> None:
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "::1"):
        assert is_loopback(host)
        Security.loopback().check_address(host)
    for host in ("0.0.0.0", "10.1.2.3", "node1", "::", "localhost.evil.org"):
        assert not is_loopback(host)
        with pytest.raises(UserError, match=r"--tls DIR.*`manyhands certificates`.*--insecure"):
            Security.loopback().check_address(host)
        Security.insecure().check_address(host)
        run_security().check_address(host)


def test_a_hub_listens_and_dials_off_loopback_only_so() -> None:
    for address in ("tcp:0.0.0.0:0", "tcp:10.1.2.3:99", "tcp:node1:99"):
        with pytest.raises(UserError, match="--insecure"):
            admission.check_address(address, Security.loopback())
        with pytest.raises(UserError, match="--insecure"):
            admission.listen(address, Security.loopback())
        admission.check_address(address, run_security())
    for security in (Security.insecure(), run_security()):
        listening, address = admission.listen("tcp:0.0.0.0:0", security)
        with listening:
            assert address == f"tcp:0.0.0.0:{listening.getsockname()[1]}"
    for address in (
        "tcp:node1",
        "tcp::5",
        "tcp:10.1.2:5",
        "tcp:1.2.3.4.5:6",
        "tcp:a b:5",
        "tcp:node1:70000",
        "udp:a:1",
    ):
        with pytest.raises(UserError, match=r"must be unix:NAME or tcp:HOST:PORT"):
            admission.check_address(address, Security.insecure())


# ── pieces ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 50_000), max_size=12), st.data())
def test_what_is_tried_again_begins_with_what_was_tried(sizes: list[int], data: st.DataObject) -> None:
    """OpenSSL's rule, for any parts, any number of pieces that left, and anything queued behind since."""
    content = os.urandom(sum(sizes))
    parts, at = [], 0
    for size in sizes:
        parts.append(content[at : at + size])
        at += size
    pieces = [bytes(piece) for piece in _pieces(parts)]
    assert b"".join(pieces) == content
    assert all(pieces)
    if not pieces:
        return
    left = data.draw(st.integers(0, len(pieces) - 1))
    sent = sum(map(len, pieces[:left]))
    again: list[bytes | memoryview] = []
    for part in parts:  # as an outbox drops what was sent
        again.append(memoryview(part)[min(sent, len(part)) :])
        sent = max(0, sent - len(part))
    again.append(bytes(data.draw(st.integers(0, 40_000))))
    tried = next(piece for piece in _pieces(again))
    assert bytes(tried).startswith(pieces[left])


def test_large_parts_are_not_copied() -> None:
    payload = memoryview(bytearray(1 << 20))
    copied = [len(piece) for piece in _pieces([bytes(64), payload]) if isinstance(piece, bytes)]
    assert sum(copied) <= 2 * (16 << 10)


# ── what the user says ────────────────────────────────────────────────────────────────────────────────────────────────


def test_options_say_how_connections_are_protected() -> None:
    folder = folders() / HOSTS[0]
    assert Options().security({}) is Security.loopback()
    assert Options(insecure=True).security({}) is Security.insecure()
    assert Options(tls=folder).security({}).directory == folder
    assert Options().security({TLS_VARIABLE: str(folder)}).directory == folder
    other = folders() / HOSTS[1]
    assert Options(tls=other).security({TLS_VARIABLE: str(folder)}).directory == other
    with pytest.raises(UserError, match="tls and insecure were both given"):
        Options(tls=folder, insecure=True)
    with pytest.raises(UserError, match=r"--insecure was given, and MANYHANDS_TLS=.* is set"):
        Options(insecure=True).security({TLS_VARIABLE: str(folder)})


def test_a_bad_folder_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--tls .*: this folder does not exist"):
        fit(digits(), steps=1, options=Options(tls=tmp_path / "none"))


def test_the_command_makes_folders_and_says_what_to_do_with_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = CliRunner().invoke(app, ["certificates", str(run), "--hosts", "node1, node2", "--days", "1"])
    assert done.exit_code == 0, done.output
    assert [Security.from_directory(run / host).tls for host in ("node1", "node2")] == [True, True]
    assert "the authority's key was not stored" in done.output
    assert f"{run}/node2  for node2 only" in done.output
    again = CliRunner().invoke(app, ["certificates", str(run), "--hosts", "node3"])
    assert isinstance(again.exception, UserError)
    assert "is not empty" in str(again.exception)


def test_without_the_package_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UserError, match=r"pip install 'manyhands\[tls\]', or bring your own"):
        make_certificates(tmp_path / "run", ["a"])
