"""Shows the other end of a connection that this process knows the job's secret, without sending the secret.

Each end sends a challenge, and signs its first message with HMAC-SHA-256 over its role, the other end's challenge and
the message. So nothing that was sent before can be sent again, and nothing is parsed before its sender is known.
What follows the first two messages is not signed: the connection itself is trusted then.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

from dpsim.errors import CommunicationError

Role = Literal["launcher", "rank"]
CHALLENGE_BYTES = 32


def challenge() -> str:
    """Random hexadecimal digits, ``CHALLENGE_BYTES`` of them."""
    return secrets.token_hex(CHALLENGE_BYTES // 2)


def signed(secret: str, role: Role, challenge: str, message: str) -> bytes:
    """One line: the signature of ``message`` for who sent ``challenge``, a space, and the message (ASCII, one line)."""
    return f"{_signature(secret, role, challenge, message.encode())} {message}\n".encode()


def verified(secret: str, role: Role, challenge: str, line: bytes) -> bytes:
    """The message in a line that ``signed`` made. Raises ``CommunicationError`` where the signature is another."""
    signature, _, message = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(signature, _signature(secret, role, challenge, message).encode()):
        raise CommunicationError(f"the other end of the connection is no {role} of this job")
    return message


def _signature(secret: str, role: Role, challenge: str, message: bytes) -> str:
    return hmac.new(secret.encode(), f"{role} {challenge} ".encode() + message, "sha256").hexdigest()
