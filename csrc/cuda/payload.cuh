// Payload chunks of 16 bytes: arrival marks, conversion to fp32, rounding to the output dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "params.h"
#include "ptx.cuh"

namespace dcp {

// A word that has not arrived. As payload it is a NaN (pair), so that senders can replace it by
// another NaN and every finite value, -0 and infinity crosses bit for bit.
constexpr uint32_t kArmedWord = 0xFFFFFFFFu;
constexpr uint64_t kArmedWord64 = ~0ull;

__device__ __forceinline__ uint4 armed_chunk() {
  return make_uint4(kArmedWord, kArmedWord, kArmedWord, kArmedWord);
}

__device__ __forceinline__ bool has_arrived(const uint4& v) {
  return v.x != kArmedWord && v.y != kArmedWord && v.z != kArmedWord && v.w != kArmedWord;
}

template <typename Payload>
struct PayloadTraits;

template <>
struct PayloadTraits<__nv_bfloat16> {
  static constexpr Dtype kDtype = Dtype::kBFloat16;
  static constexpr int kElements = 8;
  static constexpr uint32_t kSubstituteNan = 0x7FFF7FFFu;
  static __device__ __forceinline__ float2 unpack(uint32_t w) {
    return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
  }
};

template <>
struct PayloadTraits<__half> {
  static constexpr Dtype kDtype = Dtype::kFloat16;
  static constexpr int kElements = 8;
  static constexpr uint32_t kSubstituteNan = 0x7FFF7FFFu;
  static __device__ __forceinline__ float2 unpack(uint32_t w) {
    return __half22float2(*reinterpret_cast<const __half2*>(&w));
  }
};

template <>
struct PayloadTraits<float> {
  static constexpr Dtype kDtype = Dtype::kFloat32;
  static constexpr int kElements = 4;
  static constexpr uint32_t kSubstituteNan = 0x7FFFFFFFu;
};

template <typename Payload>
__device__ __forceinline__ uint4 without_armed_words(uint4 v) {
  constexpr uint32_t kNan = PayloadTraits<Payload>::kSubstituteNan;
  v.x = v.x == kArmedWord ? kNan : v.x;
  v.y = v.y == kArmedWord ? kNan : v.y;
  v.z = v.z == kArmedWord ? kNan : v.z;
  v.w = v.w == kArmedWord ? kNan : v.w;
  return v;
}

// fp32 accumulator of one chunk. Starts from -0, the neutral element of IEEE addition: a sum of
// one term is that term, -0 included.
template <typename Payload>
struct Accumulator {
  static constexpr int kElements = PayloadTraits<Payload>::kElements;
  float value[kElements];

  __device__ __forceinline__ void fill(float x) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) value[i] = x;
  }

  __device__ __forceinline__ void add(const uint4& chunk, float weight) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kElements == 4) {
        value[i] = fmaf(weight, __uint_as_float(words[i]), value[i]);
      } else {
        const float2 pair = PayloadTraits<Payload>::unpack(words[i]);
        value[2 * i] = fmaf(weight, pair.x, value[2 * i]);
        value[2 * i + 1] = fmaf(weight, pair.y, value[2 * i + 1]);
      }
    }
  }
};

__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pack_float16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int kElements>
__device__ __forceinline__ void store_as(char* to, Dtype dtype, const float (&value)[kElements]) {
  if (dtype == Dtype::kFloat32) {
#pragma unroll
    for (int i = 0; i < kElements / 4; ++i) {
      reinterpret_cast<float4*>(to)[i] =
          make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    }
    return;
  }
  uint32_t words[kElements / 2];
#pragma unroll
  for (int i = 0; i < kElements / 2; ++i) {
    words[i] = dtype == Dtype::kBFloat16 ? pack_bfloat16(value[2 * i], value[2 * i + 1])
                                         : pack_float16(value[2 * i], value[2 * i + 1]);
  }
  if constexpr (kElements == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

// To an output of another dtype; `offset` as if it were the payload's.
template <typename Payload>
DCP_OUT_OF_LINE void store_converted(char* output, Dtype dtype, uint64_t offset,
                                     Accumulator<Payload> sum) {
  const uint64_t element = offset / 16 * Accumulator<Payload>::kElements;
  store_as(output + element * (dtype == Dtype::kFloat32 ? 4 : 2), dtype, sum.value);
}

}  // namespace dcp
