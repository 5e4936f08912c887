// The LSE merge of one row: weights of its N shards, and their weighted sum in fp32.
//
// Shards are added in rank order, in blocks that stay in registers. The row functions are compiled
// for several instruction sets and one is picked when the library is first used, so that one
// binary runs on any machine of its architecture. No torch headers here.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "convert.h"
#include "sync.h"

namespace dcp {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// The shards of a row that have weight, in rank order.
struct Shards {
  int count;
  float share[kMaxRanks];
  const void* payload[kMaxRanks];
};

// Turns the N LSEs in `lse` into shares that add up to 1, or 0 where all are empty. NaN and +inf
// were made kEmpty by the sender. Returns the merged LSE.
inline float shares_of(float* lse, int64_t world_size, bool is_lse_base_on_e) {
  float highest = kEmpty;
  for (int64_t s = 0; s < world_size; ++s) highest = lse[s] > highest ? lse[s] : highest;
  if (highest == kEmpty) {
    for (int64_t s = 0; s < world_size; ++s) lse[s] = 0.0f;
    return kEmpty;
  }
  float total = 0.0f;
  for (int64_t s = 0; s < world_size; ++s) {
    const float distance = lse[s] - highest;
    lse[s] = is_lse_base_on_e ? std::exp(distance) : std::exp2(distance);
    total += lse[s];
  }
  for (int64_t s = 0; s < world_size; ++s) lse[s] /= total;
  return highest + (is_lse_base_on_e ? std::log(total) : std::log2(total));
}

template <typename In, typename Out>
DCP_INLINE void merge_row(const Shards& shards, void* output, int64_t head_dim) {
  constexpr int64_t kBlock = 64;
  Out* out = static_cast<Out*>(output);
  int64_t d = 0;
  for (; d + kBlock <= head_dim; d += kBlock) {
    float sum[kBlock] = {};
    for (int s = 0; s < shards.count; ++s) {
      const In* in = static_cast<const In*>(shards.payload[s]) + d;
      const float share = shards.share[s];
      for (int64_t i = 0; i < kBlock; ++i) sum[i] += share * widen(in[i]);
    }
    for (int64_t i = 0; i < kBlock; ++i) narrow(sum[i], out + d + i);
  }
  for (; d < head_dim; ++d) {
    float sum = 0.0f;
    for (int s = 0; s < shards.count; ++s)
      sum += shards.share[s] * widen(static_cast<const In*>(shards.payload[s])[d]);
    narrow(sum, out + d);
  }
}

using MergeRow = void (*)(const Shards&, void*, int64_t);

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

#if defined(__x86_64__) && defined(__GNUC__)
template <typename In, typename Out>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))) void merge_row_avx512(
    const Shards& shards, void* output, int64_t head_dim) {
  merge_row<In, Out>(shards, output, head_dim);
}
template <typename In, typename Out>
__attribute__((target("avx2,fma"))) void merge_row_avx2(const Shards& shards, void* output,
                                                        int64_t head_dim) {
  merge_row<In, Out>(shards, output, head_dim);
}
#endif
template <typename In, typename Out>
void merge_row_base(const Shards& shards, void* output, int64_t head_dim) {
  merge_row<In, Out>(shards, output, head_dim);
}

template <typename In, typename Out>
MergeRow pick_merge_row() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return merge_row_avx512<In, Out>;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return merge_row_avx2<In, Out>;
#endif
  return merge_row_base<In, Out>;
}

template <typename In>
MergeRow merge_row_to(Dtype out) {
  static const MergeRow to_float = pick_merge_row<In, float>();
  static const MergeRow to_bf16 = pick_merge_row<In, bf16>();
  static const MergeRow to_fp16 = pick_merge_row<In, fp16>();
  return out == kFloat32 ? to_float : out == kBFloat16 ? to_bf16 : to_fp16;
}

// Payload and output types: fp32, bf16 and fp16 in any combination.
inline MergeRow merge_row_for(Dtype in, Dtype out) {
  return in == kFloat32    ? merge_row_to<float>(out)
         : in == kBFloat16 ? merge_row_to<bf16>(out)
                           : merge_row_to<fp16>(out);
}

}  // namespace dcp
