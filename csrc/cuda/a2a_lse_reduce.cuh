// Combine: what its two kernels share. Each rank sends every peer the rows that the peer ends up
// with, and merges what it receives by LSE. Row i of a destination occupies row i of each
// source's region there (ScatterMap says which token and head it is).
#pragma once

#include "lse.cuh"
#include "payload.cuh"
#include "sync.cuh"

namespace dcp {

// The chunks of one unit that this lane handles.
template <int kChunks>
struct UnitLane {
  uint32_t row;
  uint32_t part;  // index of the unit in its row
  uint32_t chunk[kChunks];
  bool valid[kChunks];

  __device__ __forceinline__ UnitLane(const CombineParams& p, uint32_t unit) {
    row = p.units_per_row(unit);
    part = unit - row * p.units_per_row.d;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const uint32_t within = k * 32 + threadIdx.x % 32;
      chunk[k] = part * p.unit_chunks + within;
      valid[k] = within < p.unit_chunks && chunk[k] < p.row_chunks;
    }
  }

  __device__ __forceinline__ uint64_t byte_offset(const CombineParams& p, int k) const {
    return (static_cast<uint64_t>(row) * p.row_chunks + chunk[k]) * 16;
  }
};

struct RowPosition {
  uint32_t token, head;
};

__device__ __forceinline__ RowPosition row_position(const CombineParams& p, uint32_t rank,
                                                    uint32_t row) {
  if (p.scatter.uniform) {
    const uint32_t t = p.scatter.uniform_heads(row);
    return {rank * p.scatter.token_step + t,
            rank * p.scatter.head_step + (row - t * p.scatter.uniform_heads.d)};
  }
  const FastDiv heads = p.scatter.heads[rank];
  const uint32_t t = heads(row);
  return {p.scatter.first_token[rank] + t, p.scatter.first_head[rank] + (row - t * heads.d)};
}

__device__ __forceinline__ uint32_t rows_of(const CombineParams& p, uint32_t rank) {
  return p.scatter.uniform ? p.scatter.uniform_rows : p.scatter.rows[rank];
}

__device__ __forceinline__ const char* partial_row(const CombineParams& p, RowPosition at) {
  return p.partial + at.token * p.stride_token + at.head * p.stride_head;
}

__device__ __forceinline__ float partial_lse(const CombineParams& p, RowPosition at) {
  return load_lse(p.lse, p.lse_dtype, at.token * p.lse_stride_token + at.head * p.lse_stride_head);
}

__device__ __forceinline__ uint32_t rotated_peer(const Channel& channel, uint32_t k) {
  const uint32_t peer = channel.rank + k;
  return peer >= channel.world_size ? peer - channel.world_size : peer;
}

// Start of the region that `source` writes in slot `slot`, in units of the capacity.
__device__ __forceinline__ uint64_t region(const Channel& channel, uint32_t slot, uint32_t source) {
  return slot * channel.world_size + source;
}

// One unit on its way to the peers, in registers. Entry k - 1 goes to peer (rank + k) % N, so
// that ranks do not all write to the same peer at the same time; lane k holds that row's LSE.
template <int kRanks, typename Payload, int kChunks>
struct Outgoing {
  uint4 data[kRanks - 1][kChunks];
  float lse;

  __device__ __forceinline__ void load(const CombineParams& p, const UnitLane<kChunks>& unit) {
    const uint32_t lane = threadIdx.x % 32;
    RowPosition mine{0, 0};
    bool sends = false;
#pragma unroll
    for (int k = 1; k < kRanks; ++k) {
      if (k >= p.channel.world_size) break;
      const uint32_t peer = rotated_peer(p.channel, k);
      if (unit.row >= rows_of(p, peer)) continue;
      const RowPosition at = row_position(p, peer, unit.row);
      const char* row = partial_row(p, at);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (unit.valid[c]) data[k - 1][c] = ld_stream_v4(row + unit.chunk[c] * 16u);
      }
      if (lane == k) {
        mine = at;
        sends = true;
      }
    }
    lse = sends ? partial_lse(p, mine) : kEmptyLse;
    if (p.seq_lens != nullptr) mask(p, unit.row);
  }

  __device__ __forceinline__ void mask(const CombineParams& p, uint32_t row) {
    if (p.scatter.same_tokens) {
      if (token_is_empty(p, row_position(p, p.channel.rank, row).token)) lse = kEmptyLse;
      return;
    }
    for (uint32_t k = 1; k < p.channel.world_size; ++k) {
      const uint32_t peer = rotated_peer(p.channel, k);
      if (row >= rows_of(p, peer)) continue;
      if (token_is_empty(p, row_position(p, peer, row).token) && threadIdx.x % 32 == k) {
        lse = kEmptyLse;
      }
    }
  }

  // kMarked: payload words carry their own arrival mark, the LSE word epoch and signature.
  // Otherwise a flag follows and everything is stored as it is. An empty row sends its LSE only.
  template <bool kMarked>
  __device__ __forceinline__ void store(const CombineParams& p, const Call& call,
                                        const UnitLane<kChunks>& unit, uint32_t unit_index) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t slot = region(p.channel, call.slot, p.channel.rank);
    const uint32_t full = __ballot_sync(kFullWarp, lse != kEmptyLse);
    char* lse_base = nullptr;
#pragma unroll
    for (int k = 1; k < kRanks; ++k) {
      if (k >= p.channel.world_size) break;
      const uint32_t peer = rotated_peer(p.channel, k);
      if (unit.row >= rows_of(p, peer)) continue;
      char* base = p.channel.peer[peer];
      if (lane == k) lse_base = base + p.lse_offset;
      if (!(full >> k & 1u)) continue;
      char* data_base = base + p.data_offset + slot * p.data_capacity;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (!unit.valid[c]) continue;
        char* to = data_base + unit.byte_offset(p, c);
        if constexpr (kMarked) {
          st_relaxed_sys_v4(to, without_armed_words<Payload>(data[k - 1][c]));
        } else {
          st_weak_v4(to, data[k - 1][c]);
        }
      }
    }
    if (lse_base == nullptr) return;
    if constexpr (kMarked) {
      const uint64_t tag = p.channel.signature + call.epoch;
      st_relaxed_sys_u64(lse_base + (slot * p.lse_capacity + unit_index) * 8,
                         (tag & 0xFFFFFFFFu) << 32 | __float_as_uint(lse));
    } else {
      *reinterpret_cast<float*>(lse_base + (slot * p.lse_capacity + unit_index) * 8) = lse;
    }
  }
};

// This rank's own part of a unit. Lane `rank` holds the LSE.
template <int kChunks>
struct OwnPart {
  uint4 data[kChunks];
  float lse;

  __device__ __forceinline__ void load(const CombineParams& p, const UnitLane<kChunks>& unit) {
    lse = kEmptyLse;
    if (unit.row >= rows_of(p, p.channel.rank)) return;
    const RowPosition at = row_position(p, p.channel.rank, unit.row);
    const char* row = partial_row(p, at);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (unit.valid[c]) data[c] = ld_stream_v4(row + unit.chunk[c] * 16u);
    }
    if (threadIdx.x % 32 == p.channel.rank) lse = partial_lse(p, at);
    if (p.seq_lens != nullptr && token_is_empty(p, at.token)) lse = kEmptyLse;
  }
};

// NaN in every element of the unit: what a row becomes when a peer did not arrive.
template <typename Payload, int kChunks>
__device__ __forceinline__ void poison_unit(const CombineParams& p, uint32_t unit_index) {
  const UnitLane<kChunks> unit(p, unit_index);
  if (unit.row >= rows_of(p, p.channel.rank)) return;
  const float nan = __uint_as_float(0x7FFFFFFFu);
  constexpr int kElements = PayloadTraits<Payload>::kElements;
  Accumulator<Payload> sum;
  sum.fill(nan);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!unit.valid[c]) continue;
    const uint64_t first = static_cast<uint64_t>(unit.row) * p.head_dim + unit.chunk[c] * kElements;
    store_output(p.output, p.output_dtype, first, sum.value);
  }
  if (p.lse_output != nullptr && unit.part == 0 && threadIdx.x % 32 == 0) {
    p.lse_output[unit.row] = nan;
  }
}

// Weighs and sums what all ranks sent for one unit (`data`, by rank; `lse`, lane s: rank s) and
// stores the result. A rank of weight 0 contributes nothing, whatever its payload holds.
template <int kRanks, typename Payload, int kChunks>
__device__ __forceinline__ void merge_unit(const CombineParams& p, const UnitLane<kChunks>& unit,
                                           const uint4 (&data)[kRanks][kChunks], float lse) {
  constexpr int kElements = PayloadTraits<Payload>::kElements;
  MergeWeights<kRanks> merge;
  merge.compute(lse, p.log2_base);
  const bool empty = !(merge.sum > 0.0f);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    Accumulator<Payload> sum;
    sum.fill(empty ? 0.0f : -0.0f);
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      if (merge.weight[s] != 0.0f) sum.add(data[s][c], merge.weight[s]);
    }
    const uint64_t first = static_cast<uint64_t>(unit.row) * p.head_dim + unit.chunk[c] * kElements;
    if (unit.valid[c]) store_output(p.output, p.output_dtype, first, sum.value);
  }
  if (p.lse_output != nullptr && unit.part == 0 && threadIdx.x % 32 == 0) {
    p.lse_output[unit.row] = merge.lse(p.log2_base);
  }
}

}  // namespace dcp
