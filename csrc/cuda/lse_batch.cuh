// The LSE words of all units that a block sends at one time, stored by its first warp. Words of
// neighbouring units lie side by side, so that eight of them cross the link as one packet of 64
// bytes. Stored by a warp each, as where there are few units, every word is a packet: they took
// 3.4 % of the time of 64 tokens of 128 heads between two H200.
#pragma once

#include "a2a_lse_reduce.cuh"

namespace dcp {

// Word w of lane l: of unit first + l % 8, to rank l / 8 + 4 * w.
template <int kRanks>
struct LseBatch {
  static constexpr uint32_t kUnits = 8;  // at most, one a warp
  static constexpr int kWords = (kRanks * kUnits + 31) / 32;
  float lse[kWords];

  static __device__ __forceinline__ uint32_t rank_of(int w) {
    return threadIdx.x / kUnits + w * (32 / kUnits);
  }

  static __device__ __forceinline__ bool is_sent(const CombineParams& p, uint32_t rank,
                                                 uint32_t unit) {
    return is_peer(p.channel, rank) && threadIdx.x % kUnits < blockDim.x / 32 &&
           unit < p.num_items && p.units_per_row(unit) < rows_of(p, rank);
  }

  // The whole first warp of a block whose units begin with `first`.
  __device__ __forceinline__ void load(const CombineParams& p, uint32_t first) {
    const uint32_t unit = first + threadIdx.x % kUnits;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      lse[w] = kEmptyLse;
      const uint32_t rank = rank_of(w);
      const bool sent = is_sent(p, rank, unit);
      RowPosition at{0, 0};
      if (sent) {
        at = row_position(p, rank, p.units_per_row(unit));
        lse[w] = load_lse(p.lse, p.lse_dtype,
                          at.token * p.lse_stride_token + at.head * p.lse_stride_head);
      }
      if (p.seq_lens != nullptr && tokens_are_empty(p, at.token, sent)) lse[w] = kEmptyLse;
      lse[w] = without_marks(lse[w]);
    }
  }

  __device__ __forceinline__ void store(const CombineParams& p, const Call& call,
                                        uint32_t first) const {
    const uint32_t unit = first + threadIdx.x % kUnits;
    const uint64_t at =
        p.lse_offset + (call.slot ? p.lse_slot : 0) + (p.channel.rank * p.lse_capacity + unit) * 8;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t rank = rank_of(w);
      if (!is_sent(p, rank, unit)) continue;
      st_relaxed_sys_u64(p.channel.peer[rank] + at, lse_word(p.channel, call, lse[w]));
    }
  }
};

}  // namespace dcp
