"""Proves to each end of a connection that the other end has a key of the bus.

    receiver -> sender   {"key": K, "nonce": N}     the public key of its pair "client"
    sender -> receiver   {"nonce": M, "proof": P}   or the end of the connection, if K is not in authorized/
    receiver -> sender   {"proof": Q}

CURVE keys are X25519 keys: each end derives the shared secret from its own secret key and the other end's
public key. P and Q are the halves of the output of HKDF over the shared secret, both nonces and both public
keys. Computing P or Q requires one of the secret keys, and neither is valid for another connection.
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from protocol.host.curve_keys import KEY_BYTES, load_authorized, load_pair, load_public

CONTEXT = b"tether weights 1"
"""HKDF context, which separates these proofs from all other uses of the keys."""
KEY_DIR_VARIABLE = "_TETHER_CURVE_DIR"
"""Environment variable: directory of the keys with which an engine's processes fetch weights."""


class Proofs(NamedTuple):
    """The two proofs of one connection, as hexadecimal text; only its two ends can compute them."""

    sender: str
    receiver: str


class Challenge(NamedTuple):
    """Sender's side of the handshake on one connection."""

    answer: dict[str, str]
    """The line to send."""
    expected: str
    """Proof that the receiver must send."""


def fetch_with_keys(directory: str) -> None:
    """Set the key directory with which this process and its engine processes fetch weights; empty: none."""
    if directory:
        os.environ[KEY_DIR_VARIABLE] = str(Path(directory).absolute())
    else:
        os.environ.pop(KEY_DIR_VARIABLE, None)


class SenderKeys:
    """Keys of a sender, which authenticate receivers and prove that the sender has the run's key."""

    def __init__(self, directory: str | Path) -> None:
        """Read the key pair "server". Raises SettingsError if it cannot be read."""
        self._directory = directory
        self._public, self._secret = load_pair(directory, "server")

    def challenge(self, hello: Mapping[str, Any]) -> Challenge:
        """Return the reply to a receiver's first line. Raises ValueError if its key is not authorized."""
        key, nonce = _bytes(hello, "key"), _bytes(hello, "nonce")
        if z85.encode(key) not in load_authorized(self._directory):
            raise ValueError("the receiver's key is not in authorized/")
        own = secrets.token_bytes(KEY_BYTES)
        proofs = _proofs(z85.decode(self._secret), key, nonce + own, key + z85.decode(self._public))
        return Challenge({"nonce": own.hex(), "proof": proofs.sender}, proofs.receiver)


class ReceiverKeys:
    """Keys of a receiver for one connection: they prove its key and verify the sender's key."""

    def __init__(self, directory: str | Path) -> None:
        """Read the key pair "client" and the sender's public key. Raises SettingsError."""
        public, secret = load_pair(directory, "client")
        self._public, self._secret = z85.decode(public), z85.decode(secret)
        self._sender = z85.decode(load_public(directory))
        self._nonce = secrets.token_bytes(KEY_BYTES)

    def hello(self) -> dict[str, str]:
        """Return the first line of the handshake."""
        return {"key": self._public.hex(), "nonce": self._nonce.hex()}

    def answer(self, challenge: Mapping[str, Any]) -> dict[str, str]:
        """Return the reply to the sender's line. Raises ValueError if the line does not prove its key."""
        nonce = self._nonce + _bytes(challenge, "nonce")
        proofs = _proofs(self._secret, self._sender, nonce, self._public + self._sender)
        if not proves(challenge, proofs.sender):
            raise ValueError("the sender does not have the key of server.key")
        return {"proof": proofs.receiver}


def proves(line: Mapping[str, Any], expected: str) -> bool:
    """Return whether a line contains the expected proof, in constant time for wrong proofs."""
    return hmac.compare_digest(str(line.get("proof")).encode(), expected.encode())


def _proofs(secret: bytes, peer: bytes, nonces: bytes, keys: bytes) -> Proofs:
    """Return both proofs; `keys` are the public keys, the receiver's first. Raises ValueError."""
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(peer))
    made = HKDF(SHA256(), 2 * KEY_BYTES, nonces, CONTEXT + keys).derive(shared)
    return Proofs(made[:KEY_BYTES].hex(), made[KEY_BYTES:].hex())


def _bytes(line: Mapping[str, Any], name: str) -> bytes:
    found = line.get(name)
    value = bytes.fromhex(found) if isinstance(found, str) else b""
    if len(value) != KEY_BYTES:
        raise ValueError(f"the peer sent no {name} of {KEY_BYTES} bytes")
    return value
