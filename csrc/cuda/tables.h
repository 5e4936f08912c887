// The launch tables that dcp_inductor/runtime/cuda_layout.py writes, as words of 64 bits.
#pragma once

#include <cstdint>

#include "params.h"

namespace dcp {

constexpr int64_t kCudaProtocol = 6;

struct ChannelTable {
  int64_t world_size;
  int64_t rank;
  int64_t timeout_ns;
  int64_t signature;
  int64_t site;
  int64_t share;      // launches that must be able to run on this GPU at the same time
  int64_t overlap;    // whether launches may overlap
  int64_t fault;      // address of the fault record
  int64_t multicast;  // address of the payload of all ranks at once, or 0
  int64_t header[kMaxRanks];
  int64_t peer[kMaxRanks];
};

struct CombineTable {
  ChannelTable channel;
  int64_t kernel;   // CombineKernel
  int64_t scatter;  // 0 heads, 1 tokens, 2 none
  int64_t is_lse_base_on_e;
  int64_t split[kMaxRanks];  // heads or tokens of each rank
  int64_t data_offset, data_capacity;
  int64_t lse_offset, lse_capacity;
  int64_t flag_offset, flag_capacity;
  int64_t full_lse_offset, full_lse_capacity;
};

struct GatherTable {
  ChannelTable channel;
  int64_t op;            // Op
  int64_t kernel;        // GatherKernel
  int64_t padded_heads;  // of the result
  int64_t data_offset, data_capacity;
  int64_t flag_offset, flag_capacity;
  int64_t publish, wait;  // which of the two the launch does
  int64_t view;           // the result stays in the channel, at data_offset, in one slot
};

constexpr int64_t kChannelWords = sizeof(ChannelTable) / 8;
constexpr int64_t kCombineWords = sizeof(CombineTable) / 8;
constexpr int64_t kGatherWords = sizeof(GatherTable) / 8;

}  // namespace dcp
