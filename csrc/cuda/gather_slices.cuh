// Gather of many rows: one launch, one flag per (source, slice).
#pragma once

#include "gather.cuh"

namespace dcp {

__device__ __forceinline__ uint64_t* slice_flag(const GatherParams& p, const Call& call,
                                                uint32_t at_rank, uint32_t source, uint32_t slice) {
  return reinterpret_cast<uint64_t*>(p.channel.peer[at_rank] + p.flag_offset) +
         gather_region(p, call.slot, source) * p.flag_capacity + slice;
}

// The chunks of one slice that this thread sends, all in flight at once.
template <int kRanks, Layout kLayout>
struct OutgoingSlice {
  uint32_t g;  // the first; the others lie kGatherThreads further each
  bool valid[kGatherBatch];
  int64_t destination[kGatherBatch];
  const char* from[kGatherBatch];
  uint4 data[kGatherBatch];

  __device__ __forceinline__ void plan(const GatherParams& p, uint32_t slice) {
    g = slice * p.slice_chunks + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kGatherBatch; ++i) {
      const uint32_t within = threadIdx.x + i * kGatherThreads;
      valid[i] = within < p.slice_chunks && slice * p.slice_chunks + within < p.num_chunks;
      const ChunkPosition at = chunk_position(p, g + i * kGatherThreads);
      destination[i] = at.destination;
      from[i] = p.input + at.source;
    }
  }

  // Makes the compiler finish plan() here.
  __device__ __forceinline__ void planned() const {
#pragma unroll
    for (int i = 0; i < kGatherBatch; ++i) {
      evaluate_now(destination[i]);
      evaluate_now(reinterpret_cast<uint64_t>(from[i]));
    }
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < kGatherBatch; ++i) ld_stream_v4_if(valid[i], from[i], data[i]);
  }

  // Where chunk i lies in a receiver's payload, from that payload's start.
  __device__ __forceinline__ int64_t at_receiver(const GatherParams& p, uint32_t slot,
                                                 int i) const {
    if constexpr (kLayout == Layout::kFinal) {
      return slot * p.data_slot + p.channel.rank * p.rank_stride + destination[i];
    }
    return slot * p.data_slot + p.channel.rank * p.data_capacity +
           static_cast<int64_t>(g + i * kGatherThreads) * 16;
  }

  // One store for all ranks, this one included, where nobody minds. Never run so far: see
  // docs/design.md.
  __device__ __forceinline__ void multicast(const GatherParams& p, uint32_t slot) const {
    char* base = p.channel.multicast + p.data_offset;
#pragma unroll
    for (int i = 0; i < kGatherBatch; ++i) {
      if (valid[i]) multimem_st_relaxed_sys_v4(base + at_receiver(p, slot, i), data[i]);
    }
    // The flags that follow, and the peers' reads, use each rank's own address.
    fence_alias();
  }

  // To every peer, straight to its final place or packed by source, and to the own result.
  __device__ __forceinline__ void store(const GatherParams& p, const Call& call) const {
    const Channel& channel = p.channel;
    const uint32_t slot = gather_slot(p, call);
    if (channel.multicast != nullptr) multicast(p, slot);
#pragma unroll
    for (int k = 1; k < kRanks; ++k) {
      if (k >= channel.world_size || channel.multicast != nullptr) break;
      char* base = channel.peer[next_peer(channel, k)] + p.data_offset;
#pragma unroll
      for (int i = 0; i < kGatherBatch; ++i) {
        if (valid[i]) st_weak_v4(base + at_receiver(p, slot, i), data[i]);
      }
    }
    // Packed, the launch that waits has the result.
    if (kLayout == Layout::kPacked && !p.wait) return;
    char* result = gather_result(p, slot) + channel.rank * p.rank_stride;
#pragma unroll
    for (int i = 0; i < kGatherBatch; ++i) {
      if (valid[i]) st_weak_v4(result + destination[i], data[i]);
    }
  }
};

// Sends a slice that is loaded and releases its flag at every peer. The whole block.
template <int kRanks, Layout kLayout>
__device__ __forceinline__ void push_slice(const GatherParams& p, const Call& call,
                                           const OutgoingSlice<kRanks, kLayout>& outgoing,
                                           uint32_t slice) {
  outgoing.store(p, call);
  // The barrier orders the block's stores before warp 0, whose release then covers them all.
  __syncthreads();
  if (threadIdx.x < 32 && is_peer(p.channel, threadIdx.x)) {
    st_release_sys_u64(slice_flag(p, call, threadIdx.x, p.channel.rank, slice),
                       epoch_tag(p.channel, call));
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
    const char* data = channel.peer[channel.rank] + p.data_offset + slot * p.data_slot;
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
  if (blockIdx.x == 0) {
    take_turn(p.channel);
    const Call call = begin_block_call(p.channel);
    if (p.wait) {
      meet_peers(p.channel, call, p.publish);
    } else {
      rendezvous(p.channel, call, true, false);
    }
    return;
  }
  const uint32_t slices = (p.num_chunks + p.slice_chunks - 1) / p.slice_chunks;
  const uint32_t blocks = gridDim.x - 1;
  uint32_t ahead = blockIdx.x - 1;
  OutgoingSlice<kRanks, kLayout> outgoing;
  outgoing.plan(p, ahead);
  outgoing.planned();
  take_turn(p.channel);
  const uint4 header = load_header(p.channel);
  if (p.publish) outgoing.load();
  Call call = make_call(p.channel, not_before_here(header));
  // The block meets at barriers, so its warps have to agree.
  call.dead = __syncthreads_or(call.dead);
  const uint32_t thread = (blockIdx.x - 1) * blockDim.x + threadIdx.x;
  const uint32_t stride = (gridDim.x - 1) * blockDim.x;
  char* result = gather_result(p, gather_slot(p, call));
  const bool fills_result = kLayout == Layout::kFinal ? p.publish : p.wait;
  if (call.dead) {
    if (p.wait) poison_gather(p, result, thread, stride);
    return;
  }
  stress_point(p.channel, call, 0);

  // Up to `window` slices are sent ahead of the one that is waited for.
  const uint32_t window = p.wait ? p.window : slices;
  uint32_t slice = ahead, to_send = window + 1;
  bool first = true;
#pragma unroll 1
  while (slice < slices || first) {
    for (; p.publish && ahead < slices && to_send > 0; --to_send, ahead += blocks) {
      if (ahead != blockIdx.x - 1) {
        outgoing.plan(p, ahead);
        outgoing.load();
      }
      push_slice<kRanks, kLayout>(p, call, outgoing, ahead);
    }
    if (first) {
      if (fills_result && p.pad_chunks > 0) zero_padding(p, result, thread, stride);
      if (!p.wait) return;
      if (threadIdx.x == 0) count_reader(p.channel);
      stress_point(p.channel, call, 1);
      first = false;
    }
    if (slice < slices) receive_slice<kRanks, kLayout>(p, call, slice);
    slice += blocks;
    ++to_send;
  }
}

}  // namespace dcp
