"""Certificates, password files and tokens for the tests, made by openssl and crypt(3)."""

import base64
import pathlib
import subprocess

MADE_S = 30


def _openssl(*arguments: str, text: str | None = None) -> str:
    command = ["openssl", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=MADE_S)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


class Authority:
    """Signs certificates. Everything stands in `home`."""

    def __init__(self, home: pathlib.Path, name: str = "authority"):
        self.home = home
        self.key, self.certificate = home / f"{name}.key", home / f"{name}.crt"
        _make_key(self.key)
        _openssl("req", "-x509", "-new", "-key", str(self.key), "-out", str(self.certificate), "-days", "2",
                 "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip

    def sign(self, name: str, subject: str, alternative: str = "DNS:localhost,IP:127.0.0.1") -> tuple[pathlib.Path, pathlib.Path]:
        """A certificate, and its key."""
        key, request, certificate = (self.home / f"{name}{end}" for end in (".key", ".csr", ".crt"))
        _make_key(key)
        _openssl("req", "-new", "-key", str(key), "-out", str(request), "-subj", subject)
        extensions = self.home / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative}\nbasicConstraints=CA:FALSE\n")
        _openssl("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self.key),
                 "-CAcreateserial", "-out", str(certificate), "-days", "2", "-extfile", str(extensions))  # fmt: skip
        return certificate, key


def _make_key(path: pathlib.Path) -> None:
    # PKCS #8, which every client reads.
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(path))


def bcrypt(password: str, cost: int = 5) -> str:
    script = 'print crypt($ARGV[0], $ARGV[1])'
    salt = f"$2y${cost:02}$abcdefghijklmnopqrstuu"
    done = subprocess.run(["perl", "-e", script, password, salt], capture_output=True, text=True, timeout=MADE_S)
    assert done.stdout.startswith(salt[:7]), f"crypt(3) here knows no bcrypt: {done}"
    return done.stdout


def apr1(password: str) -> str:
    return _openssl("passwd", "-apr1", password)


def sha1(password: str) -> str:
    import hashlib

    return "{SHA}" + base64.b64encode(hashlib.sha1(password.encode()).digest()).decode()


def basic(user: str, password: str, url_safe: bool = False, padded: bool = True) -> str:
    """The value of `authorization`."""
    encode = base64.urlsafe_b64encode if url_safe else base64.b64encode
    text = encode(f"{user}:{password}".encode()).decode()
    return "Basic " + (text if padded else text.rstrip("="))
