# mypy: allow-untyped-defs
"""The memory through which the GPUs of one host exchange small messages, and the functions with which kernels
send and receive its words.

This is a push protocol, as in NCCL's LL and TensorRT-LLM's Lamport kernels. Every rank owns an *arena*:
device memory that all ranks have mapped. A rank writes its part of a message into the arenas of its peers,
and polls its own arena until the parts of its peers have arrived. A 32-bit word that has not arrived holds a
reserved value, so data and flag are one store, and no barrier or fence is needed.

An arena can be reused without a barrier for two reasons:
- Each program (CUDA block) of a grid has its own region, which no other program reads or writes, and counts
  its calls in device memory. The parity of the count selects one of the region's two halves, so replays of a
  CUDA graph need nothing from the host. All ranks must launch the same grids in the same order.
- The thread that reads a word writes the reserved value back at once. A peer writes that word again two calls
  later, after it has received this rank's part of the call in between. This rank sends that part only after
  the call that wrote the reserved value back has ended.

If a peer stops, the other ranks would poll forever. Therefore the poll loop also reads a word that the host
can set. Once it is set, results are undefined, every later call ends soon, and the group of ranks has to be
created anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EMPTY_WORD = -(1 << 31)
"""The word that marks "not arrived": -0.0 in float32, and in 16-bit floats a pair of +0.0 and -0.0. Payload
words of this value are sent as zero."""

PROGRAMS = 528
"""The largest grid. All programs must be resident at once, because each waits for programs on other GPUs. An
H100 or H200 holds four of them per multiprocessor."""

REGION_BLOCK = 512
"""Maximum number of words of an item."""


@dataclass(frozen=True, slots=True)
class Arena:
    """One rank's view of the memory through which a group of ranks exchanges messages."""

    rank: int
    world: int
    addresses: torch.Tensor
    """Start address of each rank's arena: [world] int64 on the device."""
    calls: torch.Tensor
    """Number of calls in which each program of the grid has taken part: [PROGRAMS] int32 on the device."""
    stop_address: int
    """Address, on host or device, of an int32 word. A value other than 0 ends all waiting."""
    items: int
    """Number of items, of up to REGION_BLOCK words each, that one program can exchange in a call."""

    @property
    def max_words(self) -> int:
        """The largest message in 32-bit words, if its rows divide into items of REGION_BLOCK words."""
        return self.items * PROGRAMS * REGION_BLOCK


def arena_words(world: int, items: int) -> int:
    """Return the size of an arena in 32-bit words. Every word must hold EMPTY_WORD before the first call."""
    return PROGRAMS * 2 * world * items * REGION_BLOCK


# ── functions that kernels call ────────────────────────────────────────────────────────────────────────

EMPTY = gl.constexpr(EMPTY_WORD)

_POLL = gl.constexpr("""{
.reg .pred missing;
.reg .u32 polls, stop;
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
ld.relaxed.sys.global.u32 stop, [$8];
setp.eq.u32 missing, stop, 0;
@missing bra again;
done:
}""")
"""Polls four words at once, because a thread owns four consecutive words. Reads the host's word at every
1,024th poll."""

_PUSH = gl.constexpr("""{
st.relaxed.sys.global.v4.b32 [$4], {$8, $9, $10, $11};
mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
}""")


@gluon.jit
def receive(address, stop):
    """Wait until four words per thread have arrived, and return them."""
    return gl.inline_asm_elementwise(
        _POLL, "=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l", [address, stop], gl.int32, False, 4
    )


@gluon.jit
def send(address, words):
    """Store four words per thread in any rank's arena."""
    gl.inline_asm_elementwise(_PUSH, "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [address, words], gl.int32, False, 4)


@gluon.jit
def signal(text: gl.constexpr):
    """Execute an instruction that has no operands."""
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, False, 1)
