// KV gather: rows [t, row_bytes] of every rank -> [N * t, row_bytes] in rank order.
#pragma once

#include "params.h"

namespace dcp {

inline void plan_kv_gather(GatherParams& p, uint32_t num_rows, uint32_t row_bytes) {
  p.row_bytes = row_bytes;
  p.row_chunks = FastDiv(row_bytes / 16);
  p.inner = FastDiv(1);
  p.num_chunks = num_rows * (row_bytes / 16);
  p.dst_outer_stride = row_bytes;
  p.rank_stride = static_cast<int64_t>(num_rows) * row_bytes;
  p.num_outer = num_rows;
  p.pad_chunks = 0;
}

}  // namespace dcp
