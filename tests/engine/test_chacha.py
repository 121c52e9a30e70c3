"""The keystream of a device: the vectors of RFC 8439, another implementation, and that nothing is used twice."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dpsgd_cli.engine import chacha
from dpsgd_cli.engine.chacha import ChaCha, _quarter_rounds, blocks, head

KEY = bytes(range(32))


def keystream(key: bytes, tail: list[list[int]]) -> list[bytes]:
    """The 64 bytes of each block, from four words a block."""
    unsigned = torch.tensor(tail).T
    signed = torch.where(unsigned < 2**31, unsigned, unsigned - 2**32).to(torch.int32)
    words = blocks(head(key), signed, _quarter_rounds).flatten(0, 1)
    return [block.numpy().tobytes() for block in words.T.contiguous()]


def test_a_quarter_round_is_that_of_the_standard() -> None:
    """RFC 8439, Section 2.1.1."""
    given = torch.tensor([0x11111111, 0x01020304, 0x9B8D6F43 - 2**32, 0x01234567], dtype=torch.int32).view(4, 1, 1)
    found = [int(x) & (2**32 - 1) for x in _quarter_rounds(*given)]
    assert found == [0xEA2A92F4, 0xCB1CF8CE, 0x4581472E, 0x5881C4BB]


def test_blocks_are_those_of_the_standard() -> None:
    """RFC 8439, Section 2.3.2, and Appendix A.1, vectors 1 and 2, which are computed side by side."""
    words = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    # the bytes 00 00 00 09 00 00 00 4a 00 00 00 00 of the nonce, as words
    block = keystream(KEY, [[1, 0x09000000, 0x4A000000, 0]])[0]
    assert block == b"".join(int(word, 16).to_bytes(4, "little") for word in words.split(" "))
    first, second = keystream(bytes(32), [[0, 0, 0, 0], [1, 0, 0, 0]])
    assert first.hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert second.hex() == (
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


def test_words_are_the_keystream_of_another_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three draws of one key, 40, 1 and 8,000 words: every word of the blocks so far, none twice."""
    monkeypatch.setattr(os, "urandom", lambda size: KEY[:size])
    there, sizes = ChaCha(torch.device("cpu")), (40, 1, 8000)
    drawn = [there.words(size) for size in sizes]
    assert [len(words) for words in drawn] == list(sizes)
    used = [2 * -(-size // 16) for size in sizes]
    cipher = Cipher(algorithms.ChaCha20(KEY, bytes(16)), mode=None).encryptor()
    stream = torch.frombuffer(bytearray(cipher.update(bytes(64 * sum(used)))), dtype=torch.int32).view(-1, 16)
    for words, own in zip(drawn, stream.split(used), strict=True):
        # word w of blocks 2 i and 2 i + 1 make a word of 64 bits, low half first
        low, high = own[::2].T.reshape(-1).long() & (2**32 - 1), own[1::2].T.reshape(-1).long()
        assert torch.equal(words, (low | high << 32)[: len(words)])
    assert len({int(word) for words in drawn for word in words}) == sum(sizes)


def test_each_object_has_a_key_of_its_own_and_no_block_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(size: int) -> bytes:
        asked.append(size)
        return len(asked).to_bytes(size, "little")

    monkeypatch.setattr(os, "urandom", urandom)
    first, second = (ChaCha(torch.device("cpu")) for _ in range(2))
    assert asked == [32, 32]
    drawn = [one.words(64) for one in (first, first, second, second)]
    assert len({int(word) for words in drawn for word in words}) == 256


def test_a_key_has_an_end() -> None:
    """An int32 counts no further than 2^31 - 1."""
    there = ChaCha(torch.device("cpu"))
    there._next = 2**31 - 4
    there.words(32)
    with pytest.raises(ValueError, match="under one key"):
        there.words(1)
    with pytest.raises(ValueError, match="32 bytes, not 16"):
        head(bytes(16))


def test_no_shape_depends_on_a_number() -> None:
    """Traced on tensors without values, for a program of a compiler."""
    tail = torch.zeros(4, 6, dtype=torch.int32)
    tail[0] = torch.arange(6)
    whole = partial(blocks, rounds=_quarter_rounds)
    program = make_fx(whole, tracing_mode="fake")(head(KEY), tail)
    assert torch.equal(program(head(KEY), tail + 1), whole(head(KEY), tail + 1))


def failing(*rest: object) -> Any:
    raise RuntimeError("no compiler")


def wrong(graph: GraphModule, inputs: object) -> Any:
    return lambda *given: tuple(x + (x == x.flatten()[-1]) for x in graph(*given))


@pytest.mark.parametrize(("backend", "compiles"), [("aot_eager", True), (failing, False), (wrong, False)])
def test_rounds_are_compiled_when_enough_blocks_were_drawn(
    monkeypatch: pytest.MonkeyPatch, backend: Any, compiles: bool
) -> None:
    """Words are the same; a compiler that fails, or has another word, is not used."""
    made: list[chacha.Rounds] = []

    def compiled(device: torch.device) -> chacha.Rounds:
        made.append(ours(device, backend))
        return made[-1]

    ours = chacha._compiled.__wrapped__
    monkeypatch.setattr(os, "urandom", lambda size: KEY[:size])
    monkeypatch.setattr(chacha, "_compiled", compiled)
    monkeypatch.setattr(chacha, "WORTH_COMPILING", 10)
    plain, there = (ChaCha(torch.device("cpu")) for _ in range(2))
    monkeypatch.setattr(ChaCha, "computed", -100)
    wanted = plain.words(80), plain.words(8)
    monkeypatch.setattr(ChaCha, "computed", 0)
    assert torch.equal(there.words(80), wanted[0])  # ten blocks
    assert not made
    assert torch.equal(there.words(8), wanted[1])
    assert [rounds is not _quarter_rounds for rounds in made] == [compiles]
