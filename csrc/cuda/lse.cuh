// Merge math: log-sum-exp inputs, row masks, weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "params.h"
#include "ptx.cuh"

namespace dcp {

constexpr float kEmptyLse = -__builtin_inff();

DCP_OUT_OF_LINE float load_converted(const void* base, Dtype dtype, int64_t index) {
  switch (dtype) {
    case Dtype::kFloat16:
      return __half2float(static_cast<const __half*>(base)[index]);
    case Dtype::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[index]);
    default:
      return static_cast<float>(static_cast<const double*>(base)[index]);
  }
}

// An LSE of any float dtype as fp32.
__device__ __forceinline__ float load_lse(const void* base, Dtype dtype, int64_t index) {
  return dtype == Dtype::kFloat32 ? static_cast<const float*>(base)[index]
                                  : load_converted(base, dtype, index);
}

// NaN and +inf mean "empty shard", as in the field.
__device__ __forceinline__ float without_marks(float lse) {
  return lse < __builtin_inff() ? lse : kEmptyLse;
}

// Whether token `t` has no local KV or is padding. The warp answers together, by a 32-way search
// (two steps up to 1024 requests).
__device__ __forceinline__ bool token_is_empty(const CombineParams& p, uint32_t t) {
  const int32_t* starts = p.query_start_loc;
  const int32_t token = static_cast<int32_t>(t);
  const uint32_t lane = threadIdx.x % 32;
  uint32_t low = 0, count = p.num_requests;  // requests [low, low + count) may end after t
  while (count > 0) {
    const uint32_t step = (count + 31) / 32;
    const uint32_t offset = lane * step;
    const bool ended = offset < count && starts[low + offset + 1] <= token;
    const uint32_t num_ended = __popc(__ballot_sync(kFullWarp, ended));
    if (num_ended == 0) break;
    const uint32_t skipped = (num_ended - 1) * step + 1;
    low += skipped;
    count = min(step - 1, count - skipped);
  }
  return low >= p.num_requests || p.seq_lens[low] <= 0;
}

enum class Emptiness { kEmpty, kFull, kUnknown };

// Spares the search where token `t` is of request `t`, as where each request has one token.
__device__ __forceinline__ Emptiness guess_emptiness(const CombineParams& p, uint32_t t) {
  if (t < p.num_requests) {
    const int32_t* starts = p.query_start_loc;
    const int32_t first = starts[t], last = starts[t + 1], length = p.seq_lens[t];
    const int32_t token = static_cast<int32_t>(t);
    evaluate_now(length);  // else it is asked for when the others are here
    if (first <= token && token < last) return length <= 0 ? Emptiness::kEmpty : Emptiness::kFull;
  }
  return Emptiness::kUnknown;
}

// The same for a token of each lane that has one. The warp answers together.
__device__ __forceinline__ bool tokens_are_empty(const CombineParams& p, uint32_t t, bool wanted) {
  const Emptiness guess = wanted ? guess_emptiness(p, t) : Emptiness::kFull;
  bool empty = guess == Emptiness::kEmpty;
  bool open = guess == Emptiness::kUnknown;
  while (const uint32_t lanes = __ballot_sync(kFullWarp, open)) {
    const uint32_t one = __shfl_sync(kFullWarp, t, __ffs(lanes) - 1);
    const bool answer = token_is_empty(p, one);
    if (open && t == one) {
      open = false;
      empty = answer;
    }
  }
  return empty;
}

// The merged LSE, in the base of the input, of the largest one and the sum of exp(lse - largest).
DCP_OUT_OF_LINE float merged_lse(float highest, float sum, float log2_base) {
  return sum > 0.0f ? highest + log2f(sum) / log2_base : kEmptyLse;
}

// Softmax weights over the ranks from each lane's LSE (lane s: rank s; others kEmptyLse). Sums in
// rank order, so every warp of every rank gets the same bits.
template <int kRanks>
struct MergeWeights {
  float weight[kRanks];
  float highest;  // valid in lanes below kRanks
  float sum;      // of exp(lse - highest); 0: the row is empty on all ranks

  __device__ __forceinline__ void compute(float own_lse, float log2_base) {
    highest = own_lse;
#pragma unroll
    for (int offset = kRanks / 2; offset > 0; offset /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, offset));
    }
    const float e = own_lse == kEmptyLse ? 0.0f : exp2_approx((own_lse - highest) * log2_base);
    sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      weight[s] = __shfl_sync(kFullWarp, e, s);
      sum += weight[s];
    }
    const float scale = sum > 0.0f ? reciprocal(sum) : 0.0f;
#pragma unroll
    for (int s = 0; s < kRanks; ++s) weight[s] *= scale;
  }
};

}  // namespace dcp
