# mypy: allow-untyped-defs
"""Defines the memory through which the GPUs of one host exchange small messages, and the device functions
that send and receive its words.

Like NCCL's LL protocol and TensorRT-LLM's Lamport kernels, the protocol pushes data. Every rank owns an
*arena*: device memory that all ranks have mapped. A rank writes its part of a message into its peers' arenas
and polls its own arena until its peers' parts have arrived. A 32-bit word that has not arrived contains a
reserved value, so a single store both transfers the data and signals its arrival, and no barrier or fence is
needed.

An arena can be reused without a barrier for two reasons:
- Each program (CUDA block) of a grid has a separate region of the arena and counts its calls in device
  memory. The parity of the count selects one of the region's two halves, so replays of a CUDA graph need no
  input from the host. All ranks must launch the same grids in the same order.
- After reading a word, a thread immediately writes the reserved value back. A peer overwrites the word only
  two calls later, and only after it has received this rank's part of the intermediate call. This rank sends
  that part only after its own first call has finished, and therefore has restored the reserved value.

If a peer stopped, the other ranks would poll forever. The poll loop therefore also reads a flag. Once this
flag is set, all calls return promptly with undefined results, and the group of ranks must be recreated. The
host sets a word in its own memory, and a thread that has polled for about 50 ms copies it to the flag, which
is in device memory. Threads must not read host memory more often. Reads of one address are serialised, so the
thousands of threads in a large grid would take about 1 ms, and two ranks would keep delaying each other by 1
ms in every subsequent call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EMPTY_WORD = -(1 << 31)
"""The reserved value of a word that has not arrived. As a float32, it is -0.0. As two 16-bit floats, it is
+0.0 and -0.0. Payload words with this value are sent as zero."""

PROGRAMS = 528
"""Maximum number of programs in a grid. All of them must be resident at the same time, because each waits for
programs on other GPUs. On an H100 or H200, four of them fit on a multiprocessor."""

REGION_BLOCK = 512
"""Maximum number of 32-bit words in an item. A program sends one item at a time."""


@dataclass(frozen=True, slots=True)
class Arena:
    """One rank's view of the memory through which a group of ranks exchanges messages."""

    rank: int
    world: int
    addresses: torch.Tensor
    """Start address of each rank's arena: [world] int64 on the device."""
    calls: torch.Tensor
    """Number of calls that each program has made: [PROGRAMS] int32 on the device."""
    stop_address: int
    """Address of the tensor returned by `stop_words`."""
    items: int
    """Maximum number of items that a program can exchange per call. An item has up to REGION_BLOCK words."""

    @property
    def max_words(self) -> int:
        """Maximum message size, in 32-bit words, if the message's rows divide evenly into items of
        REGION_BLOCK words."""
        return self.items * PROGRAMS * REGION_BLOCK


def stop_words(host_address: int, device: torch.device) -> torch.Tensor:
    """Return two words that let the host stop all polling on a device: [2] int64 on the device. The first is
    the flag that polling kernels check. The second is the address of an int32 word in page-locked host
    memory. The host sets this word to 1 to stop polling."""
    return torch.tensor([0, host_address], dtype=torch.int64, device=device)


def arena_words(world: int, items: int) -> int:
    """Return the size of an arena in 32-bit words. Every word must be set to EMPTY_WORD before the first
    message is exchanged."""
    return PROGRAMS * 2 * world * items * REGION_BLOCK


# ── functions that kernels call ────────────────────────────────────────────────────────────────────────

EMPTY = gl.constexpr(EMPTY_WORD)

_POLL = gl.constexpr("""{
.reg .pred missing;
.reg .u32 polls, stop;
.reg .u64 host;
mov.u32 polls, 0;
again:
ld.relaxed.sys.global.v4.u32 {$0, $1, $2, $3}, [$4];
setp.eq.u32 missing, $0, 0x80000000;
setp.eq.or.u32 missing, $1, 0x80000000, missing;
setp.eq.or.u32 missing, $2, 0x80000000, missing;
setp.eq.or.u32 missing, $3, 0x80000000, missing;
@!missing bra done;
add.u32 polls, polls, 1;
and.b32 stop, polls, 0x3ff;
setp.ne.u32 missing, stop, 0;
@missing bra again;
ld.relaxed.gpu.global.u32 stop, [$8];
setp.ne.u32 missing, stop, 0;
@missing bra done;
and.b32 stop, polls, 0xffff;
setp.ne.u32 missing, stop, 0;
@missing bra again;
ld.relaxed.gpu.global.u64 host, [$8+8];
ld.relaxed.sys.global.u32 stop, [host];
setp.eq.u32 missing, stop, 0;
@missing bra again;
st.relaxed.gpu.global.u32 [$8], stop;
done:
}""")
"""Assembly code that polls each thread's four consecutive words. Every 1,024th poll also reads the flag, and
every 65,536th also reads the host's word (`stop_words`)."""

_PUSH = gl.constexpr("""{
st.relaxed.sys.global.v4.b32 [$4], {$8, $9, $10, $11};
mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
}""")


@gluon.jit
def signal(text: gl.constexpr):
    """Execute an instruction without operands."""
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, False, 1)


@gluon.jit
def poll(address, stop):
    """Wait until four words per thread have arrived and return them."""
    return gl.inline_asm_elementwise(
        _POLL, "=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l", [address, stop], gl.int32, False, 4
    )


@gluon.jit
def send(address, words):
    """Store four words per thread in any rank's arena."""
    gl.inline_asm_elementwise(_PUSH, "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [address, words], gl.int32, False, 4)


@gluon.jit
def begin_call(
    addresses,
    calls,
    lane,
    region_items,
    RANK: gl.constexpr,
    WORLD: gl.constexpr,
    REGION_BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    """Wait for the results of earlier kernels and select the half of the program's region for this call.

    Returns four values:
    - the number of earlier calls,
    - the address in this rank's arena at which the words from rank 0 arrive,
    - the address to which this rank's words are written, relative to the start of a peer's arena,
    - the number of bytes from one rank's words to the next.
    """
    own = gl.load(addresses + RANK)
    if PDL:
        signal("griddepcontrol.launch_dependents; mov.u32 $0, 0;")
        signal("griddepcontrol.wait; mov.u32 $0, 0;")
    program = gl.program_id(0)
    call = gl.load(calls + program)
    source_bytes = region_items.to(gl.int64) * (REGION_BLOCK * 4)
    half = (program.to(gl.int64) * 2 + (call & 1)) * (WORLD * source_bytes)
    place = lane.to(gl.int64) * 4 + half
    return call, place + own, place + RANK * source_bytes, source_bytes


@gluon.jit
def payload(words):
    """Return the words with the reserved value replaced by zero."""
    return gl.where(words == EMPTY, 0, words)


@gluon.jit
def send_to_peers(addresses, sent, words, RANK: gl.constexpr, WORLD: gl.constexpr):
    """Send `words` to every other rank. sent: destination address, relative to the start of each receiver's
    arena."""
    for hop in gl.static_range(1, WORLD):
        send(sent + gl.load(addresses + (RANK + hop) % WORLD), words)


@gluon.jit
def receive(address, stop):
    """Wait for words to arrive, return them, and overwrite them in the arena with the reserved value."""
    words = poll(address, stop)
    send(address, words * 0 + EMPTY)
    return words
