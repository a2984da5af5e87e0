"""Tokens and proofs: only the key makes them, and they prove exactly what they say."""

from __future__ import annotations

import dataclasses

import pytest

from shardwell_wire.errors import AccessError, UnauthenticatedError
from shardwell_wire.security.tokens import INITIALIZER, LIFETIME_S, PROOF_BYTES, ClusterKey, Identity, Role, is_token

NOW = 1_700_000_000.0
KEY = ClusterKey("0123456789abcdef", lambda: NOW)
OTHER = ClusterKey("fedcba9876543210", lambda: NOW)


@pytest.mark.parametrize("name", ["gpt", "a.b", "100% ü/ .", "x" * 200, "é" * 200])
def test_token_proves_what_it_was_made_for(name: str) -> None:
    token = KEY.mint(Role.TRAINER, run=name, run_id="0011", member=name, lifetime_s=60)
    assert is_token(token)
    assert token.isascii()
    assert " " not in token
    expected = Identity(role=Role.TRAINER, run=name, run_id="0011", member=name, expires_s=int(NOW) + 60)
    assert KEY.verify(token) == KEY.verify(token) == expected
    assert ClusterKey(KEY.secret, lambda: NOW).verify(token) == expected, "no state besides the key"


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.SERVER, Role.OPERATOR])
def test_token_of_the_cluster_names_no_run(role: Role) -> None:
    assert KEY.verify(KEY.mint(role)) == Identity(role=role, expires_s=int(NOW) + LIFETIME_S)
    with pytest.raises(ValueError, match="must not name a run"):
        KEY.mint(role, run="r")


@pytest.mark.parametrize("role", [Role.TRAINER, Role.READER])
def test_token_of_a_run_must_name_it(role: Role) -> None:
    with pytest.raises(ValueError, match="must name a run"):
        KEY.mint(role)
    with pytest.raises(ValueError, match="run='r' and run_id='', expected both"):
        KEY.mint(role, run="r")


def test_token_for_any_run_of_a_name_is_refused() -> None:
    text = f"sw1.{KEY.name}.reader.r...{int(NOW) + 60}"
    with pytest.raises(UnauthenticatedError, match="does not have the run's id"):
        KEY.verify(f"{text}.{KEY._signature(text)}")


def test_every_changed_character_is_noticed() -> None:
    token = KEY.mint(Role.READER, run="r", run_id="0011")
    for at, character in enumerate(token):
        changed = f"{token[:at]}{'A' if character != 'A' else 'B'}{token[at + 1 :]}"
        with pytest.raises(UnauthenticatedError):
            KEY.verify(changed)
    assert KEY.verify(token).role is Role.READER


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda token: token.replace("reader", "operator"), "forged"),
        (lambda token: token.replace(".r.", ".s."), "forged"),
        (lambda token: f"{token}.", "something else than a token"),
        (lambda token: token.rpartition(".")[0], "something else than a token"),
        (lambda token: token.replace("sw1.", "sw2."), "something else than a token"),
        (lambda token: token + "A" * 5000, "something else than a token"),
        (lambda token: OTHER.mint(Role.READER, run="r", run_id="0011"), "another cluster"),
        (lambda token: token.replace(KEY.name, OTHER.name), "another cluster"),
        (lambda token: "", "something else than a token"),
        (lambda token: KEY.secret, "something else than a token"),
        (lambda token: token[:-1] + "é", "forged"),
    ],
)
def test_rejected_token_is_explained_and_not_shown(change: object, problem: str) -> None:
    token = KEY.mint(Role.READER, run="r", run_id="0011")
    assert callable(change)
    with pytest.raises(UnauthenticatedError, match=problem) as refused:
        KEY.verify(change(token))
    assert token.rpartition(".")[2] not in str(refused.value)
    assert KEY.secret not in str(refused.value)


def test_token_expires_also_after_it_was_verified() -> None:
    now = [NOW]
    key = ClusterKey(KEY.secret, lambda: now[0])
    token = key.mint(Role.OPERATOR, lifetime_s=10)
    now[0] += 9.9
    assert key.verify(token).role is Role.OPERATOR
    now[0] += 0.1
    with pytest.raises(UnauthenticatedError, match="the token of operator has expired") as refused:
        key.verify(token)
    assert refused.value.data["expired_s"] == str(int(NOW) + 10)


def test_number_of_remembered_tokens_is_limited() -> None:
    tokens = [KEY.mint(Role.READER, run=f"r{number}", run_id="0011") for number in range(5000)]
    for token in tokens:
        KEY.verify(token)
    assert len(KEY._verified) == 4096
    assert KEY.verify(tokens[0]).run == "r0"


def test_lease_proof_is_for_one_lease() -> None:
    proof = KEY.lease_proof("0011", 3, 7)
    assert len(proof) == PROOF_BYTES
    KEY.check_lease("0011", 3, 7, proof)
    for run_id, lease, epoch in (("0012", 3, 7), ("0011", 2, 7), ("0011", 3, 8), ("0011", INITIALIZER, 7)):
        with pytest.raises(AccessError, match=r"does not prove that (rank|initial)"):
            KEY.check_lease(run_id, lease, epoch, proof)
    for wrong in (b"", proof[:-1], OTHER.lease_proof("0011", 3, 7)):
        with pytest.raises(AccessError):
            KEY.check_lease("0011", 3, 7, wrong)


def test_purposes_have_different_macs() -> None:
    assert KEY.answer_proof(b"", b"0011.3.7")[:PROOF_BYTES] != KEY.lease_proof("0011", 3, 7)
    assert KEY.answer_proof(b"n", b"a") != KEY.answer_proof(b"m", b"a")
    assert KEY.name != OTHER.name


def test_repr_does_not_show_the_key() -> None:
    assert KEY.secret not in f"{KEY!r} {KEY} {dataclasses.replace(KEY)}"
