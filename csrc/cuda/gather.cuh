// Gathers: every rank sends its rows to every peer, 16 bytes at a time, as bytes. Two kernels:
// packets for few rows (one hop, each 4 bytes of data travel with the epoch), slices with flags
// for many. q_gather.cuh and kv_gather.cuh say how rows map to their destination.
#pragma once

#include "payload.cuh"
#include "sync.cuh"

namespace dcp {

struct ChunkPosition {
  int64_t source;       // byte offset in the input
  int64_t destination;  // byte offset in the result, without the rank's share
};

__device__ __forceinline__ ChunkPosition chunk_position(const GatherParams& p, uint32_t g) {
  const uint32_t row = p.row_chunks(g);
  const uint32_t c = g - row * p.row_chunks.d;
  const uint32_t o = p.inner(row);
  const uint32_t j = row - o * p.inner.d;
  return {o * p.src_outer_stride + j * p.src_inner_stride + c * 16,
          o * p.dst_outer_stride + static_cast<int64_t>(j) * p.row_bytes + c * 16};
}

__device__ __forceinline__ uint32_t next_peer(const Channel& channel, uint32_t k) {
  const uint32_t peer = channel.rank + k;
  return peer >= channel.world_size ? peer - channel.world_size : peer;
}

__device__ __forceinline__ uint64_t gather_region(const GatherParams& p, uint32_t slot,
                                                  uint32_t source) {
  return static_cast<uint64_t>(slot) * p.channel.world_size + source;
}

// Where the final result of this rank lies: fresh memory, or the channel itself.
__device__ __forceinline__ char* gather_result(const GatherParams& p, uint32_t slot) {
  if (p.output != nullptr) return p.output;
  return p.channel.peer[p.channel.rank] + p.data_offset + slot * p.data_capacity;
}

__device__ __forceinline__ uint32_t gather_slot(const GatherParams& p, const Call& call) {
  return p.num_slots == 1 ? 0 : call.slot;
}

// Zero heads behind the gathered ones; `stride` threads share the work.
__device__ __forceinline__ void zero_padding(const GatherParams& p, char* result, uint32_t thread,
                                             uint32_t stride) {
  const int64_t first = static_cast<int64_t>(p.rank_stride) * p.channel.world_size;
  for (uint32_t o = 0; o < p.num_outer && p.pad_chunks > 0; ++o) {
    for (uint32_t c = thread; c < p.pad_chunks; c += stride) {
      st_weak_v4(result + o * p.dst_outer_stride + first + c * 16u, make_uint4(0, 0, 0, 0));
    }
  }
}

// All-ones bytes (NaN in every float format) in place of chunk g of `source`.
__device__ __forceinline__ void poison_chunk(const GatherParams& p, char* result, uint32_t source,
                                             uint32_t g) {
  st_weak_v4(result + chunk_position(p, g).destination + source * p.rank_stride, armed_chunk());
}

__device__ __forceinline__ void poison_gather(const GatherParams& p, char* result, uint32_t thread,
                                              uint32_t stride) {
  for (uint32_t g = thread; g < p.num_chunks; g += stride) {
    for (uint32_t s = 0; s < p.channel.world_size; ++s) poison_chunk(p, result, s, g);
  }
}

// ---- few rows: packets ----------------------------------------------------------------------
// A chunk travels as four 8-byte elements (4 bytes of data, epoch). Nothing is ever re-armed: a
// word is current if and only if its epoch is. A warp's header word adds the signature.

struct PacketPair {
  ulonglong2 low, high;
};

__device__ __forceinline__ PacketPair make_packets(const uint4& chunk, uint32_t epoch) {
  const uint64_t tag = static_cast<uint64_t>(epoch) << 32;
  return {make_ulonglong2(tag | chunk.x, tag | chunk.y),
          make_ulonglong2(tag | chunk.z, tag | chunk.w)};
}

__device__ __forceinline__ bool packets_arrived(const PacketPair& packets, uint32_t epoch) {
  return static_cast<uint32_t>(packets.low.x >> 32) == epoch &&
         static_cast<uint32_t>(packets.low.y >> 32) == epoch &&
         static_cast<uint32_t>(packets.high.x >> 32) == epoch &&
         static_cast<uint32_t>(packets.high.y >> 32) == epoch;
}

__device__ __forceinline__ uint4 unpack_packets(const PacketPair& packets) {
  return make_uint4(static_cast<uint32_t>(packets.low.x), static_cast<uint32_t>(packets.low.y),
                    static_cast<uint32_t>(packets.high.x), static_cast<uint32_t>(packets.high.y));
}

template <int kRanks>
__device__ __forceinline__ void push_packets(const GatherParams& p, const Call& call,
                                             const uint4& chunk, uint32_t g, bool valid,
                                             char* result) {
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t slot = gather_region(p, call.slot, p.channel.rank);
  if (is_peer(p.channel, lane)) {
    st_relaxed_sys_u64(p.channel.peer[lane] + p.flag_offset + (slot * p.flag_capacity + g / 32) * 8,
                       epoch_tag(p.channel, call));
  }
  if (!valid) return;
  const PacketPair packets = make_packets(chunk, call.epoch);
#pragma unroll
  for (int k = 1; k < kRanks; ++k) {
    if (k >= p.channel.world_size) break;
    char* to = p.channel.peer[next_peer(p.channel, k)] + p.data_offset + slot * p.data_capacity +
               static_cast<uint64_t>(g) * 32;
    st_relaxed_sys_v2(to, packets.low);
    st_relaxed_sys_v2(to + 16, packets.high);
  }
  st_weak_v4(result + chunk_position(p, g).destination + p.channel.rank * p.rank_stride, chunk);
}

template <int kRanks>
__device__ __forceinline__ void receive_packets(const GatherParams& p, const Call& call, uint32_t g,
                                                bool valid, char* result) {
  const Channel& channel = p.channel;
  const uint32_t lane = threadIdx.x % 32, n = channel.world_size;
  const char* base = channel.peer[channel.rank];
  const char* data = base + p.data_offset + gather_region(p, call.slot, 0) * p.data_capacity +
                     static_cast<uint64_t>(g) * 32;
  const char* header =
      base + p.flag_offset +
      (gather_region(p, call.slot, lane < n ? lane : 0) * p.flag_capacity + g / 32) * 8;
  PacketPair packets[kRanks];
  uint32_t missing = valid ? ((1u << n) - 1) & ~(1u << channel.rank) : 0;
  uint64_t tag = epoch_tag(channel, call);
  bool header_missing = is_peer(channel, lane);
  BoundedWait wait;
  while (true) {
    if (header_missing) tag = ld_relaxed_sys_u64(header);
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      if (!(missing >> s & 1u)) continue;
      packets[s].low = ld_relaxed_sys_v2(data + s * p.data_capacity);
      packets[s].high = ld_relaxed_sys_v2(data + s * p.data_capacity + 16);
    }
    header_missing = header_missing && static_cast<uint32_t>(tag >> 32) != call.epoch;
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      if ((missing >> s & 1u) && packets_arrived(packets[s], call.epoch)) missing &= ~(1u << s);
    }
    if (__all_sync(kFullWarp, missing == 0 && !header_missing)) break;
    if (wait.give_up(channel)) {
      const uint32_t absent =
          __reduce_or_sync(kFullWarp, missing) | __ballot_sync(kFullWarp, header_missing);
      if (absent != 0 && lane == 0) {
        report_fault(channel, call, FaultKind::kTimeout, __ffs(absent) - 1, g / 32, 0);
      }
      for (uint32_t s = 0; s < n && valid; ++s) poison_chunk(p, result, s, g);
      return;
    }
  }
  if (static_cast<uint32_t>(tag) != channel.signature) {
    report_fault(channel, call, FaultKind::kMismatch, lane, g / 32, static_cast<uint32_t>(tag));
  }
  const bool differs = __any_sync(kFullWarp, static_cast<uint32_t>(tag) != channel.signature);
  if (!valid) return;
  char* to = result + chunk_position(p, g).destination;
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
    if (s >= n || s == channel.rank) continue;
    st_weak_v4(to + s * p.rank_stride, differs ? armed_chunk() : unpack_packets(packets[s]));
  }
}

// One launch per call; the result is always fresh memory.
template <int kRanks>
__global__ void __launch_bounds__(kGatherThreads)
    gather_packets_kernel(const __grid_constant__ GatherParams p) {
  grid_dependency_wait();
  const uint2 epoch_and_dead = load_epoch_and_dead(p.channel);
  if (blockIdx.x == 0) {
    const Call call = make_call(p.channel, epoch_and_dead);
    rendezvous(p.channel, call, true, false);
    const uint32_t ticket = block_arrive(p.channel);
    rendezvous(p.channel, call, false, true);
    finish_call(p.channel, call, ticket);
    return;
  }
  const uint32_t first = (blockIdx.x - 1) * blockDim.x + threadIdx.x;
  const uint32_t stride = (gridDim.x - 1) * blockDim.x;
  const uint32_t end = (p.num_chunks + 31) / 32 * 32;  // whole warps
  uint4 chunk = armed_chunk();
  if (first < p.num_chunks) chunk = ld_stream_v4(p.input + chunk_position(p, first).source);
  const Call call = make_call(p.channel, epoch_and_dead);
  zero_padding(p, p.output, first, stride);
  if (call.dead) {
    block_arrive(p.channel);
    poison_gather(p, p.output, first, stride);
    return;
  }
  stress_point(p.channel, call, 0);
  if (first < end) push_packets<kRanks>(p, call, chunk, first, first < p.num_chunks, p.output);
  const uint32_t ticket = block_arrive(p.channel);
  for (uint32_t g = first + stride; g < end; g += stride) {
    const bool valid = g < p.num_chunks;
    if (valid) chunk = ld_stream_v4(p.input + chunk_position(p, g).source);
    push_packets<kRanks>(p, call, chunk, g, valid, p.output);
  }
  stress_point(p.channel, call, 1);
  for (uint32_t g = first; g < end; g += stride) {
    receive_packets<kRanks>(p, call, g, g < p.num_chunks, p.output);
  }
  finish_call(p.channel, call, ticket);
}

// ---- many rows: slices with flags -----------------------------------------------------------

__device__ __forceinline__ uint64_t* slice_flag(const GatherParams& p, const Call& call,
                                                uint32_t at_rank, uint32_t source, uint32_t slice) {
  return reinterpret_cast<uint64_t*>(p.channel.peer[at_rank] + p.flag_offset) +
         gather_region(p, call.slot, source) * p.flag_capacity + slice;
}

// Where chunk g of this rank lies in a receiver's payload, from that payload's start.
template <Layout kLayout>
__device__ __forceinline__ int64_t chunk_at_receiver(const GatherParams& p, uint32_t slot,
                                                     uint32_t g, int64_t destination) {
  if constexpr (kLayout == Layout::kFinal) {
    return slot * p.data_capacity + p.channel.rank * p.rank_stride + destination;
  }
  return gather_region(p, slot, p.channel.rank) * p.data_capacity + static_cast<int64_t>(g) * 16;
}

// One store for all ranks, this one included, where nobody minds. Never run so far: see
// docs/design.md.
template <Layout kLayout>
__device__ __forceinline__ void multicast_chunks(const GatherParams& p, uint32_t slot, uint32_t g0,
                                                 uint32_t end, const uint4 (&data)[kGatherBatch],
                                                 const int64_t (&destination)[kGatherBatch]) {
  char* base = p.channel.multicast + p.data_offset;
#pragma unroll
  for (int i = 0; i < kGatherBatch; ++i) {
    const uint32_t g = g0 + i * kGatherThreads;
    if (g >= end) continue;
    multimem_st_relaxed_sys_v4(base + chunk_at_receiver<kLayout>(p, slot, g, destination[i]),
                               data[i]);
  }
  // The flags that follow, and the peers' reads, use each rank's own address.
  fence_alias();
}

// Sends one slice to every peer, straight to its final place or packed by source, and releases
// the slice's flag there.
template <int kRanks, Layout kLayout>
__device__ __forceinline__ void push_slice(const GatherParams& p, const Call& call,
                                           uint32_t slice) {
  const Channel& channel = p.channel;
  const uint32_t begin = slice * p.slice_chunks;
  const uint32_t end = min(begin + p.slice_chunks, p.num_chunks);
  const uint32_t slot = gather_slot(p, call);
  char* result = gather_result(p, slot) + channel.rank * p.rank_stride;
#pragma unroll 1
  for (uint32_t g0 = begin + threadIdx.x; g0 < end; g0 += kGatherThreads * kGatherBatch) {
    uint4 data[kGatherBatch];
    int64_t destination[kGatherBatch];
#pragma unroll
    for (int i = 0; i < kGatherBatch; ++i) {
      const uint32_t g = g0 + i * kGatherThreads;
      if (g >= end) continue;
      const ChunkPosition at = chunk_position(p, g);
      destination[i] = at.destination;
      data[i] = ld_stream_v4(p.input + at.source);
    }
    if (channel.multicast != nullptr) {
      multicast_chunks<kLayout>(p, slot, g0, end, data, destination);
    }
#pragma unroll
    for (int k = 1; k < kRanks; ++k) {
      if (k >= channel.world_size || channel.multicast != nullptr) break;
      char* base = channel.peer[next_peer(channel, k)] + p.data_offset;
      if constexpr (kLayout == Layout::kFinal) {
        base += slot * p.data_capacity + channel.rank * p.rank_stride;
      } else {
        base += gather_region(p, slot, channel.rank) * p.data_capacity;
      }
#pragma unroll
      for (int i = 0; i < kGatherBatch; ++i) {
        const uint32_t g = g0 + i * kGatherThreads;
        if (g >= end) continue;
        st_weak_v4(
            base + (kLayout == Layout::kFinal ? destination[i] : static_cast<int64_t>(g) * 16),
            data[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kGatherBatch; ++i) {
      if (kLayout == Layout::kPacked && !p.wait) break;  // the launch that waits has the result
      if (g0 + i * kGatherThreads < end) st_weak_v4(result + destination[i], data[i]);
    }
  }
  // The barrier orders the block's stores before warp 0, whose release then covers them all.
  __syncthreads();
  if (threadIdx.x < 32 && is_peer(channel, threadIdx.x)) {
    st_release_sys_u64(slice_flag(p, call, threadIdx.x, channel.rank, slice),
                       epoch_tag(channel, call));
  }
}

// Waits for one slice of every peer and, unless it already lies in its final place, copies it.
template <int kRanks, Layout kLayout>
__device__ __forceinline__ void receive_slice(const GatherParams& p, const Call& call,
                                              uint32_t slice) {
  const Channel& channel = p.channel;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t begin = slice * p.slice_chunks;
  const uint32_t end = min(begin + p.slice_chunks, p.num_chunks);
  const uint32_t slot = gather_slot(p, call);
  const uint32_t source = is_peer(channel, lane) ? lane : channel.rank;
  // With the final layout one warp is enough: nobody reads before the kernel has ended.
  if (kLayout == Layout::kFinal && threadIdx.x >= 32) return;
  const bool arrived =
      wait_for_tag(channel, call, slice_flag(p, call, channel.rank, source, slice), slice);
  char* result = gather_result(p, slot);
  if (!arrived) {
    const uint32_t threads = kLayout == Layout::kFinal ? 32 : kGatherThreads;
    for (uint32_t g = begin + threadIdx.x; g < end; g += threads) {
      for (uint32_t s = 0; s < channel.world_size; ++s) poison_chunk(p, result, s, g);
    }
    return;
  }
  if constexpr (kLayout == Layout::kPacked) {
    const char* data =
        channel.peer[channel.rank] + p.data_offset + gather_region(p, slot, 0) * p.data_capacity;
#pragma unroll 1
    for (uint32_t g = begin + threadIdx.x; g < end; g += kGatherThreads) {
      const ChunkPosition at = chunk_position(p, g);
      char* to = result + at.destination;
      uint4 chunk[kRanks];
#pragma unroll
      for (int s = 0; s < kRanks; ++s) {
        if (s >= channel.world_size || s == channel.rank) continue;
        chunk[s] = ld_stream_v4(data + s * p.data_capacity + static_cast<uint64_t>(g) * 16);
      }
#pragma unroll
      for (int s = 0; s < kRanks; ++s) {
        if (s >= channel.world_size || s == channel.rank) continue;
        st_weak_v4(to + s * p.rank_stride, chunk[s]);
      }
      if (!p.publish) {
        st_weak_v4(to + channel.rank * p.rank_stride, ld_stream_v4(p.input + at.source));
      }
    }
  }
}

// One launch per call, or one that publishes and a later one that waits, with equal input; the
// epoch advances with the wait. A result in fresh memory is written by the launch that waits
// alone. Block 0 does the rendezvous; the others take slices block, block + blocks, ...
template <int kRanks, Layout kLayout>
__global__ void __launch_bounds__(kGatherThreads)
    gather_slices_kernel(const __grid_constant__ GatherParams p) {
  grid_dependency_wait();
  const Call call = begin_block_call(p.channel);
  if (blockIdx.x == 0) {
    rendezvous(p.channel, call, p.publish, false);
    if (!p.wait) return;
    const uint32_t ticket = threadIdx.x == 0 ? arrive(p.channel) : 0;
    rendezvous(p.channel, call, false, true);
    finish_call(p.channel, call, ticket);
    return;
  }
  const uint32_t thread = (blockIdx.x - 1) * blockDim.x + threadIdx.x;
  const uint32_t stride = (gridDim.x - 1) * blockDim.x;
  char* result = gather_result(p, gather_slot(p, call));
  const bool fills_result = kLayout == Layout::kFinal ? p.publish : p.wait;
  if (call.dead) {
    if (p.wait) poison_gather(p, result, thread, stride);
    return;
  }
  stress_point(p.channel, call, 0);
  if (fills_result) zero_padding(p, result, thread, stride);

  const uint32_t slices = (p.num_chunks + p.slice_chunks - 1) / p.slice_chunks;
  const uint32_t blocks = gridDim.x - 1;
  uint32_t ahead = p.publish ? blockIdx.x - 1 : slices;
  const uint32_t window = p.wait ? p.window : slices;
  for (uint32_t w = 0; w <= window && ahead < slices; ++w, ahead += blocks) {
    push_slice<kRanks, kLayout>(p, call, ahead);
  }
  if (!p.wait) return;
  const uint32_t ticket = threadIdx.x == 0 ? arrive(p.channel) : 0;
  stress_point(p.channel, call, 1);
  for (uint32_t slice = blockIdx.x - 1; slice < slices; slice += blocks) {
    receive_slice<kRanks, kLayout>(p, call, slice);
    if (ahead < slices) {
      push_slice<kRanks, kLayout>(p, call, ahead);
      ahead += blocks;
    }
  }
  finish_call(p.channel, call, ticket);
}

}  // namespace dcp
