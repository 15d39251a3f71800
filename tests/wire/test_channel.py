"""Pipes between threads of one process: order, batches, timeouts, and frames handed on undecoded."""

from __future__ import annotations

import threading

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.wire.channel import MemoryChannel, NullSender, PullChannel, PushChannel, address
from tokenmill.wire.messages import Abort, Probe, Stop, ToScheduler, pack_ids, unpack_ids


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def pipe(context, tmp_path):
    """The reading end, the writing end, and the address."""
    where = address(tmp_path, "pipe")
    reader = PullChannel(context, where, ToScheduler)
    writer = PushChannel(context, where)
    yield reader, writer, where
    writer.close()
    reader.close()


def receive(reader, count):
    messages = []
    while len(messages) < count:
        messages += reader.receive(30)
    return messages


def test_messages_arrive_whole_and_in_order(pipe):
    reader, writer, _ = pipe
    sent = [Abort([index, 2**40]) if index % 2 else Probe(index) for index in range(1000)]
    for message in sent:
        writer.send(message)
    assert receive(reader, 1000) == sent
    assert reader.receive(0) == []


def test_an_empty_pipe_gives_nothing_after_the_timeout(pipe):
    reader, _, _ = pipe
    assert reader.receive(0) == []
    assert reader.receive(0.01) == []


def test_waiting_for_ever_ends_with_the_first_message(pipe):
    reader, writer, _ = pipe
    writer_is_free = threading.Event()

    def send():
        writer_is_free.wait(30)
        writer.send(Probe(7))

    thread = threading.Thread(target=send)
    thread.start()
    writer_is_free.set()
    assert reader.receive(None) == [Probe(7)]
    thread.join()


def test_many_writers_share_a_reader(pipe, context):
    reader, writer, where = pipe
    other = PushChannel(context, where)
    for index in range(50):
        writer.send(Probe(index))
        other.send(Probe(1000 + index))
    serials = [message.serial for message in receive(reader, 100)]
    other.close()
    assert [serial for serial in serials if serial < 1000] == list(range(50))
    assert [serial for serial in serials if serial >= 1000] == list(range(1000, 1050))


def test_what_was_sent_before_the_reader_came_is_not_lost(context, tmp_path):
    where = address(tmp_path, "late")
    writer = PushChannel(context, where)
    for index in range(20):
        writer.send(Probe(index))
    reader = PullChannel(context, where, ToScheduler)
    assert receive(reader, 20) == [Probe(index) for index in range(20)]
    writer.close()
    reader.close()


def test_closing_sends_what_is_queued(pipe):
    reader, writer, _ = pipe
    writer.send(Stop())
    writer.close()
    assert receive(reader, 1) == [Stop()]


def test_the_memory_twin_never_waits_and_empties_itself():
    channel: MemoryChannel[int] = MemoryChannel()
    assert channel.receive(None) == []
    channel.send(1)
    channel.send(2)
    assert channel.receive() == [1, 2]
    assert channel.receive() == []
    channel.close()
    NullSender().send(1)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_are_four_little_endian_bytes_each(token_ids):
    packed = pack_ids(token_ids)
    assert packed == b"".join(token.to_bytes(4, "little", signed=True) for token in token_ids)
    assert unpack_ids(packed) == token_ids


def test_ids_over_int32_and_cut_bytes_are_errors():
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"abc")
