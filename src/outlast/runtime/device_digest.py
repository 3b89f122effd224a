"""Digests of a checkpoint's chunks, computed by the device that holds them: xxh3_64, as on the host.

A load reads the data into the device's memory anyway, where a digest costs next to nothing, while on the host it takes
a core for as long as reading does. It also covers the data as it arrived, not as it was sent.

NVRTC, which comes with torch for CUDA, compiles the kernel in a fraction of a second, without a compiler on the
machine. The first digest in a process is compared with the host's. If any of this fails, the host computes the digests.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from outlast.runtime.device import architecture_of, in_background
from outlast.runtime.device_copies import Copied, DeviceCopies

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
_TRY_S = 10.0
"""Seconds that the device gets for the first digest, which is compared with the host's."""
_found: dict[tuple[torch.device, int], ChunkDigests | None] = {}
_lock = threading.Lock()
_lost: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Memory to which the device may still write."""
MAX_CHUNKS = 64
"""Chunks per call."""
_LANES = 32
"""Threads per chunk."""
_AHEAD = 16
"""KiB of read-ahead; with less, memory latency dominates."""
_NUM_STREAMS = 4
"""Streams in use: the digest of one chunk keeps a small part of a device busy, for about a millisecond."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""H3's default secret, without a seed. This and the kernel follow the specification (xxHash, doc/xxhash_spec.md): a
block of 1 KiB is 16 stripes of eight words; each stripe is added to eight sums, with the secret shifted on by a word,
and after each block the sums are scrambled. The last stripe has a key of its own and is not followed by scrambling."""
_SOURCE = """
typedef unsigned long long u64;
struct Chunks { const u64* at[MAX_CHUNKS]; };
__constant__ u64 SECRET[24] = { @secret@ }, LAST[8] = { @last@ }, MERGED[8] = { @merged@ };
__constant__ u64 START[8] = {
    0xC2B2AE3DULL, 0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
    0x85EBCA77C2B2AE63ULL, 0x85EBCA77ULL, 0x27D4EB2F165667C5ULL, 0x9E3779B1ULL
};

__device__ __forceinline__ u64 of_lane(u64 value, int distance) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
}

// A warp digests a chunk. Lane 8 * g + i adds word i of every stripe whose number is g modulo 4.
extern "C" __global__ void digest_chunks(Chunks chunks, u64* digests) {
    const int lane = threadIdx.x, word = lane % 8;
    const u64* next = chunks.at[blockIdx.x] + lane;
    const u64 stir = SECRET[16 + word], last = LAST[word];
    u64 sum = START[word], keys[4], ahead[AHEAD][4];
    for (int k = 0; k < 4; k++) keys[k] = SECRET[4 * k + lane / 8 + word];
#pragma unroll
    for (int b = 0; b < AHEAD; b++)
#pragma unroll
        for (int k = 0; k < 4; k++) ahead[b][k] = next[128 * b + 32 * k];
    for (int begin = 0; begin < BLOCKS; begin += AHEAD) {
        next += 128 * AHEAD;
        const bool is_end = begin + AHEAD == BLOCKS;
#pragma unroll
        for (int b = 0; b < AHEAD; b++) {
            u64 own = 0, other = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u64 value = ahead[b][k];
                const bool is_last = is_end && b == AHEAD - 1 && k == 3 && lane >= 24;
                const u64 keyed = value ^ (is_last ? last : keys[k]);
                other += value;
                own += (keyed & 0xFFFFFFFFULL) * (keyed >> 32);
                if (!is_end) ahead[b][k] = next[128 * b + 32 * k];
            }
            own += of_lane(other, 1);
            own += of_lane(own, 8);
            own += of_lane(own, 16);
            sum += own;
            if (!(is_end && b == AHEAD - 1)) sum = (sum ^ (sum >> 47) ^ stir) * 0x9E3779B1ULL;
        }
    }
    const u64 mine = sum ^ MERGED[word], neighbour = of_lane(mine, 1);
    u64 total = (mine * neighbour) ^ __umul64hi(mine, neighbour);
    total += of_lane(total, 2);
    total += of_lane(total, 4);
    total += BLOCKS * 1024ULL * 0x9E3779B185EBCA87ULL;
    total = (total ^ (total >> 37)) * 0x165667919E3779F9ULL;
    if (lane == 0) digests[blockIdx.x] = total ^ (total >> 32);
}
"""


class ChunkDigests:
    """Digests of chunks on one device, in streams of their own. Thread: any, one at a time."""

    def __init__(self, device: torch.device, kernel: _Kernel) -> None:
        self._kernel, self._copies = kernel, itertools.cycle([DeviceCopies(device) for _ in range(_NUM_STREAMS)])

    def queue(
        self,
        chunks: Sequence[torch.Tensor],
        into: torch.Tensor,
        behind: Copied,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> Copied:
        """Queue digests of chunks, and copies within the device; return a mark behind all of them. Blocks: never.

        Args:
            chunks: At most MAX_CHUNKS chunks on the device, of the kernel's length; must stay alive until done.
            into: As many int64 on the device for the digests' bits; must stay alive as well.
        """
        launch = partial(self._kernel.launch, [chunk.data_ptr() for chunk in chunks], into.data_ptr())
        return next(self._copies).queue(pairs, behind, launch)


class _Kernel:
    """The kernel, loaded into a device's context. Raises: RuntimeError, OSError, AttributeError if that fails."""

    def __init__(self, device: torch.device, architecture: str, num_bytes: int) -> None:
        import torch

        # Links NVRTC and the driver, wherever they are installed.
        self._library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        torch.zeros(1, device=device)  # the driver's calls need the device's context in this thread
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        image = self._compile(kernel_source(num_bytes), architecture)
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, b"digest_chunks")

    def launch(self, addresses: Sequence[int], digests: int, stream: int) -> None:
        chunks = (ctypes.c_uint64 * MAX_CHUNKS)(*addresses)
        into = ctypes.c_uint64(digests)
        given = (ctypes.c_void_p * 2)(ctypes.addressof(chunks), ctypes.addressof(into))
        grid, block = (len(addresses), 1, 1), (_LANES, 1, 1)
        self._call("cuLaunchKernel", self._function, *grid, *block, 0, ctypes.c_void_p(stream), given, None)

    def _compile(self, source: str, architecture: str) -> bytes:
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"digest.cu", 0, None, None)
        try:
            options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
            self._call("nvrtcCompileProgram", program, 1, options)
            self._call("nvrtcGetCUBINSize", program, ctypes.byref(size))
            image = ctypes.create_string_buffer(size.value)
            self._call("nvrtcGetCUBIN", program, image)
            return image.raw
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")


def kernel_source(num_bytes: int) -> str:
    """Return the kernel's source for chunks of ``num_bytes``, a multiple of the read-ahead."""

    def words(begin: int, number: int) -> str:
        places = range(begin, begin + 8 * number, 8)
        return ", ".join(f"0x{int.from_bytes(_SECRET[place : place + 8], 'little'):016X}ULL" for place in places)

    source = f"#define MAX_CHUNKS {MAX_CHUNKS}\n#define BLOCKS {num_bytes // 1024}\n#define AHEAD {_AHEAD}\n{_SOURCE}"
    for name, text in (("secret", words(0, 24)), ("last", words(121, 8)), ("merged", words(11, 8))):
        source = source.replace(f"@{name}@", text)
    return source


def find_digests(device: torch.device, num_bytes: int) -> ChunkDigests | None:
    """Return the digests for chunks of ``num_bytes`` (a multiple of 16 KiB) on a device; ``None``: the host computes
    them.

    Blocks: some tenths of a second the first time, while the kernel is compiled and tested. Thread: any.
    """
    with _lock:
        key = device, num_bytes
        if key not in _found:
            _found[key] = None
            if (architecture := architecture_of(device)) is not None:
                try:
                    with in_background(device):
                        digests = ChunkDigests(device, _Kernel(device, architecture, num_bytes))
                        _found[key] = _try(digests, device, num_bytes)
                except (OSError, AttributeError, RuntimeError) as error:
                    log.info("the host digests what is loaded, not the device: %s", error)
        return _found[key]


def _try(digests: ChunkDigests, device: torch.device, num_bytes: int) -> ChunkDigests:
    """Return ``digests`` if it agrees with the host on one chunk. Raises: RuntimeError."""
    import torch

    chunk = torch.arange(num_bytes // 8, dtype=torch.int64) * 0x1E3779B97F4A7C15  # differs everywhere
    there, found = (torch.zeros(size, dtype=torch.int64, device=device) for size in (chunk.numel(), 1))
    copies = DeviceCopies(device)
    if not digests.queue([there], found, copies.queue([(chunk, there)], copies.note_work())).wait(_TRY_S):
        _lost.append((there, found))  # the device may still write to them
        raise RuntimeError(f"a digest took the device longer than {_TRY_S:g} s")
    if (value := int(found.item()) % (1 << 64)) != (right := xxhash.xxh3_64_intdigest(chunk.numpy().data.cast("B"))):
        raise RuntimeError(f"the device digests a chunk to {value:016x}, which is {right:016x}")
    return digests
