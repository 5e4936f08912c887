// Gathers: every rank sends its rows to every peer, 16 bytes at a time, as bytes. What the two
// kernels share. q_gather.cuh and kv_gather.cuh say how rows map to their destination.
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

DCP_OUT_OF_LINE void poison_gather(const GatherParams& p, char* result, uint32_t thread,
                                   uint32_t stride) {
  for (uint32_t g = thread; g < p.num_chunks; g += stride) {
    for (uint32_t s = 0; s < p.channel.world_size; ++s) poison_chunk(p, result, s, g);
  }
}

}  // namespace dcp
