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
  uint32_t part;   // index of the unit in its row
  uint32_t chunk;  // the first; the others lie 32 further each
  bool valid[kChunks];

  __device__ __forceinline__ UnitLane(const CombineParams& p, uint32_t unit) {
    row = p.units_per_row(unit);
    part = unit - row * p.units_per_row.d;
    const uint32_t within = threadIdx.x % 32;
    chunk = part * p.unit_chunks + within;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      valid[c] = within + c * 32 < p.unit_chunks && chunk + c * 32 < p.row_chunks;
    }
  }

  // Of the first chunk, in a source's region and in an output of the payload's dtype.
  __device__ __forceinline__ uint64_t byte_offset(const CombineParams& p) const {
    return (static_cast<uint64_t>(row) * p.row_chunks + chunk) * 16;
  }
};

constexpr uint32_t kChunkStride = 32 * 16;  // bytes between the chunks of a lane

struct RowPosition {
  uint32_t token, head;
};

__device__ __forceinline__ RowPosition uneven_row_position(const ScatterMap& scatter, uint32_t rank,
                                                           uint32_t row) {
  const FastDiv heads = scatter.heads[rank];
  const uint32_t t = heads(row);
  return {scatter.first_token[rank] + t, scatter.first_head[rank] + (row - t * heads.d)};
}

__device__ __forceinline__ RowPosition row_position(const CombineParams& p, uint32_t rank,
                                                    uint32_t row) {
  if (!p.scatter.uniform) return uneven_row_position(p.scatter, rank, row);
  const uint32_t t = p.scatter.uniform_heads(row);
  return {rank * p.scatter.token_step + t,
          rank * p.scatter.head_step + (row - t * p.scatter.uniform_heads.d)};
}

__device__ __forceinline__ uint32_t rows_of(const CombineParams& p, uint32_t rank) {
  return p.scatter.uniform ? p.scatter.uniform_rows : p.scatter.rows[rank];
}

__device__ __forceinline__ const char* partial_row(const CombineParams& p, RowPosition at) {
  return p.partial + at.token * p.stride_token + at.head * p.stride_head;
}

__device__ __forceinline__ uint32_t rotated_peer(const Channel& channel, uint32_t k) {
  const uint32_t peer = channel.rank + k;
  return peer >= channel.world_size ? peer - channel.world_size : peer;
}

// `ranks`, bit s for rank s, with bit k for rank (rank + k) % N.
__device__ __forceinline__ uint32_t rotated_mask(const Channel& channel, uint32_t ranks) {
  return (ranks | ranks << channel.world_size) >> channel.rank;
}

// Start of the region that `source` writes in slot `slot`, in units of the capacity.
__device__ __forceinline__ uint64_t region(const Channel& channel, uint32_t slot, uint32_t source) {
  return slot * channel.world_size + source;
}

__device__ __forceinline__ bool any_row_is_masked(const CombineParams& p, uint32_t row) {
  bool mine = false;
  for (uint32_t rank = 0; rank < p.channel.world_size; ++rank) {
    if (row >= rows_of(p, rank)) continue;
    const bool empty = token_is_empty(p, row_position(p, rank, row).token);
    if (threadIdx.x % 32 == rank) mine = empty;
  }
  return mine;
}

// Whether lengths say that row `row` is empty: in lane s, of the part of rank s.
__device__ __forceinline__ bool row_is_masked(const CombineParams& p, uint32_t row) {
  if (p.seq_lens == nullptr) return false;
  if (!p.scatter.same_tokens) return any_row_is_masked(p, row);
  const uint32_t token = row_position(p, p.channel.rank, row).token;
  const Emptiness guess = guess_emptiness(p, token);
  return guess == Emptiness::kUnknown ? token_is_empty(p, token) : guess == Emptiness::kEmpty;
}

// An LSE with its arrival mark.
__device__ __forceinline__ uint64_t lse_word(const Channel& channel, const Call& call, float lse) {
  const uint64_t tag = channel.signature + call.epoch;
  return (tag & 0xFFFFFFFFu) << 32 | __float_as_uint(lse);
}

// One unit on its way to the peers, in registers. Entry k goes to rank (rank + k) % N, so that
// ranks do not all write to the same peer at the same time; entry 0 is this rank's own part.
// Lane s holds the LSE of rank s's row.
//
// Where things come from and go to is worked out apart from the transfer, which then is a few
// instructions: a warp runs them one after another, and 200 of them take as long as a hop.
template <int kRanks, typename Payload, int kChunks>
struct Outgoing {
  uint32_t row;
  uint32_t exists;  // bit s: rank s has this row
  const char* from[kRanks];
  int64_t lse_from;  // element of the LSEs
  char* to[kRanks];  // of slot 0, as all that follows
  char* lse_to;
  uint4 data[kRanks][kChunks];  // anything where there is no such row
  float lse;

  __device__ __forceinline__ void plan(const CombineParams& p, const UnitLane<kChunks>& unit,
                                       uint32_t unit_index) {
    const Channel& channel = p.channel;
    const uint32_t lane = threadIdx.x % 32, n = channel.world_size;
    const uint64_t region_start =
        p.data_offset + channel.rank * p.data_capacity + unit.byte_offset(p);
    row = unit.row;
    exists = 0;
    lse_from = 0;
    if (unit_index < p.num_items) {
      if (p.scatter.uniform) {
        if (unit.row < p.scatter.uniform_rows) exists = (1u << n) - 1;
      } else {
        for (uint32_t s = 0; s < n; ++s) exists |= (unit.row < p.scatter.rows[s] ? 1u : 0u) << s;
      }
    }
    const RowPosition first = row_position(p, 0, unit.row);
    const char* first_row = partial_row(p, first) + unit.chunk * 16u;
    if (p.scatter.uniform) {
      lse_from = first.token * p.lse_stride_token + first.head * p.lse_stride_head +
                 lane * p.lse_stride_rank;
    } else if (exists >> lane & 1u) {
      const RowPosition at = row_position(p, lane, unit.row);
      lse_from = at.token * p.lse_stride_token + at.head * p.lse_stride_head;
    }
#pragma unroll
    for (int k = 0; k < kRanks; ++k) {
      if (k >= n) break;
      const uint32_t peer = rotated_peer(channel, k);
      from[k] = p.scatter.uniform
                    ? first_row + peer * p.stride_rank
                    : partial_row(p, row_position(p, peer, unit.row)) + unit.chunk * 16u;
      to[k] = channel.peer[peer] + region_start;
    }
    lse_to = channel.peer[lane < n ? lane : 0] + p.lse_offset +
             (channel.rank * p.lse_capacity + unit_index) * 8;
  }

  // Makes the compiler finish plan() here.
  template <bool kWithLse>
  __device__ __forceinline__ void planned(const CombineParams& p) const {
#pragma unroll
    for (int k = 0; k < kRanks; ++k) {
      if (k >= p.channel.world_size) break;
      evaluate_now(reinterpret_cast<uint64_t>(from[k]));
      evaluate_now(reinterpret_cast<uint64_t>(to[k]));
    }
    evaluate_now(lse_from);
    if constexpr (kWithLse) evaluate_now(reinterpret_cast<uint64_t>(lse_to));
  }

  template <bool kWithOwn>
  __device__ __forceinline__ void load(const CombineParams& p, const UnitLane<kChunks>& unit) {
    const uint32_t lane = threadIdx.x % 32;
    const bool wanted = (exists >> lane & 1u) && (kWithOwn || lane != p.channel.rank);
    lse = wanted ? load_lse(p.lse, p.lse_dtype, lse_from) : kEmptyLse;
#pragma unroll
    for (int k = kWithOwn ? 0 : 1; k < kRanks; ++k) {
      if (k >= p.channel.world_size) break;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool here = rotated_mask(p.channel, exists) >> k & 1u && unit.valid[c];
        ld_stream_v4_if(here, from[k] + c * kChunkStride, data[k][c]);
      }
    }
    if (p.seq_lens != nullptr && row_is_masked(p, row)) lse = kEmptyLse;
    lse = without_marks(lse);
  }

  // kMarked: payload words carry their own arrival mark, the LSE word epoch and signature.
  // Otherwise a flag follows and everything is stored as it is. An empty row sends its LSE only,
  // and where not even that (kWithLse), another warp does.
  template <bool kMarked, bool kWithLse>
  __device__ __forceinline__ void store(const CombineParams& p, const Call& call,
                                        const UnitLane<kChunks>& unit) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t slot = call.slot ? p.data_slot : 0;
    const uint32_t full = rotated_mask(p.channel, __ballot_sync(kFullWarp, lse != kEmptyLse));
#pragma unroll
    for (int k = 1; k < kRanks; ++k) {
      if (k >= p.channel.world_size) break;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool sends = full >> k & 1u && unit.valid[c];
        char* at = to[k] + slot + c * kChunkStride;
        if constexpr (kMarked) {
          st_relaxed_sys_v4_if(sends, at, without_armed_words<Payload>(data[k][c]));
        } else if (sends) {
          st_weak_v4(at, data[k][c]);
        }
      }
    }
    if (!kWithLse || !(exists >> lane & 1u) || lane == p.channel.rank) return;
    char* at = lse_to + (call.slot ? p.lse_slot : 0);
    if constexpr (kMarked) {
      st_relaxed_sys_u64(at, lse_word(p.channel, call, lse));
    } else {
      *reinterpret_cast<float*>(at) = lse;
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
    const char* row = partial_row(p, at) + unit.chunk * 16u;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (unit.valid[c]) data[c] = ld_stream_v4(row + c * kChunkStride);
    }
    const bool empty = row_is_masked(p, unit.row);
    if (threadIdx.x % 32 != p.channel.rank || empty) return;
    lse = load_lse(p.lse, p.lse_dtype, at.token * p.lse_stride_token + at.head * p.lse_stride_head);
    lse = without_marks(lse);
  }
};

// Rounds once and stores the chunk that starts at `offset` bytes of an output of the payload's
// dtype.
template <typename Payload>
__device__ __forceinline__ void store_output(const CombineParams& p, uint64_t offset,
                                             const Accumulator<Payload>& sum) {
  if (p.output_dtype == PayloadTraits<Payload>::kDtype) {
    store_as(p.output + offset, PayloadTraits<Payload>::kDtype, sum.value);
  } else {
    store_converted(p.output, p.output_dtype, offset, sum);
  }
}

// NaN in every element of the unit: what a row becomes when a peer did not arrive.
template <typename Payload, int kChunks>
DCP_OUT_OF_LINE void poison_unit(const CombineParams& p, uint32_t unit_index) {
  const UnitLane<kChunks> unit(p, unit_index);
  if (unit.row >= rows_of(p, p.channel.rank)) return;
  const float nan = __uint_as_float(0x7FFFFFFFu);
  Accumulator<Payload> sum;
  sum.fill(nan);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (unit.valid[c]) store_output(p, unit.byte_offset(p) + c * kChunkStride, sum);
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
    if (unit.valid[c]) store_output(p, unit.byte_offset(p) + c * kChunkStride, sum);
  }
  if (p.lse_output != nullptr && unit.part == 0 && threadIdx.x % 32 == 0) {
    p.lse_output[unit.row] = merged_lse(merge.highest, merge.sum, p.log2_base);
  }
}

}  // namespace dcp
