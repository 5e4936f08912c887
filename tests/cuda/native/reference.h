// The merge in fp64 on the host, from the op's definition in dcp_inductor/ops.py.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "params.h"

namespace dcp::reference {

inline int element_size(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

inline double decode(const char* at, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: {
      float v;
      std::memcpy(&v, at, 4);
      return v;
    }
    case Dtype::kFloat64: {
      double v;
      std::memcpy(&v, at, 8);
      return v;
    }
    case Dtype::kFloat16: {
      __half_raw raw;
      std::memcpy(&raw.x, at, 2);
      return __half2float(__half(raw));
    }
    default: {
      __nv_bfloat16_raw raw;
      std::memcpy(&raw.x, at, 2);
      return __bfloat162float(__nv_bfloat16(raw));
    }
  }
}

inline void encode(char* at, Dtype dtype, double value) {
  const float f = static_cast<float>(value);
  if (dtype == Dtype::kFloat64) {
    std::memcpy(at, &value, 8);
  } else if (dtype == Dtype::kFloat32) {
    std::memcpy(at, &f, 4);
  } else if (dtype == Dtype::kFloat16) {
    const __half_raw raw = __float2half(f);
    std::memcpy(at, &raw.x, 2);
  } else {
    const __nv_bfloat16_raw raw = __float2bfloat16(f);
    std::memcpy(at, &raw.x, 2);
  }
}

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

// What the op makes of an LSE value: fp32, NaN and +inf are an empty shard.
inline double clean_lse(double lse) {
  const float f = static_cast<float>(lse);
  return f < std::numeric_limits<float>::infinity() ? f : kEmpty;
}

struct Merged {
  std::vector<double> output;
  double lse;
  double magnitude;  // sum of |w * v|, largest over the elements: scale of rounding errors
};

// payload[s]: first element of source s's row.
inline Merged merge(const std::vector<const char*>& payload, const std::vector<double>& lse,
                    Dtype dtype, int head_dim, bool base_e) {
  Merged m{std::vector<double>(head_dim, 0.0), kEmpty, 0.0};
  double highest = kEmpty;
  for (double l : lse) highest = std::fmax(highest, l);
  if (highest == kEmpty) return m;
  const double scale = base_e ? 1.0 : std::log(2.0);
  double sum = 0.0;
  for (double l : lse) sum += std::exp((l - highest) * scale);
  m.lse = highest + std::log(sum) / scale;
  std::vector<double> weight;
  for (double l : lse) weight.push_back(std::exp((l - highest) * scale) / sum);
  for (int d = 0; d < head_dim; ++d) {
    double out = -0.0, magnitude = 0.0;
    for (size_t s = 0; s < lse.size(); ++s) {
      const double w = weight[s];
      if (static_cast<float>(w) == 0.0f) continue;
      const double v = decode(payload[s] + d * element_size(dtype), dtype);
      out += w * v;
      magnitude += std::fabs(w * v);
    }
    m.output[d] = out;
    if (magnitude > m.magnitude) m.magnitude = magnitude;
  }
  return m;
}

}  // namespace dcp::reference
