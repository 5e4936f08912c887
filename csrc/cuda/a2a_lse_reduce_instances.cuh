// Picks the instance of a combine kernel; included by one .cu file per payload dtype.
#pragma once

#include "a2a_lse_reduce_kernels.h"
#include "a2a_lse_reduce_lamport.cuh"
#include "a2a_lse_reduce_tiled.cuh"

namespace dcp {

template <int kRanks, typename Payload>
CombineKernelPointer pick_chunks(const CombineLaunch& launch) {
  if (launch.kernel == CombineKernel::kTiled) {
    return a2a_lse_reduce_tiled_kernel<kRanks, Payload, 1>;
  }
  if constexpr (kRanks <= 8) {
    if (launch.chunks_per_lane == 2) return a2a_lse_reduce_lamport_kernel<kRanks, Payload, 2, true>;
  }
  if constexpr (kRanks > 4) {
    if (launch.batches_lses) return a2a_lse_reduce_lamport_kernel<kRanks, Payload, 1, true>;
  }
  return a2a_lse_reduce_lamport_kernel<kRanks, Payload, 1, false>;
}

template <typename Payload>
CombineKernelPointer pick_ranks(const CombineLaunch& launch, uint32_t world_size) {
  if (world_size <= 2) return pick_chunks<2, Payload>(launch);
  if (world_size <= 4) return pick_chunks<4, Payload>(launch);
  if (world_size <= 8) return pick_chunks<8, Payload>(launch);
  return pick_chunks<16, Payload>(launch);
}

}  // namespace dcp
