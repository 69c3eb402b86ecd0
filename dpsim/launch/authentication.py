"""How the launching process and a rank prove to each other that they know the job's secret, without sending it.

Each end sends a challenge, and signs its first message with HMAC-SHA-256 over its role, the other end's challenge and
the message. So a recorded message cannot be sent again, and nothing is parsed before its sender is known. Messages
after the first are not signed: from then on the connection itself is trusted.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

from dpsim.errors import CommunicationError

Role = Literal["launcher", "rank"]

VARIABLE = "DPSIM_JOB"
"""In the ranks' environment: the job's secret and the addresses to connect to. Other users cannot read it there."""

CHALLENGE_BYTES = 32


def challenge() -> str:
    """``CHALLENGE_BYTES`` random hexadecimal digits."""
    return secrets.token_hex(CHALLENGE_BYTES // 2)


def signed(secret: str, role: Role, challenge: str, message: str) -> bytes:
    """One line: the signature of ``message`` in answer to ``challenge``, a space, and the message (ASCII, one line)."""
    return f"{_signature(secret, role, challenge, message.encode())} {message}\n".encode()


def verified(secret: str, role: Role, challenge: str, line: bytes) -> bytes:
    """The message in a line that ``signed`` made. Raises ``CommunicationError`` if the signature does not match."""
    signature, _, message = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(signature, _signature(secret, role, challenge, message).encode()):
        raise CommunicationError(f"the other end of the connection is no {role} of this job")
    return message


def _signature(secret: str, role: Role, challenge: str, message: bytes) -> str:
    return hmac.new(secret.encode(), f"{role} {challenge} ".encode() + message, "sha256").hexdigest()
