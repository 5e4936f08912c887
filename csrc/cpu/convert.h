// Widening and rounding between fp32 and the 16-bit payload types, free of branches so that the
// compiler vectorises the loops around them. No torch headers here.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define DCP_INLINE inline __attribute__((always_inline))
#else
#define DCP_INLINE inline
#endif

namespace dcp {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

DCP_INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
DCP_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

DCP_INLINE float widen(float value) { return value; }
DCP_INLINE float widen(double value) { return static_cast<float>(value); }
DCP_INLINE float widen(bf16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
DCP_INLINE float widen(fp16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  // The product moves the exponent bias, and normalises subnormals on the way.
  uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
  scaled |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // infinity and NaN
  return float_of(sign | scaled);
}

DCP_INLINE void narrow(float value, float* out) { *out = value; }
DCP_INLINE void narrow(float value, bf16* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}
DCP_INLINE void narrow(float value, fp16* out) {
  const uint32_t all = bits_of(value);
  const uint32_t bits = all & 0x7fffffffu;
  // Normal results: move the bias, round to even on the 13 bits that go.
  const uint32_t normal = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 aligns the mantissa at the place where it is cut.
  const uint32_t subnormal = bits_of(float_of(bits) + 0.5f) - 0x3f000000u;
  const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t half = bits < 0x38800000u ? subnormal : normal;
  half = bits >= 0x47800000u ? special : half;
  out->bits = static_cast<uint16_t>(half | (all >> 16 & 0x8000u));
}

}  // namespace dcp
