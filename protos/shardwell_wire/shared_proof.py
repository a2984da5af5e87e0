"""The file by which a shard server and a trainer prove to each other that they share memory.

The file starts with a proof, which the server also sends, and goes on with a nonce, which it does not send. The trainer
finds the proof in the file that it mapped. It sends the nonce with every request, so the server knows that the sender
can read its files. They are private to one user of one host.
"""

from __future__ import annotations

from shardwell_wire.chunk_streams import Buffer

PROOF_BYTES, NONCE_BYTES = 32, 16


def session_name(transport_id: str, file: Buffer) -> str:
    """Returns how requests name a shm transport.

    Args:
        transport_id: ``OpenTransportResponse.transport_id``.
        file: The file, or at least its first ``PROOF_BYTES + NONCE_BYTES`` bytes.
    """
    return f"{transport_id}.{bytes(memoryview(file)[PROOF_BYTES : PROOF_BYTES + NONCE_BYTES]).hex()}"
