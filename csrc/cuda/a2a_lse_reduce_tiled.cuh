// Combine of more than the marked words serve: one launch, one flag per (source, tile). A block
// pushes a tile of units to every peer, releases one flag per peer, and merges an earlier tile
// meanwhile. No arrival marks, hence no re-arm writes: the payload crosses memory once.
#pragma once

#include "a2a_lse_reduce.cuh"
#include "full_lse.cuh"

namespace dcp {

__device__ __forceinline__ uint64_t* tile_flag(const CombineParams& p, const Call& call,
                                               uint32_t at_rank, uint32_t source, uint32_t tile) {
  return reinterpret_cast<uint64_t*>(p.channel.peer[at_rank] + p.flag_offset) +
         region(p.channel, call.slot, source) * p.flag_capacity + tile;
}

template <int kRanks, typename Payload, int kChunks>
__device__ __forceinline__ void push_tile(const CombineParams& p, const Call& call, uint32_t tile) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Outgoing<kRanks, Payload, kChunks> outgoing;
#pragma unroll 1
  for (uint32_t i = warp; i < kTileUnits; i += kTileWarps) {
    const uint32_t index = tile * kTileUnits + i;
    if (index >= p.num_items) break;
    const UnitLane<kChunks> unit(p, index);
    outgoing.plan(p, unit, index);
    outgoing.template load<false>(p, unit);
    outgoing.template store<false, true>(p, call, unit);
  }
  // The barrier orders the block's stores before warp 0, whose release then covers them all.
  __syncthreads();
  if (warp == 0 && is_peer(p.channel, lane)) {
    st_release_sys_u64(tile_flag(p, call, lane, p.channel.rank, tile), epoch_tag(p.channel, call));
  }
}

template <int kRanks, typename Payload, int kChunks>
__device__ __forceinline__ void merge_tile(const CombineParams& p, const Call& call,
                                           uint32_t tile) {
  const Channel& channel = p.channel;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t source = is_peer(channel, lane) ? lane : channel.rank;
  const bool arrived = wait_for_tag(channel, call, tile_flag(p, call, channel.rank, source, tile),
                                    p.units_per_row(tile * kTileUnits));
  const char* base = channel.peer[channel.rank];
  const char* data_base = base + p.data_offset + region(channel, call.slot, 0) * p.data_capacity;
  const char* lse_base =
      base + p.lse_offset + region(channel, call.slot, source) * p.lse_capacity * 8;
#pragma unroll 1
  for (uint32_t i = warp; i < kTileUnits; i += kTileWarps) {
    const uint32_t index = tile * kTileUnits + i;
    if (index >= p.num_items) break;
    if (!arrived) {
      poison_unit<Payload, kChunks>(p, index);
      continue;
    }
    const UnitLane<kChunks> unit(p, index);
    if (unit.row >= rows_of(p, channel.rank)) continue;
    OwnPart<kChunks> own;
    own.load(p, unit);
    uint4 data[kRanks][kChunks];
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        data[s][c] = own.data[c];
        if (s < channel.world_size && s != channel.rank && unit.valid[c]) {
          data[s][c] = ld_stream_v4(data_base + s * p.data_capacity + unit.byte_offset(p) +
                                    c * kChunkStride);
        }
      }
    }
    float lse = own.lse;
    if (is_peer(channel, lane)) {
      lse = *reinterpret_cast<const float*>(lse_base + static_cast<uint64_t>(index) * 8);
    }
    merge_unit<kRanks, Payload, kChunks>(p, unit, data, lse);
  }
}

// One launch per call, kTileWarps warps a block. Block 0 does the rendezvous; the others take
// tiles block, block + blocks, ... and push `window` tiles ahead of the one they merge.
template <int kRanks, typename Payload, int kChunks>
__global__ void __launch_bounds__(kTileWarps * 32)
    a2a_lse_reduce_tiled_kernel(const __grid_constant__ CombineParams p) {
  take_turn(p.channel);
  const Call call = begin_block_call(p.channel);
  const uint32_t worker = (blockIdx.x - 1) * kTileWarps + threadIdx.x / 32;
  const uint32_t workers = (gridDim.x - 1) * kTileWarps;
  if (blockIdx.x == 0) {
    meet_peers(p.channel, call, true);
    return;
  }
  if (call.dead) {
    for (uint32_t i = worker; i < p.num_items; i += workers) poison_unit<Payload, kChunks>(p, i);
    if (p.full_lse_output != nullptr) merge_full_lse(p, call, worker, workers);
    return;
  }
  stress_point(p.channel, call, 0);

  const uint32_t tiles = (p.num_items + kTileUnits - 1) / kTileUnits;
  const uint32_t blocks = gridDim.x - 1;
  uint32_t ahead = blockIdx.x - 1;
  for (uint32_t w = 0; w <= p.window && ahead < tiles; ++w, ahead += blocks) {
    push_tile<kRanks, Payload, kChunks>(p, call, ahead);
  }
  if (threadIdx.x == 0) count_reader(p.channel);
  if (p.full_lse_output != nullptr) push_full_lse(p, call, worker, workers);
  stress_point(p.channel, call, 1);
  for (uint32_t tile = blockIdx.x - 1; tile < tiles; tile += blocks) {
    merge_tile<kRanks, Payload, kChunks>(p, call, tile);
    stress_point(p.channel, call, 2);
    if (ahead < tiles) {
      push_tile<kRanks, Payload, kChunks>(p, call, ahead);
      ahead += blocks;
    }
  }
  if (p.full_lse_output != nullptr) merge_full_lse(p, call, worker, workers);
}

}  // namespace dcp
