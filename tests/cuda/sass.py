"""Reads the machine code of kernels from a cubin: how many bytes of global memory a thread has under way.

An instruction is 16 bytes since compute capability 7.0. A load names one of six scoreboards, and an
instruction that needs its result waits for that scoreboard. So bytes are under way from a load to the first
instruction that waits for its scoreboard. A branch ends the count, because what follows it may be reached
without the load. The figure of a kernel is its largest sum: that of its straightest path.
"""

import struct

OPCODE = 0xfff                  # bits of the lower half of an instruction
LOAD = 0x981                    # LDG
BRANCHES = {0x941, 0x944, 0x947, 0x949, 0x94d, 0x950, 0x343, 0x344}  # BSYNC, CALL, BRA, BRX, EXIT, RET
# Of the upper half: the first bit of a field, and its mask.
WIDTH, SCOREBOARD, WAITS = (9, 7), (46, 7), (52, 0x3f)
BYTES = (1, 1, 2, 2, 4, 8, 16, 0)
NO_SCOREBOARD = 7
EXECUTABLE = 4                  # a flag of sections


def sections(elf):
    """Name, flags and bytes of each section of a file of 64 bits."""
    table, = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name, _, flags, _, offset, length in headers:
        begin = headers[names][4] + name
        yield elf[begin:elf.index(b"\0", begin)].decode(), flags, elf[offset:offset + length]


def field(half, place):
    return half >> place[0] & place[1]


def most_under_way(code):
    most, loaded = 0, [0] * NO_SCOREBOARD
    for low, high in struct.iter_unpack("<QQ", code):
        ends, waits = low & OPCODE in BRANCHES, field(high, WAITS)
        loaded = [0 if ends or waits >> i & 1 else size for i, size in enumerate(loaded)]
        if low & OPCODE == LOAD and field(high, SCOREBOARD) != NO_SCOREBOARD:
            loaded[field(high, SCOREBOARD)] += BYTES[field(high, WIDTH)]
            most = max(most, sum(loaded))
    return most


def bytes_under_way(cubin):
    """For each kernel of a cubin its symbol, and the bytes that a thread has under way at most."""
    return {name.removeprefix(".text."): most_under_way(code)
            for name, flags, code in sections(cubin.read_bytes())
            if name.startswith(".text.") and flags & EXECUTABLE}
