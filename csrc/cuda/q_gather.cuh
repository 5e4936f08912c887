// Query gather: [T, h, D] of every rank -> [T, N * h (+ padding), D], heads in rank order.
#pragma once

#include "params.h"

namespace dcp {

// Row (t, j) of rank r is row t * padded_heads + r * h + j of the result.
inline void plan_q_gather(GatherParams& p, uint32_t num_tokens, uint32_t heads,
                          uint32_t padded_heads, uint32_t row_bytes) {
  const uint32_t row_chunks = row_bytes / 16;
  p.row_bytes = row_bytes;
  p.row_chunks = FastDiv(row_chunks);
  p.inner = FastDiv(heads);
  p.num_chunks = num_tokens * heads * row_chunks;
  p.dst_outer_stride = static_cast<int64_t>(padded_heads) * row_bytes;
  p.rank_stride = static_cast<int64_t>(heads) * row_bytes;
  p.num_outer = num_tokens;
  p.pad_chunks = (padded_heads - heads * p.channel.world_size) * row_chunks;
}

}  // namespace dcp
