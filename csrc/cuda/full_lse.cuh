// Optional merged LSE of all rows on every rank: each rank sends the LSEs of all its rows to all
// peers as words that carry epoch and signature; the reading lane re-arms them. Work item: one
// token, 32 heads, one warp.
#pragma once

#include "lse.cuh"
#include "payload.cuh"
#include "sync.cuh"

namespace dcp {

struct FullLseItem {
  uint32_t token, head;
  bool valid;

  __device__ __forceinline__ FullLseItem(const CombineParams& p, uint32_t item) {
    const uint32_t blocks = (p.num_heads + 31) / 32;
    token = item / blocks;
    head = (item - token * blocks) * 32 + threadIdx.x % 32;
    valid = head < p.num_heads;
  }
};

__device__ __forceinline__ uint32_t full_lse_items(const CombineParams& p) {
  return p.full_lse_output == nullptr ? 0 : p.num_tokens * ((p.num_heads + 31) / 32);
}

__device__ __forceinline__ float full_lse_own(const CombineParams& p, const FullLseItem& item) {
  const bool masked = p.seq_lens != nullptr && token_is_empty(p, item.token);
  if (masked || !item.valid) return kEmptyLse;
  return without_marks(load_lse(p.lse, p.lse_dtype,
                                item.token * p.lse_stride_token + item.head * p.lse_stride_head));
}

__device__ __forceinline__ uint64_t* full_lse_word(const CombineParams& p, const Call& call,
                                                   uint32_t at_rank, uint32_t source,
                                                   const FullLseItem& item) {
  const uint64_t word =
      (static_cast<uint64_t>(call.slot) * p.channel.world_size + source) * p.full_lse_capacity +
      static_cast<uint64_t>(item.token) * p.num_heads + item.head;
  return reinterpret_cast<uint64_t*>(p.channel.peer[at_rank] + p.full_lse_offset) + word;
}

__device__ __forceinline__ void push_full_lse(const CombineParams& p, Call call, uint32_t worker,
                                              uint32_t workers) {
  const uint64_t tag = p.channel.signature + call.epoch;
  for (uint32_t i = worker; i < full_lse_items(p); i += workers) {
    const FullLseItem item(p, i);
    const float lse = full_lse_own(p, item);
    if (!item.valid) continue;
    for (uint32_t peer = 0; peer < p.channel.world_size; ++peer) {
      if (peer == p.channel.rank) continue;
      st_relaxed_sys_u64(full_lse_word(p, call, peer, p.channel.rank, item),
                         (tag & 0xFFFFFFFFu) << 32 | __float_as_uint(lse));
    }
  }
}

// Merged LSE of this lane's row, or NaN after a fault.
__device__ __forceinline__ float receive_full_lse(const CombineParams& p, const Call& call,
                                                  const FullLseItem& item) {
  const float own = full_lse_own(p, item);
  const uint32_t expected_tag = p.channel.signature + call.epoch;
  float highest = own, sum = 0.0f;
  // Two passes over the sources, so that the sum runs in rank order without an array.
  for (uint32_t pass = 0; pass < 2; ++pass) {
    for (uint32_t source = 0; source < p.channel.world_size; ++source) {
      float lse = own;
      if (source != p.channel.rank) {
        uint64_t* word = full_lse_word(p, call, p.channel.rank, source, item);
        uint64_t seen = kArmedWord64;
        BoundedWait wait;
        while (true) {
          if (item.valid) seen = ld_relaxed_sys_u64(word);
          const bool here = !item.valid || seen != kArmedWord64;
          if (__all_sync(kFullWarp, here)) break;
          if (wait.give_up(p.channel)) {
            if (!here) report_fault(p.channel, call, FaultKind::kTimeout, source, item.token, 0);
            return __uint_as_float(0x7FFFFFFFu);
          }
        }
        const uint32_t tag = seen >> 32;
        const bool differs = item.valid && tag != expected_tag;
        if (differs) {
          report_fault(p.channel, call, FaultKind::kMismatch, source, item.token, tag - call.epoch);
        }
        if (__any_sync(kFullWarp, differs)) return __uint_as_float(0x7FFFFFFFu);
        lse = __uint_as_float(static_cast<uint32_t>(seen));
        if (pass == 1 && item.valid) st_relaxed_sys_u64(word, kArmedWord64);
      }
      if (pass == 0) {
        highest = fmaxf(highest, lse);
      } else if (lse != kEmptyLse) {
        sum += exp2_approx((lse - highest) * p.log2_base);
      }
    }
  }
  return merged_lse(highest, sum, p.log2_base);
}

__device__ __forceinline__ void merge_full_lse(const CombineParams& p, Call call, uint32_t worker,
                                               uint32_t workers) {
  for (uint32_t i = worker; i < full_lse_items(p); i += workers) {
    const FullLseItem item(p, i);
    const float lse = call.dead ? __uint_as_float(0x7FFFFFFFu) : receive_full_lse(p, call, item);
    if (item.valid) {
      p.full_lse_output[static_cast<uint64_t>(item.token) * p.num_heads + item.head] = lse;
    }
  }
}

}  // namespace dcp
