"""A device on the CPU whose captured work is done anew in each replay, and attention that can be captured there."""

from __future__ import annotations

from array import array

import torch

from tokenmill.attention.base import RowLayout
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.engine.device import Captured, CpuDevice


class RerunDevice(CpuDevice):
    def __init__(self, room=1000):
        super().__init__(threads=1)
        self.room, self.num_captures, self.num_replays = room, 0, 0

    def stage(self, numbers):
        return self.upload(numbers)

    def upload(self, numbers):
        return super().upload(numbers).clone()

    def capture(self, work):
        if self.num_captures == self.room:
            raise torch.OutOfMemoryError
        self.num_captures += 1
        output = work().clone()

        def replay():
            self.num_replays += 1
            output.copy_(work())

        return Captured(replay, output, 1)


class CapturableAttention(ReferenceAttention):
    longest_row = 1000

    def plan_decode(self, slots, positions, page_table, page_size):
        ones = (1,) * len(slots)
        return self.plan(RowLayout(tuple(slots.tolist()), tuple(positions.tolist()), ones), page_table, page_size)

    def table_length(self, num_tokens, num_rows):
        return 1 + 3 * num_tokens

    def tables(self, layout, num_tokens, num_rows, spare_slot):
        rows = list(zip(layout.slots, layout.starts, layout.lengths, strict=True))
        rows += [(spare_slot, 0, 1)] * (num_tokens - sum(layout.lengths))
        numbers = array("i", [len(rows), *(number for row in rows for number in row)])
        return numbers + array("i", [0]) * (self.table_length(num_tokens, num_rows) - len(numbers))

    def plan_tables(self, tables, num_tokens, num_rows, page_table, page_size):
        count = int(tables[0])
        slots, starts, lengths = tables[1 : 1 + 3 * count].view(count, 3).T.tolist()
        return self.plan(RowLayout(tuple(slots), tuple(starts), tuple(lengths)), page_table, page_size)
